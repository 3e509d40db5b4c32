"""Runs the stages of an experiment: what is finished is kept, what is missing is built, inputs before users.

    plan = make_plan(graph, execution)                 # fingerprints; nothing is built
    run(plan, plan.nodes, execution, jobs=2)           # builds what is missing, two stages at a time

Stages run in worker processes that live for the whole run, so that heavy imports are paid once. What a stage prints goes to
`<root>/logs/<node>.<fingerprint>.log`; its progress lines come here and are shown. With one job, or one stage, it runs in this process.
The same stage graph is drawn by Airflow, whose tasks run one stage each.
"""

import contextlib
import dataclasses
import datetime
import json
import logging
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from pathlib import Path
from typing import Any

from craw4llm.artifact import Artifact, Store, storage_errors
from craw4llm.dataclass import dataclass
from craw4llm.errors import ArtifactError, ConfigError, Craw4LLMError, InputError, StageError
from craw4llm.execution import Execution, process_name
from craw4llm.experiment import Graph, Node
from craw4llm.externals import ExternalDigests
from craw4llm.fingerprint import External
from craw4llm.stage import Config, Planner, Stage, implementation

log = logging.getLogger(__name__)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Work:
    """All that a worker process needs to build one artifact."""

    node_id: str
    config: Config
    config_record: Any
    fingerprint: str
    inputs: Mapping[str, tuple[str, str]]  # name -> (stage, fingerprint)


@dataclass(frozen=True)
class Plan:
    """The graph with its fingerprints."""

    graph: Graph
    store: Store
    fingerprints: Mapping[str, str]  # node id -> fingerprint
    work: Mapping[str, Work]
    absent: Mapping[str, str] = dataclasses.field(default_factory=dict)  # stage key -> the external input that is not there
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)  # of a corpus that is not there, for `craw4llm.plan`

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.graph.nodes

    def artifact(self, node: Node) -> Artifact | None:
        """The node's finished artifact, or None."""
        return self.store.find(node.stage.config.stage, self.fingerprints[node.id])

    def missing(self, nodes: Sequence[Node]) -> list[Node]:
        return [node for node in nodes if self.artifact(node) is None]


def make_plan(graph: Graph, execution: Execution, *, absent_inputs: bool = False) -> Plan:
    """Reads the digests of external inputs and computes all fingerprints. Raises InputError for an input that is not there.

    absent_inputs: no error then; `Plan.absent` names it, and the fingerprints of all that is made from it are not the real ones. For
        looking at an experiment before its inputs are at hand.
    """
    digests = ExternalDigests(execution.root / "externals.json")
    absent: dict[str, str] = {}

    def digest_of(external: External) -> str:
        if external in missing:
            return f"absent {external.name}"
        try:
            return digests(external)
        except InputError as error:
            if not absent_inputs:
                raise
            missing[external] = str(error)
            return f"absent {external.name}"

    missing: dict[External, str] = {}
    planner = Planner(digest_of)
    prints: dict[str, str] = {}
    work: dict[str, Work] = {}
    for node in graph.nodes:
        prints[node.id] = planner.fingerprint(node.stage)
        inputs = {name: (s.config.stage, planner.fingerprint(s)) for name, s in node.stage.inputs.items()}
        work[node.id] = Work(node.id, node.stage.config, planner.config_record(node.stage), prints[node.id], inputs)
    for node in graph.nodes:
        found = [missing[e] for e in node.stage.externals() if e in missing]
        found += [absent[s.key] for s in node.stage.inputs.values() if s.key in absent]
        if found:
            absent[node.stage.key] = found[0]
    digests.save()
    return Plan(graph, Store(execution.root), prints, work, absent)


def build(work: Work, execution: Execution) -> bool:
    """Builds one artifact in this process, unless it is there. Returns whether it was built here."""
    store = Store(execution.root)
    if store.find(work.config.stage, work.fingerprint) is not None:
        return False
    module = implementation(work.config.stage)
    inputs = _inputs(work, store)
    _, built = store.build(
        work.config.stage,
        work.fingerprint,
        version=work.config.version,
        config=work.config_record,
        inputs=inputs,
        write=lambda out: module.run(work.config, inputs, out, execution),
        keep_partial=getattr(module, "RESUMES", False),
    )
    return built


def single(config: Config, execution: Execution) -> Work:
    """The work of one stage without inputs, outside of an experiment."""
    digests = ExternalDigests(execution.root / "externals.json")
    planner, stage = Planner(digests), Stage(config)
    work = Work(config.stage, config, planner.config_record(stage), planner.fingerprint(stage), {})
    digests.save()
    return work


