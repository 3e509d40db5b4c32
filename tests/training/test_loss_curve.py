"""A stored loss curve of the toy model: what training computes does not drift unnoticed.

Written by `python tests/training/test_loss_curve.py`, on purpose only: a change of the curve is a change of the recipe.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from test_train import fit, metrics_of, write_tokens

from craw4llm.execution import Execution
from training.configs import TrainConfig

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "toy_loss_curve.json"
CONFIG = TrainConfig(size="toy", vocab_size=256, precision="fp32", batch_tokens=8 * 256, token_budget=60 * 8 * 256)


def curve(root: Path) -> list[float]:
    """60 steps on a second-order source, made from integers alone."""
    state, samples = 12345, np.empty((300, 257), dtype=np.uint16)
    for row in samples:
        row[:2] = state % 256, state // 256 % 256
        for t in range(2, 257):
            state = (1_103_515_245 * state + 12_345) % 2**31
            row[t] = (row[t - 1] + 2 * row[t - 2] + 1) % 256 if state >> 16 & 3 else state >> 20 & 255
    inputs = {
        name: write_tokens(root, name, part, vocab_size=256) for name, part in (("tokens", samples[:280]), ("heldout", samples[280:]))
    }
    artifact = fit(CONFIG, inputs, Execution(root=root, workers=1, device="cpu", report=lambda line: None))
    return [*(m["loss"] for m in metrics_of(artifact)), artifact.count("heldout_loss")]


def test_toy_loss_curve(execution: Execution) -> None:
    """Other processors sum in another order: the first steps agree to 1e-5, all of them and the held-out loss to 1e-3."""
    found, stored = curve(execution.root), json.loads(GOLDEN.read_text())
    assert found[:10] == pytest.approx(stored[:10], rel=1e-5)
    assert found == pytest.approx(stored, rel=1e-3)
    assert stored[-1] < stored[0] - 0.2


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        GOLDEN.write_text(json.dumps([round(x, 6) for x in curve(Path(folder))]) + "\n")
