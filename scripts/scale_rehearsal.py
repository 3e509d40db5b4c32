#!/usr/bin/env python
"""What a part costs Airflow: the parts of `crawl_policies` as mapped tasks that do nothing, through a scheduler and workers of this
machine.

    python scripts/scale_rehearsal.py [--executor celery|local] [--slots 4] [--share 1.0] [--within SECONDS]

The number of parts is the experiment's own (`parts` of its declaration, times the stages of that kind), one mapped task a part, one group
a stage, grouped as the DAG groups them (craw4llm/grouping.py). share: of the parts, for a quicker look. within: it ends then, with what is
done by then and exit code 1 (default: 6 s a part and ten minutes). Prints seconds a part at this number of slots, of the whole and of its
first and last fifth (whether Airflow slows down as tasks pile up), parts that were tried again, processor seconds of the scheduler,
api-server and workers a part, the longest gap between two starts, and the rule that follows: how long a part must be for Airflow to cost 5%
at most. The last line is one JSON object. About 25 minutes on two cores with all parts; run it where nothing of a higher priority does.
"""

import argparse
import datetime
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import airflow_cluster
import psutil
from airflow_cluster import PROJECT, Cluster

sys.path.insert(0, str(PROJECT))
import itertools

from craw4llm.grouping import LEAST_PART_S, grouped

OVERHEAD = 0.05
WAIT_S, WAIT_S_A_PART = 600.0, 6.0
PAGES = {"corpus": 900_000_000, "score": 900_000_000, "tokenize": 20_000_000}  # of ClueWeb22-A's English part; kept by a selection
DAG = '''"""Parts that do nothing."""
import datetime
from airflow.sdk import DAG, task
with DAG("rehearsal", schedule=None, max_active_tasks=1024, max_active_runs=1):
    before = None
    for number, parts in enumerate(PARTS):
        @task(task_id=f"stage_{number}_parts", retries=2, retry_delay=datetime.timedelta(seconds=1))
        def part(i):
            return None
        mapped = part.expand(i=list(range(parts)))
        if before is not None:
            before >> mapped
        before = mapped
'''


def parts_of_experiment(name: str) -> dict[str, list[int]]:
    """Kind of stage -> parts of each stage of that kind."""
    from craw4llm.experiment import expand, load

    experiment = load(name)
    graph = expand(experiment)
    found: dict[str, list[int]] = {}
    for node in graph.nodes:
        if count := experiment.parts.get(node.stage.config.stage):
            found.setdefault(node.stage.config.stage, []).append(grouped(count))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--executor", choices=("celery", "local"), default="celery")
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--within", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--experiment", default="crawl_policies")
    given = parser.parse_args()
    if lacking := airflow_cluster.missing(celery=given.executor == "celery"):
        print(f"not tried: {', '.join(lacking)} missing")
        return 77
    by_kind = parts_of_experiment(given.experiment)
    for kind, counts in by_kind.items():
        print(f"{given.experiment}: {len(counts)} x {kind} in {counts[0]} parts")
    stages = [max(1, round(count * given.share)) for counts in by_kind.values() for count in counts]
    folder = Path(tempfile.mkdtemp(prefix="craw4llm-rehearsal-"))
    try:
        facts = rehearse(folder, stages, given.executor, given.slots, given.within or WAIT_S + WAIT_S_A_PART * sum(stages))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    facts["all_parts"] = sum(count for counts in by_kind.values() for count in counts)
    slot_s = facts["seconds_a_part"] * given.slots
    facts["slot_seconds_a_part"] = round(slot_s, 2)
    facts["least_seconds_of_work_a_part"] = round(slot_s / OVERHEAD, 1)
    facts["least_seconds_by_the_rule"] = LEAST_PART_S
    for name, value in facts.items():
        print(f"{name:<34} {value}")
    for kind, counts in by_kind.items():
        print(f"{kind}: {counts[0]} parts, {PAGES[kind] // counts[0]:,} pages each of {PAGES[kind]:,}")
    print(json.dumps({"executor": given.executor, "slots": given.slots, **facts}))
    return 0 if facts["state"] == "success" else 1


def rehearse(folder: Path, stages: list[int], executor: str, slots: int, within_s: float) -> dict[str, Any]:
    dags = folder / "dags"
    dags.mkdir()
    (dags / "rehearsal.py").write_text(DAG.replace("PARTS", repr(stages)))
    celery = executor == "celery"
    settings = {"AIRFLOW__CORE__PARALLELISM": "64" if celery else str(slots), "AIRFLOW__CORE__PLUGINS_FOLDER": str(folder / "no-plugins")}
    with Cluster(folder, executor="CeleryExecutor" if celery else "LocalExecutor", environment=settings, dags=dags) as cluster:
        if celery:
            for number in range(2):
                cluster.start_worker(f"w{number}", queues="cpu", slots=max(1, slots // 2))
        began, before = time.monotonic(), processor_seconds(cluster)
        run = cluster.trigger("rehearsal", {})
        state = cluster.wait_for_run("rehearsal", run, within_s)
        spent, after = time.monotonic() - began, processor_seconds(cluster)
        tasks = [entry for entry in cluster.tasks("rehearsal", run) if entry["map_index"] >= 0]
    starts = sorted(datetime.datetime.fromisoformat(entry["start_date"]).timestamp() for entry in tasks if entry["start_date"])
    done, fifth = sum(entry["state"] == "success" for entry in tasks), len(starts) // 5
    if not done:
        raise RuntimeError(f"no part was done within {spent:.0f} s: the run is {state}")
    return {
        "state": state,
        "parts": sum(stages),
        "done": done,
        "tried_again": sum(entry["try_number"] > 1 for entry in tasks),
        "seconds": round(spent, 1),
        "seconds_a_part": round(spent / done, 3),
        "seconds_a_part_first_fifth": round((starts[fifth] - starts[0]) / fifth, 3) if fifth else None,
        "seconds_a_part_last_fifth": round((starts[-1] - starts[-1 - fifth]) / fifth, 3) if fifth else None,
        "longest_gap_s": round(max((b - a for a, b in itertools.pairwise(starts)), default=0.0), 1),
        **{f"processor_s_a_part_{name}": round((after[name] - before.get(name, 0.0)) / done, 3) for name in after},
        "load_average": round(psutil.getloadavg()[0], 1),
    }


def processor_seconds(cluster: Cluster) -> dict[str, float]:
    """Of each part of Airflow and of PostgreSQL, with the children that live."""
    found: dict[str, float] = {}
    for name, part in cluster.parts.items():
        try:
            family = [psutil.Process(part.pid), *psutil.Process(part.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
        total = 0.0
        for process in family:
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system + times.children_user + times.children_system
        found[name] = total
    return found


if __name__ == "__main__":
    sys.exit(main())