def built(work: Work, execution: Execution) -> Artifact:
    """The finished artifact of a work; ArtifactError if there is none."""
    return Store(execution.root).open(work.config.stage, work.fingerprint)


def build_part(plan: Plan, node: Node, execution: Execution, part: int, of: int) -> str:
    """Does a share of a stage's work in this process (`run_part` of craw4llm.stage). Returns a sentence on what was done."""
    return build_share(plan.work[node.id], execution, part, of)


def build_share(work: Work, execution: Execution, part: int, of: int) -> str:
    """As `build_part`."""
    store = Store(execution.root)
    stage = work.config.stage
    module = implementation(stage)
    if not hasattr(module, "run_part"):
        raise ConfigError(f"{work.node_id}: the stage {stage} is not made in parts; run it without --part")
    if store.find(stage, work.fingerprint) is not None:
        return "the stage is finished"
    with _named(work.node_id), storage_errors(execution.root), store.part(stage, work.fingerprint, part, of) as wanted:
        if not wanted:
            return "the stage was finished by another process"
        out = store.partial(stage, work.fingerprint)
        out.mkdir(parents=True, exist_ok=True)
        return str(module.run_part(work.config, _inputs(work, store), out, execution, part=part, of=of))


def _inputs(work: Work, store: Store) -> dict[str, Artifact]:
    inputs = {}
    for name, (stage, fingerprint) in work.inputs.items():
        found = store.find(stage, fingerprint)
        if found is None:
            raise ArtifactError(
                f"{work.node_id}: its input {name} ({stage} {fingerprint}) is not in {store.root}; run that stage first, "
                "or run the experiment without --only"
            )
        inputs[name] = found
    return inputs


def run(plan: Plan, nodes: Sequence[Node], execution: Execution, *, jobs: int = 1, say: Say | None = None) -> list[str]:
    """Builds what is missing of `nodes`. Returns the ids of the nodes built by this call.

    A failed stage stops the run: nothing new is started, what runs beside it is finished, then its error is raised with the node's id.
    """
    with storage_errors(execution.root):
        execution.root.mkdir(parents=True, exist_ok=True)
    record(plan)
    todo = plan.missing(nodes)
    if not todo:
        return []
    if jobs <= 1 or len(todo) == 1:
        return _run_here(plan, todo, execution, say or _print)
    return _run_in_workers(plan, todo, execution, jobs, say)


def _run_here(plan: Plan, todo: Sequence[Node], execution: Execution, say: Say) -> list[str]:
    built = []
    for number, node in enumerate(todo, 1):
        say(f"[{number}/{len(todo)}] {node.id} {plan.fingerprints[node.id]}")
        started = time.monotonic()
        with _named(node.id):
            if build(plan.work[node.id], execution):
                built.append(node.id)
        say(f"[{number}/{len(todo)}] {node.id} done in {time.monotonic() - started:.1f} s")
    return built


def _run_in_workers(plan: Plan, todo: Sequence[Node], execution: Execution, jobs: int, say: Say | None) -> list[str]:
    import multiprocessing  # 10 ms that a crawl of a second has no use for

    from craw4llm.processes import worker_pool

    lines: Any = multiprocessing.get_context("spawn").Queue()
    waiting = {node.id: set(node.upstream) & {n.id for n in todo} for node in todo}
    running: dict[Future[bool], str] = {}
    built: list[str] = []
    failure: Exception | None = None
    with (
        _Board(len(todo), say) as board,
        _drained(lines, board.line),
        worker_pool(min(jobs, len(todo)), initializer=_start_worker, initargs=(lines,)) as pool,
    ):
        while waiting or running:
            ready = [node_id for node_id, needs in waiting.items() if not needs] if failure is None else []
            for node_id in ready[: max(0, jobs - len(running))]:
                del waiting[node_id]
                board.started(node_id)
                running[pool.submit(_in_worker, plan.work[node_id], execution)] = node_id
            if not running:
                break
            finished, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                node_id = running.pop(future)
                try:
                    with _named(node_id):
                        if future.result():
                            built.append(node_id)
                except Exception as error:
                    failure = failure or error
                    board.failed(node_id)
                    continue
                for needs in waiting.values():
                    needs.discard(node_id)
                board.finished(node_id)
    if failure is not None:
        raise failure
    return built


@contextlib.contextmanager
def _named(node_id: str) -> Iterator[None]:
    """Puts the node's id before a stage's error."""
    try:
        yield
    except BrokenExecutor as error:
        raise StageError(
            f"{node_id}: a worker process was killed from outside (out of memory?); finished artifacts are kept, run again, "
            "with --jobs 1 if memory is short"
        ) from error
    except Craw4LLMError as error:
        text = str(error)
        if text.startswith(f"{node_id}: "):
            raise
        raise type(error)(f"{node_id}: {text}") from error


