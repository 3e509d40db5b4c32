"""The studies on docweb: every crawl policy from five sets of seeds under two scorers, and small models of four policies at three pools.

    python benchmarks/docweb.py                 all; about half an hour of two quiet cores, nearly all of it for the models
    python benchmarks/docweb.py --only crawls   the crawls alone, a few minutes
    python benchmarks/docweb.py --quick         two sets of seeds, one scorer, no models

Declared in benchmarks/experiments/, run by the command line, so a run that was ended goes on where it was. Prints the summary of each
report (the tables of docs/results.md) and the paths of the pages; the last line is a JSON object with the main figures.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("CRAW4LLM_SHARED", PROJECT.parent / "shared"))
SCORERS = ("docweb_hq", "docweb_hq_nc")


def run(experiment: str, root: Path, *arguments: str) -> Path:
    """Runs an experiment; returns the folder of its report."""
    environment = {**os.environ, "CRAW4LLM_EXPERIMENTS": str(PROJECT / "benchmarks" / "experiments")}
    command = [sys.executable, "-m", "craw4llm", "run", experiment, "--root", str(root), *arguments]
    done = subprocess.run(command, cwd=PROJECT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("report: ")]
    return Path(line.removeprefix("report: ")).parent


def figures(folder: Path, at_pages: int) -> dict[str, Any]:
    """Of a study of crawls: `predicted` minus `quality` at equal fetches."""
    summary = json.loads((folder / "summary.json").read_text())
    for v in summary["verdicts"]:
        if v["metric"] == "mean_score_best_at_fetches" and v["arm"] == "predicted" and f"at {at_pages:,} pages" in v["comparison"]:
            return {"difference": v["difference"], "low": v["low"], "high": v["high"]}
    return {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("crawls", "models"))
    parser.add_argument("--quick", action="store_true", help="two sets of seeds, one scorer, no models")
    parser.add_argument("--root", type=Path, default=PROJECT / "artifacts")
    options = parser.parse_args()
    common = ["--set", f"corpus={SHARED / 'corpus' / 'docweb.parquet'}"]
    found: dict[str, Any] = {}
    if options.only != "models":
        for scorer in SCORERS[: 1 if options.quick else 2]:
            few = ["--replicates", "2"] if options.quick else []
            folder = run("docweb_crawls", options.root, *common, "--set", f"scorer={SHARED / 'scorer' / scorer}.ftz", *few)
            print((folder / "summary.md").read_text(), f"\n{folder / 'report.html'}\n", sep="")
            found |= {f"{scorer}_predicted_minus_quality_{n}": figures(folder, n) for n in (1500, 3000, 6000)}
    if options.only != "crawls" and not options.quick:
        folder = run("docweb_models", options.root, *common, "--set", f"scorer={SHARED / 'scorer' / SCORERS[0]}.ftz")
        print((folder / "summary.md").read_text(), f"\n{folder / 'report.html'}\n", sep="")
        summary = json.loads((folder / "summary.json").read_text())
        found["bits_per_byte"] = {a["arm"]: a["metrics"].get("bits_per_byte", {}).get("mean") for a in summary["arms"]}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
