"""`score train`: what is trained on, what is held out, and the figures on the card."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from craw4llm.__main__ import cli
from craw4llm.errors import ConfigError, InputError
from craw4llm.scoring.scorer import FastTextScorer
from craw4llm.scoring.train import Settings, auc, train_classifier

SMALL = Settings(dim=8, buckets=2000, epochs=10, heldout_share=0.2)


@pytest.fixture
def files(tmp_path):
    """Two positive sources in one file, a negative one in Parquet, and a negative one in plain text; 300 texts each."""
    rng = np.random.default_rng(0)

    def texts(words: str, n: int = 300) -> list[str]:
        return [" ".join(rng.choice(words.split(), 15)) + f" w{rng.integers(10**6)}" for _ in range(n)]

    good = [{"text": t, "source": "proofs"} for t in texts("proof lemma theorem axiom set")]
    good += [{"text": t, "source": "essays"} for t in texts("reason argue history theorem set")]
    with gzip.open(tmp_path / "good.jsonl.gz", "wt") as stream:
        stream.writelines(json.dumps(record) + "\n" for record in good)
    pq.write_table(pa.table({"text": texts("sale cheap coupon buy now")}), tmp_path / "shop.parquet")
    (tmp_path / "menu.txt").write_text("\n".join(texts("home next previous login set")) + "\n")
    return [tmp_path / "good.jsonl.gz"], [tmp_path / "shop.parquet", tmp_path / "menu.txt"], tmp_path


def test_the_card(files):
    positive, negative, folder = files
    card = train_classifier(positive, negative, folder / "out", SMALL)
    heldout = card["heldout"]
    assert card["training"]["positive"] + heldout["positive"] == card["training"]["negative"] + heldout["negative"] == 600
    assert heldout["positive"] == pytest.approx(120, abs=40)
    assert min(heldout["precision"], heldout["recall"], heldout["auc"]) > 0.95
    assert {(s["source"], s["side"]) for s in card["sources"]} == {
        ("proofs", "positive"),
        ("essays", "positive"),
        ("shop", "negative"),
        ("menu", "negative"),
    }
    assert sum(s["heldout"] for s in card["sources"]) == heldout["positive"] + heldout["negative"]
    for source in card["sources"]:
        assert source["called_positive"] > 0.9 if source["side"] == "positive" else source["called_positive"] < 0.1
    assert heldout["leaking"] == 0
    assert "| proofs | positive |" in (folder / "out/card.md").read_text()
    assert json.loads((folder / "out/card.json").read_text()) == card
    scorer = FastTextScorer(folder / "out/model.bin", "__label__hq")
    assert scorer.score(["proof of the lemma"], ())[0][0] > 0.9
    again = train_classifier(positive[::-1], negative[::-1], folder / "again", SMALL)
    assert again["heldout"] == heldout
    assert (folder / "again/model.bin").read_bytes() == (folder / "out/model.bin").read_bytes()


def test_what_is_dropped_and_what_leaks(files):
    """Repeats, empties, texts on both sides; and 200 near-copies of one text, of which some are held out and others trained on."""
    positive, negative, folder = files
    copies = [f"{'one and the same long text that stands on every page of the site with a number at its end ' * 2}{k}" for k in range(200)]
    lines = [*copies, copies[0], " ", "both", "both  "]
    (folder / "copies.txt").write_text("\n".join(lines) + "\n")
    (folder / "both.txt").write_text("both\n")
    card = train_classifier([*positive, folder / "copies.txt"], [*negative, folder / "both.txt"], folder / "out", SMALL)
    assert card["dropped"] == {"empty": 1, "repeated": 2, "on_both_sides": 1}
    leaking = {s["source"]: s["leaking"] for s in card["sources"]}
    held = next(s["heldout"] for s in card["sources"] if s["source"] == "copies")
    assert leaking == {"copies": held, "essays": 0, "menu": 0, "proofs": 0, "shop": 0} and held > 15


def test_auc_is_a_share_of_pairs():
    rng = np.random.default_rng(1)
    positive, negative = np.round(rng.random(60) + 0.2, 1), np.round(rng.random(80), 1)
    pairs = [(p > n) + 0.5 * (p == n) for p in positive for n in negative]
    assert auc(positive, negative) == pytest.approx(np.mean(pairs))


def test_what_is_refused(files):
    positive, negative, folder = files
    with pytest.raises(ConfigError, match="heldout_share is 1"):
        Settings(heldout_share=1)
    (folder / "few.txt").write_text("one\ntwo\n")
    with pytest.raises(InputError, match="positive texts are held out of 2"):
        train_classifier([folder / "few.txt"], negative, folder / "out", SMALL)
    (folder / "bad.jsonl").write_text('{"text": "good"}\n{"words": "none"}\n')
    with pytest.raises(InputError, match=r"bad.jsonl, line 2 has no text"):
        train_classifier([folder / "bad.jsonl"], negative, folder / "out", SMALL)
    (folder / "worse.jsonl").write_text("no json\n")
    with pytest.raises(InputError, match="cannot be read"):
        train_classifier([folder / "worse.jsonl"], negative, folder / "out", SMALL)
    with pytest.raises(InputError, match="exists; give a folder that does not"):
        train_classifier(positive, negative, folder, SMALL)
    assert not (folder / "out").exists()


def test_the_command_line(files):
    positive, negative, folder = files
    command = ["score", "train", "--positive", str(positive[0]), "--negative", str(negative[0]), "--to", str(folder / "out")]
    done = CliRunner().invoke(cli, [*command, "--dim", "8", "--buckets", "2000", "--heldout-share", "0.2"])
    assert done.exit_code == 0, done.output
    assert done.output.strip() == (folder / "out/card.md").read_text().strip()
