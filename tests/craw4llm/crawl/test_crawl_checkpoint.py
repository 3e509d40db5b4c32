"""A crawl that was killed at any time, and one that is extended, end with the bytes of an undisturbed one."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from craw4llm.configs import (
    KNOWLEDGE,
    NEEDS_RANK,
    NEEDS_SCORER,
    CorpusConfig,
    CrawlConfig,
    GraphMeasure,
    ScorerConfig,
    SyntheticText,
    SyntheticWeb,
)
from craw4llm.crawl import loop
from craw4llm.crawl.checkpoint import Checkpoints
from craw4llm.crawl.stage import state_key
from craw4llm.execution import process_name
from craw4llm.stage import Stage

ROOT = Path(__file__).resolve().parents[3]
WEB = Stage(CorpusConfig(source=SyntheticWeb(pages=500, hosts=15, mean_links=5.0, dead_share=0.2, seed=5), heldout_fraction=0.05))
SCORER = Stage(ScorerConfig(kind="train_fasttext", source=SyntheticText(lines=200), dim=8, buckets=500))


def stage(policy: str, **fields: object) -> Stage:
    inputs = {"scorer": SCORER} if policy in NEEDS_SCORER else {}
    if policy in NEEDS_RANK:
        inputs["rank"] = Stage(ScorerConfig(kind=policy, source=GraphMeasure()), corpus=WEB)
    return Stage(CrawlConfig(policy=policy, **{"seed_count": 5, "batch_pages": 8, **fields}), corpus=WEB, **inputs)


class Stopped(Exception):
    pass


@pytest.fixture
def saves_always(monkeypatch):
    """A checkpoint before every iteration."""
    monkeypatch.setattr(loop.Crawler.run, "__defaults__", (None, None, 0.0))


@pytest.fixture
def undisturbed(shared_build):
    return lambda policy, **fields: shared_build(stage(policy, **fields)).digest


@pytest.mark.parametrize("policy", sorted(KNOWLEDGE))
def test_a_crawl_goes_on_from_its_checkpoint(policy, build, saves_always, undisturbed, monkeypatch):
    """Stopped before every iteration in turn: each attempt does one more, none begins anew."""
    done: list[int] = []
    with monkeypatch.context() as patched:
        real = loop.Crawler._go_on
        for after in range(1, 30):

            def go_on(self, row, limit=after):
                if row.iteration >= limit:
                    raise Stopped
                done.append(row.iteration)
                return real(self, row)

            patched.setattr(loop.Crawler, "_go_on", go_on)
            try:
                crawl = build(stage(policy, budget_pages=90))
                break
            except Stopped:
                continue
        else:
            pytest.fail("never finished")
    assert done == list(range(1, len(done) + 1)) and len(done) > 8
    assert crawl.digest == undisturbed(policy, budget_pages=90)


@pytest.mark.parametrize("policy", sorted(KNOWLEDGE))
def test_a_longer_crawl_goes_on_from_a_shorter_one(policy, build, undisturbed, monkeypatch):
    """By pages, within and at the end of a batch, then by fetches; what was crawled is not crawled again."""
    monkeypatch.setattr(loop, "WORTH_SAVING_S", 0.0)
    real, done = loop.Crawler._go_on, []
    monkeypatch.setattr(loop.Crawler, "_go_on", lambda self, row: done.append(row.iteration) or real(self, row))
    for pages in (47, 53, 61, 120):
        done.clear()
        assert build(stage(policy, budget_pages=pages)).digest == undisturbed(policy, budget_pages=pages)
        if pages > 47:
            assert min(done) >= 5
    fetches = build(stage(policy, budget_pages=120)).count("fetches") + 40
    done.clear()
    assert build(stage(policy, budget_fetches=fetches)).digest == undisturbed(policy, budget_fetches=fetches)
    assert min(done) >= 12
    done.clear()
    assert build(stage(policy, budget_pages=30)).digest == undisturbed(policy, budget_pages=30)  # shorter: nothing to go on from
    assert min(done) == 1


def test_other_crawls_have_other_checkpoints(build):
    web, scorer = build(WEB), build(SCORER)
    base = stage("parent_mean", budget_pages=9).config
    keys = {state_key(base, {"corpus": web, "scorer": scorer})}
    assert state_key(dataclasses.replace(base, budget_pages=None, budget_fetches=50), {"corpus": web, "scorer": scorer}) in keys
    for fields in ({"policy": "parent_max"}, {"batch_pages": 9}, {"seed_set": 1}, {"seed_count": 6}, {"rng_seed": 1}):
        keys.add(state_key(dataclasses.replace(base, **fields), {"corpus": web, "scorer": scorer}))
    keys.add(state_key(base, {"corpus": web}))
    assert len(keys) == 7


def test_damaged_and_torn_checkpoints_are_passed_over(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c")
    always = lambda crawled, fetches, tokens: True  # noqa: E731
    assert checkpoints.newest(always) is None
    checkpoints.save(5, 9, {"a": np.arange(1000)})
    checkpoints.save(3, 9, {"a": np.arange(3)})  # another process, not as far: the farther one stays
    found = checkpoints.newest(always)
    assert found is not None and len(found["a"]) == 1000
    assert checkpoints.newest(lambda crawled, fetches, tokens: crawled < 5)["a"].tolist() == [0, 1, 2]
    [best] = (tmp_path / "c").glob("5-9-*.npz")
    data = best.read_bytes()
    for cut in range(0, len(data), 97):
        best.write_bytes(data[:cut])
        assert len(checkpoints.newest(always)["a"]) == 3, cut
    noticed = 0
    for place in range(0, len(data), 101):
        best.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        array = checkpoints.newest(always)["a"]
        noticed += len(array) == 3
        assert len(array) == 3 or np.array_equal(array, np.arange(1000)), place  # a bit of padding does no harm
    assert noticed > 0.9 * len(data) / 101
    best.write_bytes(data)
    checkpoints.save(8, 9, {"a": np.arange(2)})
    assert len(list((tmp_path / "c").iterdir())) == 1


SUBPROCESS = """
import sys
import time
from pathlib import Path
sys.path[:0] = ["tests/craw4llm/crawl"]
import test_crawl_checkpoint as here
from craw4llm.crawl import loop
from craw4llm.execution import Execution
import importlib.util
spec = importlib.util.spec_from_file_location("root_conftest", "tests/conftest.py")
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
loop.Crawler.run.__defaults__ = (None, None, 0.0)
build = module.builder(Execution(root=Path(sys.argv[1]), workers=1, report=lambda line: None))
build(here.WEB), build(here.SCORER)
print("ready", flush=True)
print(build(here.stage(sys.argv[2], budget_pages=300, batch_pages=1)).digest, flush=True)
"""


@pytest.mark.parametrize("policy", ["quality", "parent_mean"])
def test_kill_9_at_any_time(policy, tmp_path, undisturbed):
    """Killed again and again, at other moments each time, also while a checkpoint is being written (it writes one in every iteration)."""
    script = tmp_path / "crawl.py"
    script.write_text(SUBPROCESS)

    def saved() -> int:
        return max((int(p.name.split("-")[0]) for p in (tmp_path / "root/memo").glob("crawl-*/*.npz")), default=0)

    digest, far = "", [0]
    for attempt in range(6):
        command = [sys.executable, str(script), str(tmp_path / "root"), policy]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": str(attempt)}
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment) as child:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
            if attempt == 5:
                digest = child.stdout.read().strip()
                break
            deadline = time.monotonic() + 60
            while saved() < far[-1] + 15 and child.poll() is None and time.monotonic() < deadline:
                time.sleep(0.002)
            time.sleep(0.0017 * attempt)
            os.kill(child.pid, signal.SIGKILL)
        far.append(saved())
    assert far == sorted(set(far)) and far[-1] < 300  # each attempt went on from the one before, and none was allowed to end
    assert digest == undisturbed(policy, budget_pages=300, batch_pages=1)


def test_what_another_host_is_writing_is_left_alone(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    here = process_name().rpartition("-")[0]
    fresh, old = tmp_path / "8-9-ab.elsewhere-1.partial", tmp_path / "6-7-ab.elsewhere-1.partial"
    killed = tmp_path / f"4-5-ab.{here}-{gone.pid}.partial"
    for path in (fresh, old, killed):
        path.write_bytes(b"begun")
    os.utime(old, (time.time() - 100_000,) * 2)
    checkpoints.save(10, 12, {"crawled": np.arange(3)})
    assert sorted(path.name for path in tmp_path.glob("*.partial")) == [fresh.name]
