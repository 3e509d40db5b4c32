"""Crawls of the released code (cxcscmu/Craw4LLM) and of `craw4llm crawl`, on one folder in the form of ClueWeb22, in one run.

    python benchmarks/crawl.py --official CHECKOUT --official-pythonpath FOLDER        200,000 pages, crawl of 20,000, two workers
    python benchmarks/crawl.py --official CHECKOUT --official-pythonpath FOLDER --quick         20,000 pages, crawl of 4,000

CHECKOUT: of the released code. FOLDER: what it imports: tqdm, yaml, numpy and a fastText that works with it
(`pip install --target FOLDER fasttext-numpy2-wheel tqdm pyyaml`). The folder of pages is made by shared/bench/make_clueweb.py (document ids
first in link entries: the one form that the released code can crawl), or given with --corpus.

| | what is timed |
|---|---|
| cold | an empty artifact root: corpus (links in place), scorer, scores of what is met, crawl, lists of document ids |
| cold, exact | the same with the scorer that gives the fastText library's bits; its lists must be the released code's, in order |
| warm | the corpus is compiled, the scores are known: what a further policy, budget or seed set costs, start-up included |
| warm, in-degree | the same for the in-degree policy (anchors of the inlink records); its lists must be the released code's, in order |

Wall and processor seconds and peak memory are those of the whole process with its children (wait4). Who goes first alternates. Both sides
run with compiled bytecode; what numba has compiled is kept from a run before that is not timed. A ratio is the smaller of the wall and the
processor ratio, each a median over the rounds. On a busy machine the wall ratios of runs under a second say little.

How to give our commands to shared/bench/bench_official.py instead:

    --ours 'python -m craw4llm crawl --corpus {corpus} --seeds {seeds} --mode released --pages {crawl} --batch {per_iter} --rng-seed {seed}
            --scorer {model} --policy quality --route projected --streams en0 --links in_place --dangling-links outside
            --workers {workers} --root {cache} --lists {out}'
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
RATERS = {"quality": "dclm_fasttext_score", "indegree": "inlink_count"}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    docs: int
    crawl: int
    batch: int
    rounds: int
    bucket: int = 200_000
    workers: int = 2
    seed: int = 42


@dataclass(frozen=True)
class Spent:
    wall_s: float
    cpu_s: float
    peak_mib: float


def measure(official: Path, official_pythonpath: str, sizes: Sizes, corpus: Path | None, work: Path | None) -> dict[str, Any]:
    """The ratios, and what they were computed from."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = work or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        return _Bench(official, official_pythonpath, sizes, corpus or _corpus(folder, sizes), folder).run()