_lines: Any = None


def _start_worker(lines: Any) -> None:
    global _lines
    _lines = lines


def _in_worker(work: Work, execution: Execution) -> bool:
    """Builds one artifact in a worker process, its output in a log file of its own."""
    folder = execution.root / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{work.node_id}.{work.fingerprint}.log"
    execution = dataclasses.replace(execution, report=lambda line: _lines.put((work.node_id, line)))
    with _output_to(path):
        try:
            return build(work, execution)
        except Craw4LLMError:
            traceback.print_exc()
            raise
        except Exception as error:
            traceback.print_exc()
            raise StageError(f"{type(error).__name__}: {error} (log: {path})") from error


@contextlib.contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Sends this process's standard output and error, of Python and of libraries, to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with path.open("ab") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.INFO)
    print(f"--- {datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')} process {os.getpid()}", flush=True)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        sys.stdout.flush()
        sys.stderr.flush()
        for number, handle in enumerate(saved, 1):
            os.dup2(handle, number)
            os.close(handle)


@contextlib.contextmanager
def _drained(lines: Any, show: Callable[[str, str], None]) -> Iterator[None]:
    stop = threading.Event()

    def drain() -> None:
        while not stop.is_set():
            with contextlib.suppress(queue.Empty):
                show(*lines.get(timeout=0.2))

    thread = threading.Thread(target=drain, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class _Board:
    """What a person sees of a run: a bar over all stages on a terminal, lines elsewhere."""

    def __init__(self, total: int, say: Say | None) -> None:
        self.total, self.done = total, 0
        self._say = say or (self._write if sys.stderr.isatty() else _print)
        self._bar: Any = None
        self._began: dict[str, float] = {}

    def __enter__(self) -> "_Board":
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=self.total, desc="stages", unit="stage", file=sys.stderr)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def started(self, node_id: str) -> None:
        self._began[node_id] = time.monotonic()

    def finished(self, node_id: str) -> None:
        self.done += 1
        self._say(f"[{self.done}/{self.total}] {node_id} done in {time.monotonic() - self._began[node_id]:.1f} s")
        if self._bar is not None:
            self._bar.update(1)

    def failed(self, node_id: str) -> None:
        self._say(f"{node_id} FAILED after {time.monotonic() - self._began[node_id]:.1f} s")

    def line(self, node_id: str, text: str) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(f"{node_id}: {text}"[:80])
        else:
            self._say(f"  {node_id}: {text}")

    def _write(self, text: str) -> None:
        from tqdm import tqdm

        tqdm.write(text, file=sys.stderr)


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def record(plan: Plan) -> None:
    """Keeps `<root>/index/<experiment>.json`: parameters -> replicate -> arm -> stage -> fingerprint, for people and for `gc`."""
    graph = plan.graph
    path = plan.store.root / "index" / f"{graph.experiment}.json"
    with storage_errors(plan.store.root), plan.store.lock("index", graph.experiment):
        path.parent.mkdir(parents=True, exist_ok=True)
        runs = read_index(path)
        ids = {node.stage.key: node.id for node in graph.nodes}
        arms: dict[str, dict[str, dict[str, dict[str, str]]]] = {}
        for arm, by_replicate in graph.results.items():
            for replicate, result in by_replicate.items():
                stages = {ids[s.key]: {"stage": s.config.stage, "fingerprint": plan.fingerprints[ids[s.key]]} for s in result.ancestors()}
                arms.setdefault(str(replicate), {})[arm] = stages
        report_id = ids[graph.report.key]
        entry = {
            "parameters": dict(graph.values),
            "replicates": graph.replicates,
            "report": plan.fingerprints[report_id],
            "arms": arms,
            "shared": {
                node.id: {"stage": node.stage.config.stage, "fingerprint": plan.fingerprints[node.id]}
                for node in graph.nodes
                if node.id == report_id or not node.arms
            },
        }
        runs = [r for r in runs if r["report"] != entry["report"]] + [entry]
        temporary = path.with_suffix(f".{process_name()}.tmp")
        temporary.write_text(json.dumps({"experiment": graph.experiment, "runs": runs}, indent=1, sort_keys=True))
        temporary.replace(path)


def read_index(path: Path) -> list[dict[str, Any]]:
    """The runs in an index file, oldest first; an empty list where there is none."""
    if not path.is_file():
        return []
    try:
        return list(json.loads(path.read_text())["runs"])
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path} cannot be read ({error}); delete it, the next run writes it again") from error
