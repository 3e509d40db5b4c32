#!/usr/bin/env python
"""What Airflow costs over the command line, on the experiment `tiny`: the same stages, the same machine, one after the other.

    python benchmarks/airflow_overhead.py            `tiny` as declared: some ten minutes on two quiet cores
    python benchmarks/airflow_overhead.py --quick    smaller models: under five minutes; the fixed cost of a task weighs more

Times from an empty artifact root: `craw4llm run tiny` from start to end (its peer), and a run of the DAG `tiny` from the trigger to the
end that Airflow states, on a server that is healthy and has run a task before (Airflow's first task takes six seconds more, once). The
corpus is the synthetic one, so that nothing is fetched. Also measured: seconds from a fresh start (no database) to a healthy UI, and what
a task takes besides its job (from its start to its end, less the job's own seconds), which the load of the machine in the other half cannot
turn round. Digests of both are compared. Last line: JSON.
"""

import argparse
import datetime
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
TINY = {"corpus": "synthetic"}
ASKS_EVERY_S = 3.0  # as the page of a run that is open in a browser does
QUICK = TINY | {"pages": 150, "train_tokens": 100_000}


def kills() -> Any:
    """scripts/airflow_kills.py: its server."""
    spec = importlib.util.spec_from_file_location("airflow_kills", PROJECT / "scripts" / "airflow_kills.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def command_line(root: Path, values: dict[str, Any]) -> float:
    began = time.monotonic()
    settings = [f"--set={name}={value}" for name, value in values.items()]
    with (root.parent / "command_line.log").open("w") as log:
        command = [sys.executable, "-m", "craw4llm", "run", "tiny", "--root", str(root), *settings]
        subprocess.run(command, cwd=PROJECT, stdout=log, stderr=log, check=True)
    return time.monotonic() - began


def by_airflow(server: Any, values: dict[str, Any]) -> tuple[float, float]:
    """Seconds of the run, and median seconds that its tasks took besides their jobs."""
    began = datetime.datetime.now(datetime.UTC)
    run = server.call("POST", "/api/v2/dags/tiny/dagRuns", {"logical_date": None, "conf": values})
    path = f"/api/v2/dags/tiny/dagRuns/{urllib.parse.quote(run['dag_run_id'])}"
    while (run := server.call("GET", path))["state"] not in ("success", "failed"):
        time.sleep(ASKS_EVERY_S)
    if run["state"] != "success":
        raise SystemExit(f"the run failed: {server.log.read_text()}")
    took = (datetime.datetime.fromisoformat(run["end_date"]) - began).total_seconds()
    besides = []
    for task in server.call("GET", f"{path}/taskInstances?limit=500")["task_instances"]:
        ended = list(server.root.glob(f"logs/jobs/tiny/*/{task['task_id']}/0001/exit.json"))
        if ended:  # all but the plan
            start, end = (datetime.datetime.fromisoformat(task[name]) for name in ("start_date", "end_date"))
            besides.append((end - start).total_seconds() - json.loads(ended[0].read_text())["seconds"])
    return took, statistics.median(besides)


def digests(root: Path) -> dict[str, str]:
    found = {}
    for path in sorted(root.glob("*/*/manifest.json")):
        if not path.parent.name.startswith(".") and path.parts[-3] not in ("index", "logs"):
            found[f"{path.parts[-3]}/{path.parts[-2]}"] = json.loads(path.read_text())["digest"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # the server is stopped, whatever ends this
    values = QUICK if parser.parse_args().quick else TINY
    module = kills()
    with tempfile.TemporaryDirectory(prefix="craw4llm-overhead-") as folder:
        place = Path(folder)
        began = time.monotonic()
        server = module.Server(place, 1.0, experiments=PROJECT / "dags" / "experiments")
        healthy = time.monotonic() - began
        try:
            module.wait_for(lambda: any(d["dag_id"] == "tiny" for d in server.call("GET", "/api/v2/dags")["dags"]), 60)
            first = server.call("POST", "/api/v2/dags/tiny/dagRuns", {"logical_date": None, "conf": values | {"corpus": "nowhere"}})
            path = f"/api/v2/dags/tiny/dagRuns/{urllib.parse.quote(first['dag_run_id'])}"
            module.wait_for(lambda: server.call("GET", path)["state"] == "failed", 120)  # at its plan: the corpus is not there
            load = os.getloadavg()[0]
            line = command_line(place / "command_line", values)
            between = os.getloadavg()[0]
            airflow, besides = by_airflow(server, values)
            equal = digests(place / "command_line") == digests(place / "artifacts")
            stages = len(digests(place / "artifacts"))
        finally:
            server.stop()
    overhead = airflow / line - 1
    print(f"load before {load:.1f}, between {between:.1f}, after {os.getloadavg()[0]:.1f}")
    print(f"{stages} stages, digests {'equal' if equal else 'DIFFER'}")
    print(f"{'fresh start to a healthy UI':<32} {healthy:7.1f} s")
    print(f"{'craw4llm run tiny':<32} {line:7.1f} s")
    print(f"{'DAG tiny':<32} {airflow:7.1f} s   {overhead:+.0%}   {(airflow - line) / stages:.2f} s a stage")
    print(f"{'a task besides its job, median':<32} {besides:7.2f} s")
    result = {"command_line_s": line, "airflow_s": airflow, "overhead": overhead, "task_besides_job_s": besides, "healthy_s": healthy}
    result["digests_equal"] = equal
    print(json.dumps({name: round(value, 3) if isinstance(value, float) else value for name, value in result.items()}))
    sys.exit(0 if equal else 1)


if __name__ == "__main__":
    main()
