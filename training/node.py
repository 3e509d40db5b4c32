"""A training run across machines: the command `craw4llm run`, started by torchrun.

    torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 \\
        -m training.node EXPERIMENT --only ARM.train --root /shared/artifacts

Every machine gets the same command; its arguments are those of `craw4llm run`. Rank 0 is that command. The others wait until its train
stage asks them to take part (`run_on_all`), and end when it does, with its exit code. The artifact root is a folder that all machines
share: all ranks write the states (`training.states`). torchrun itself ends with 1 whatever the ranks' code; what happened stands in
rank 0's last line. SIGTERM to any torchrun reaches its ranks, and the run saves and ends.
"""

import dataclasses
import os
import sys
from collections.abc import Callable
from typing import Any

from craw4llm.errors import ConfigError, Craw4LLMError, Stopped
from craw4llm.execution import Execution

_ranks: Any = None  # this process's, where torchrun started it (training.distributed.Ranks)


def size() -> int:
    """How many ranks torchrun has started; 0 where it started none."""
    return 0 if _ranks is None else int(_ranks.size)


def run_on_all(work: Callable[..., Any], args: tuple[Any, ...], execution: Execution) -> Any:
    """Called on rank 0: `work(*args, execution=..., ranks=...)` on all ranks; rank 0's result."""
    if execution.ranks > 1:
        raise ConfigError(f"ranks is {execution.ranks} under torchrun, which has started {size()}; leave --ranks out")
    _ranks.from_first((work, args, dataclasses.replace(execution, report=None)))
    return work(*args, execution=_own(execution), ranks=_ranks)


def main() -> int:
    global _ranks
    try:
        rank, count, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    except KeyError as error:
        print(f"error: {error.args[0]} is not set; expected to be started by torchrun: torchrun ... -m training.node", file=sys.stderr)
        return ConfigError.exit_code
    import torch

    from training.distributed import connect

    # the stage's device is not known yet; with CUDA in the machine, both kinds of groups can be made
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    _ranks = connect(rank, count, local, device, "env://")
    code = _lead() if rank == 0 else _follow()
    torch.distributed.destroy_process_group()
    return code


def _lead() -> int:
    from craw4llm.__main__ import main as command

    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)
    sys.argv = ["craw4llm", "run", *given[:end], "--jobs", "1", *given[end:]]  # in this process, which the others know
    code = 0
    try:
        command()
    except SystemExit as end:
        code = int(end.code or 0)
    if code not in (0, Stopped.exit_code):
        sys.stderr.flush()
        os._exit(code)  # the others may be anywhere: torchrun ends them
    _ranks.from_first(code)
    return code


def _follow() -> int:
    while True:
        asked = _ranks.from_first(None)
        if isinstance(asked, int):
            return asked
        work, args, execution = asked
        try:
            work(*args, execution=dataclasses.replace(_own(execution), report=_nothing), ranks=_ranks)
        except Stopped:
            continue  # rank 0 has too, and says how it ended
        except Craw4LLMError as error:
            print(f"error: rank {_ranks.rank}: {error}", file=sys.stderr, flush=True)
            os._exit(error.exit_code)


def _own(execution: Execution) -> Execution:
    """With this rank's device."""
    import torch

    takes = execution.device == "cuda" or (execution.device == "auto" and torch.cuda.is_available())
    return dataclasses.replace(execution, device=f"cuda:{_ranks.local}") if takes else execution


def _nothing(line: str) -> None:
    """Only rank 0 is heard."""


if __name__ == "__main__":
    from training import node  # not as __main__: the stage asks the module

    sys.exit(node.main())
