"""Scoring: our routes against the fastText library, on one core, in one run.

    python benchmarks/score.py            two million buckets, as DCLM's model (800 MB, made here)
    python benchmarks/score.py --quick    200,000 buckets, fewer pages
    python benchmarks/score.py --scaling 20000     so many synthetic pages through memo and worker processes, one and two workers in turn

Pages of a median of 560 Zipf words, a two-label bigram model trained on some of them. Each round times all contenders one after the other
in processor seconds, with the order reversed from round to round; the ratios are medians over the rounds. The peer is the library's own
Python `predict` (fasttext-community), called with texts whose white space is folded beforehand, at no cost to it. Our figures include
folding, encoding and the empty-text check. `--cli PATH` also times fastText's command line, its loading time taken off.

Last line: JSON with projected_ratio, exact_ratio, library_ratio (rate of ours / rate of the library's `predict`); with --scaling
two_workers_ratio (wall seconds of one worker / of two, the start of the workers included: give it a minute's work).
"""

import argparse
import functools
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import fasttext
import numpy as np
from policies import builder

from craw4llm.configs import CorpusConfig, ScorerConfig, SyntheticText, SyntheticWeb
from craw4llm.execution import Execution
from craw4llm.scoring.memo import PageScores
from craw4llm.scoring.routes import _open, write_route
from craw4llm.scoring.scorer import FastTextScorer
from craw4llm.stage import Stage

VOCABULARY = 80_000


def make_texts(count: int, rng: np.random.Generator) -> list[str]:
    letters = np.array(list("etaoinshrdlucmfwypvbgkqjxz"))
    lengths = np.clip(rng.poisson(6, VOCABULARY), 1, 14)
    words = np.array(["".join(rng.choice(letters, n)) for n in lengths])
    share = 1 / np.arange(1, VOCABULARY + 1)
    draw = np.cumsum(share / share.sum())
    sizes = np.clip(np.exp(rng.normal(np.log(560), 0.6, count)), 20, 8000).astype(int)
    texts = []
    for size in sizes:
        drawn = words[np.searchsorted(draw, rng.random(size))]
        breaks = np.where(rng.random(size) < 0.06, "\n", " ")
        texts.append("".join(w + b for w, b in zip(drawn, breaks, strict=True)))
    return texts


def train(texts: list[str], buckets: int, path: Path) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as stream:
        for k, text in enumerate(texts):
            stream.write(f"__label__{'hq' if k % 2 else 'cc'} {' '.join(text.split())}\n")
        stream.flush()
        model = fasttext.train_supervised(input=stream.name, wordNgrams=2, bucket=buckets, dim=100, epoch=1, thread=2, verbose=0)
    model.save_model(str(path))


def cpu_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def command_line(cli: str, model: Path, folder: Path, texts: list[str]) -> float:
    """Processor seconds of `fasttext predict-prob`, less those of the same command on one line."""
    import resource

    spent = []
    for lines in (texts, texts[:1]):
        path = folder / "lines.txt"
        path.write_text("".join(text + "\n" for text in lines))
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([cli, "predict-prob", str(model), str(path), "2"], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return spent[0] - spent[1]


def scaling(pages: int, rounds: int) -> None:
    spent: dict[int, list[float]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        build = builder(root)
        corpus = build(Stage(CorpusConfig(source=SyntheticWeb(pages=pages, hosts=max(1, pages // 100)), heldout_fraction=0)))
        scorer = build(Stage(ScorerConfig(kind="train_fasttext", source=SyntheticText(), route="library")))
        for k in range(rounds):
            for workers in sorted(spent, reverse=bool(k % 2)):
                execution = Execution(root=root / f"{k}-{workers}", workers=workers, report=lambda line: None)
                start = time.perf_counter()
                with PageScores(corpus, scorer, execution, pool_after=0) as scores:
                    scores.scores(np.arange(pages))
                spent[workers].append(time.perf_counter() - start)
    for workers, seconds in spent.items():
        print(f"{workers} workers: {statistics.median(seconds):.2f} s, {pages / statistics.median(seconds):,.0f} pages/s")
    print(json.dumps({"two_workers_ratio": round(statistics.median(o / t for o, t in zip(spent[1], spent[2], strict=True)), 2)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--cli", help="path of fastText's command line")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scaling", type=int, metavar="PAGES")
    options = parser.parse_args()
    if options.scaling:
        scaling(options.scaling, options.rounds)
        return
    buckets, count = (200_000, 1500) if options.quick else (2_000_000, 3000)
    texts = make_texts(count, np.random.default_rng(0))
    folded = [" ".join(text.split()) for text in texts]
    n_bytes = sum(len(text.encode()) for text in texts)
    print(
        f"{count} pages, {n_bytes / count:.0f} bytes and {sum(len(t.split()) for t in texts) / count:.0f} words a page, {buckets} buckets"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train(texts[:1000], buckets, folder / "model.bin")
        library = FastTextScorer(folder / "model.bin", "__label__hq")
        contenders: dict[str, Callable[[], object]] = {
            "predict": lambda: [library._model.predict(text, k=2) for text in folded],
            "library": lambda: library.score(texts, ()),
        }
        scores = {"library": library.score(texts, ())[0]}
        for route in ("exact", "projected"):
            about = write_route(folder, "__label__hq", route, library)
            tables = _open(folder, about)
            scores[route] = tables.score(texts)[0]  # compiled, and the rows in memory
            contenders[route] = functools.partial(tables.score, texts)
        assert np.array_equal(scores["exact"], scores["library"]), "the exact route must give the library's bits"
        worst = float(np.abs(scores["projected"].astype(float) - scores["library"]).max())
        assert worst < 1e-6, worst
        times: dict[str, list[float]] = {contender: [] for contender in contenders}
        if options.cli:
            times["command line"] = []
        for k in range(options.rounds):
            for contender, work in list(contenders.items())[:: 1 if k % 2 else -1]:
                times[contender].append(cpu_seconds(work))
            if options.cli:
                times["command line"].append(command_line(options.cli, folder / "model.bin", folder, folded))
    print(f"largest difference of the projected route: {worst:.2g}; of the exact route: 0")
    print(f"{'':14}{'us a page':>10}{'pages/s':>10}{'MB/s':>8}{'against predict':>17}")
    ratios = {}
    for contender, spent in times.items():
        middle = statistics.median(spent)
        ratios[contender] = statistics.median(p / s for p, s in zip(times["predict"], spent, strict=True))
        print(f"{contender:14}{middle / count * 1e6:10.0f}{count / middle:10.0f}{n_bytes / middle / 1e6:8.1f}{ratios[contender]:16.2f}x")
    keys = ("projected", "exact", "library", "command line")
    print(json.dumps({f"{key.replace(' ', '_')}_ratio": round(ratios[key], 3) for key in keys if key in ratios}))


if __name__ == "__main__":
    main()