def _corpus(folder: Path, sizes: Sizes) -> Path:
    """A folder made by shared/bench/make_clueweb.py, unless it is there."""
    made = folder / f"clueweb{sizes.docs}"
    if not (made / "corpus.json").exists():
        shared = Path(os.environ.get("CRAW4LLM_SHARED", HERE.parent / "shared"))
        script = shared / "bench" / "make_clueweb.py"
        if not script.exists():
            sys.exit(f"{script} is not there: set CRAW4LLM_SHARED, or give a folder that it made with --corpus")
        size = ["--docs", str(sizes.docs), "--seeds", str(max(1000, sizes.batch)), "--docs-per-file", str(min(5000, sizes.docs // 10))]
        subprocess.run(
            [sys.executable, script, made, *size, "--model", "--bucket", str(sizes.bucket)], check=True, stdout=subprocess.DEVNULL
        )
    return made


class _Bench:
    def __init__(self, official: Path, pythonpath: str, sizes: Sizes, corpus: Path, folder: Path) -> None:
        self.official, self.sizes, self.corpus, self.folder = official.resolve(), sizes, corpus.resolve(), folder
        stub = folder / "stub"
        stub.mkdir(exist_ok=True)
        (stub / "wandb.py").write_text("# stands in for wandb: logging is off\n")
        env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        self.official_env = {**env, "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(x for x in (pythonpath, str(stub)) if x)}
        self.our_env = {**env, "PYTHONPATH": os.pathsep.join(x for x in (str(HERE), env.get("PYTHONPATH", "")) if x)}

    def run(self) -> dict[str, Any]:
        s = self.sizes
        warm_root = self.folder / "warm"
        for policy, route in (("quality", "projected"), ("quality", "exact"), ("indegree", "")):  # compiles, and makes corpus and scores
            self._ours(warm_root, policy, route, compiled=True)
        runs: dict[str, list[Spent]] = {
            name: [] for name in ("official", "official indegree", "cold", "cold, exact", "warm", "warm, in-degree")
        }
        same: dict[str, bool] = {}
        for number in range(s.rounds):
            steps = [self._round_official, self._round_ours]
            for step in steps if number % 2 == 0 else reversed(steps):
                for name, spent in step(warm_root):
                    runs[name].append(spent)
            same = {
                "cold": self._lists("official quality") == self._lists("cold projected"),
                "cold, exact": self._lists("official quality") == self._lists("cold exact"),
                "warm": self._lists("official quality") == self._lists("warm exact"),
                "warm, in-degree": self._lists("official indegree") == self._lists("warm indegree"),
            }
            wrong = [name for name, equal in same.items() if not equal and name != "cold"]
            assert not wrong, f"{', '.join(wrong)}: not the pages of the released code in their order"
        return {**self._result(runs, same), "cold_pages_in_common": self._in_common("official quality", "cold projected")}

    def _round_official(self, warm_root: Path) -> list[tuple[str, Spent]]:
        return [("official", self._official("quality")), ("official indegree", self._official("indegree"))]

    def _round_ours(self, warm_root: Path) -> list[tuple[str, Spent]]:
        found = []
        for name, route in (("cold", "projected"), ("cold, exact", "exact")):
            root = self.folder / "cold"
            shutil.rmtree(root, ignore_errors=True)
            found.append((name, self._ours(root, "quality", route, compiled=False)))
            shutil.rmtree(root, ignore_errors=True)
        for name, policy, route in (("warm", "quality", "exact"), ("warm, in-degree", "indegree", "")):
            for _ in range(3):
                shutil.rmtree(warm_root / "crawl", ignore_errors=True)
                for checkpoint in (warm_root / "memo").glob("crawl-*"):
                    shutil.rmtree(checkpoint)
                found.append((name, self._ours(warm_root, policy, route, compiled=True)))
        return found

    def _official(self, policy: str) -> Spent:
        out = self._out(f"official {policy}")
        model = f"  - type: fasttext_score\n    rater_name: {RATERS['quality']}\n    model_path: {self.corpus / 'model.bin'}\n"
        rating = model if policy == "quality" else f"  - type: {RATERS[policy]}\n"
        config = out.with_suffix(".yaml")
        config.write_text(
            f"cw22_root_path: {self.corpus}\nseed_docs_file: {self.corpus / 'seed.txt'}\noutput_dir: {out}\n"
            f"num_selected_docs_per_iter: {self.sizes.batch}\nnum_workers: {self.sizes.workers}\nsave_state_every: -1\n"
            f"max_num_docs: {self.sizes.crawl}\nselection_method: {RATERS[policy]}\norder: desc\nwandb: false\n"
            f"seed: {self.sizes.seed}\nrating_methods:\n{rating}"
        )
        return _timed([sys.executable, str(self.official / "crawl.py"), "crawl", "--config", str(config)], self.official_env)

    def _ours(self, root: Path, policy: str, route: str, *, compiled: bool) -> Spent:
        s = self.sizes
        out = self._out(f"{'warm' if compiled else 'cold'} {route if policy == 'quality' else policy}")
        command = [sys.executable, "-m", "craw4llm", "crawl", "--corpus", str(self.corpus), "--seeds", str(self.corpus / "seed.txt")]
        command += ["--mode", "released", "--policy", policy, "--pages", str(s.crawl), "--batch", str(s.batch), "--rng-seed", str(s.seed)]
        command += ["--streams", "en0", "--workers", str(s.workers), "--root", str(root), "--lists", str(out)]
        command += ["--indegree", "inlink"] if compiled else ["--links", "in_place", "--dangling-links", "outside"]
        if policy == "quality":
            command += ["--scorer", str(self.corpus / "model.bin"), "--route", route]
        return _timed(command, self.our_env)

    def _out(self, name: str) -> Path:
        out = self.folder / name.replace(" ", "-")
        shutil.rmtree(out, ignore_errors=True)
        return out

    def _lists(self, name: str) -> list[list[str]]:
        files = sorted(
            (self.folder / name.replace(" ", "-")).glob("iter_*.docids.txt"), key=lambda path: int(path.name.split("_")[1].split(".")[0])
        )
        assert files, f"no lists of {name}"
        return [path.read_text().split() for path in files]

    def _in_common(self, one: str, other: str) -> float:
        """Share of the pages that one crawled which the other crawled too."""
        first, second = ({name for names in self._lists(crawl) for name in names} for crawl in (one, other))
        share = round(len(first & second) / len(first), 6)
        print(f"{other}: {share:.4%} of the pages of {one}")
        return share

    def _result(self, runs: dict[str, list[Spent]], same: dict[str, bool]) -> dict[str, Any]:
        def median(name: str, value: str) -> float:
            return statistics.median(getattr(spent, value) for spent in runs[name])

        print(f"{self.sizes.docs:,} pages, crawl of {self.sizes.crawl:,} in batches of {self.sizes.batch:,}, {self.sizes.workers} workers")
        print(f"{'':18}{'wall s':>9}{'cpu s':>9}{'MiB':>7}{'wall x':>9}{'cpu x':>9}{'MiB x':>7}   same order")
        ratios: dict[str, dict[str, float]] = {}
        for name in runs:
            row = [median(name, value) for value in ("wall_s", "cpu_s", "peak_mib")]
            text = f"{name:18}{row[0]:>9.2f}{row[1]:>9.2f}{row[2]:>7.0f}"
            if not name.startswith("official"):
                against = "official indegree" if "in-degree" in name else "official"
                x = {value: median(against, value) / median(name, value) for value in ("wall_s", "cpu_s", "peak_mib")}
                ratios[name] = x
                text += f"{x['wall_s']:>9.1f}{x['cpu_s']:>9.1f}{x['peak_mib']:>7.1f}   {same[name]}"
            print(text)
        least = {name: round(min(x["wall_s"], x["cpu_s"]), 2) for name, x in ratios.items()}
        return {
            "cold_ratio": least["cold"],
            "cold_exact_ratio": least["cold, exact"],
            "warm_ratio": least["warm"],
            "warm_indegree_ratio": least["warm, in-degree"],
            "memory_ratio": round(ratios["warm"]["peak_mib"], 2),
            "memory_cold_ratio": round(ratios["cold"]["peak_mib"], 2),
            "same_order": same,
            "runs": {name: [vars(spent) for spent in spents] for name, spents in runs.items()},
        }


def _timed(command: list[str], env: dict[str, str]) -> Spent:
    """Runs a command to its end. Peak memory: of its largest process."""
    with tempfile.TemporaryFile() as log:
        started = time.perf_counter()
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        _, status, use = os.wait4(process.pid, 0)
        wall = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            sys.exit(f"exit {process.returncode}: {' '.join(command)}\n{log.read()[-3000:].decode(errors='replace')}")
    return Spent(round(wall, 3), round(use.ru_utime + use.ru_stime, 3), round(use.ru_maxrss / 1024, 1))


FULL = Sizes(docs=200_000, crawl=20_000, batch=1_000, rounds=3)
QUICK = Sizes(docs=20_000, crawl=4_000, batch=200, rounds=1)


def compare_with_official(
    official: Path, pythonpath: Path | None, *, quick: bool, corpus: Path | None = None, work: Path | None = None, rounds: int | None = None
) -> None:
    """Prints the table, and as the last line the ratios as JSON."""
    sizes = QUICK if quick else FULL
    if rounds is not None:
        sizes = replace(sizes, rounds=rounds)
    print(json.dumps(measure(official, "" if pythonpath is None else str(pythonpath), sizes, corpus, work)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--official", type=Path, required=True)
    parser.add_argument("--official-pythonpath", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--corpus", type=Path, help="a folder that shared/bench/make_clueweb.py made")
    parser.add_argument("--work", type=Path, help="a scratch folder that is kept")
    options = vars(parser.parse_args())
    compare_with_official(options.pop("official"), options.pop("official_pythonpath"), **options)


if __name__ == "__main__":
    main()
