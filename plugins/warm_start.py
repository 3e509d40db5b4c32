"""Starts stages from a process that has the heavy libraries loaded, so that a stage of a second does not begin with four of imports.

    python warm_start.py SOCKET              loads the libraries, then waits; scripts/airflow_server.py starts it
    pid = ask(settings_path, environment)    None where no such process listens on $CRAW4LLM_WARM_START: then start the job as a program

For each request it forks: the child leads a session of its own and does what stage_job.py does, but starts the command `python -m craw4llm
...` by a second fork. Only libraries are loaded beforehand, none of this project's modules, so a stage always runs the code that is on the
disk; and nothing of torch's CUDA is touched, which a fork could not use. The socket lies in a folder that only its owner can enter.

Exit codes, signals, output, working folder and environment are the command's own, as they are without this process.
"""

import atexit
import contextlib
import importlib
import io
import json
import os
import runpy
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import stage_job

SOCKET = "CRAW4LLM_WARM_START"
ANSWER_WITHIN_S = 5.0
LIBRARIES = (
    "ada_url", "click", "concurrent.futures.process", "datasketch", "fasttext", "jinja2", "matplotlib.figure",
    "matplotlib.backends.backend_svg", "multiprocessing.queues", "numba", "numpy", "numpy.random", "orjson", "pyarrow",
    "pyarrow.compute", "pyarrow.csv", "pyarrow.dataset", "pyarrow.parquet", "publicsuffixlist", "safetensors.torch", "scipy.optimize",
    "scipy.sparse", "scipy.stats", "statistics", "tiktoken", "tokenizers", "torch", "torch.utils.data", "tqdm", "xxhash",
    # What torch loads for checkpoints and at the first step of an optimizer: 0.8 s of a core in each training and each evaluation.
    "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.device_mesh", "torch.distributed.fsdp", "torch.distributed.tensor",
)  # fmt: skip


def ask(settings: Path, environment: Mapping[str, str]) -> int | None:
    """Process id of a job that was started warm; None where that is not to be had."""
    address = os.environ.get(SOCKET)
    if not address:
        return None
    try:
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(ANSWER_WITHIN_S)
            line.connect(address)
            line.sendall(json.dumps({"settings": str(settings), "environment": dict(environment)}).encode() + b"\n")
            return int(line.makefile().readline())
    except (OSError, ValueError):
        return None


def main() -> None:
    address = Path(sys.argv[1])
    load_libraries()
    address.unlink(missing_ok=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are not waited for
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(address))
        os.chmod(address, 0o600)
        door.listen(64)
        print(f"process {os.getpid()} is ready", flush=True)
        while True:
            line, _ = door.accept()
            with line:
                serve(line, door)


def load_libraries() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as craw4llm sets it before it loads NumPy: sums depend on it
    for name in LIBRARIES:
        try:
            importlib.import_module(name)
        except Exception as error:  # a stage that needs it will say so; the others do not
            print(f"{name} not loaded: {error}", flush=True)
    load_streaming()
    assert threading.active_count() == 1, f"threads do not survive a fork: {threading.enumerate()}"


def load_streaming() -> None:
    """mosaicml-streaming behind the shim that keeps torchvision out (craw4llm/tokens/streaming_shim.py)."""
    import types

    with contextlib.suppress(Exception):
        sys.modules.setdefault("streaming.vision", types.ModuleType("streaming.vision"))
        importlib.import_module("streaming")


def serve(line: socket.socket, door: socket.socket) -> None:
    line.settimeout(ANSWER_WITHIN_S)
    try:
        request = json.loads(line.makefile().readline())
    except (OSError, ValueError):
        return
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):
            line.sendall(f"{pid}\n".encode())
        return
    try:
        door.close()
        line.close()
        os.setsid()
        default_signals()
        os.environ.clear()
        os.environ.update(request["environment"])
        stage_job.run(json.loads(Path(request["settings"]).read_text()), fork_command)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def fork_command(settings: dict[str, Any], output: int, log: int, lock: int) -> int:
    """Runs `python -m MODULE ARGUMENTS` in a fork of this process; any other command as a program."""
    command = settings["command"]
    if command[0] != sys.executable or command[1] != "-m":
        return stage_job.start_command(settings, output, log, lock)
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        return pid
    code = 1
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        stage_job.end_with_parent()
        default_signals()
        os.chdir(settings["cwd"])
        nothing = os.open(os.devnull, os.O_RDONLY)
        for number, handle in enumerate((nothing, output, log)):
            os.dup2(handle, number)
        sys.stdin, sys.stdout, sys.stderr = open(0), _text(1), _text(2)  # noqa: SIM115
        sys.argv = [command[2], *command[3:]]
        sys.path.insert(0, settings["cwd"])
        runpy.run_module(command[2], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def default_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _text(handle: int) -> io.TextIOWrapper:
    return io.TextIOWrapper(open(handle, "wb", 0, closefd=False), encoding="utf-8", errors="backslashreplace", write_through=True)


if __name__ == "__main__":
    main()
