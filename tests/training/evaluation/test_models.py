"""Opening models: ours, those of transformers, and what is neither."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from craw4llm.errors import ArtifactError, ConfigError, InputError
from training.checkpoint import save_model
from training.configs import Shape
from training.evaluation.likelihood import Batching, token_losses
from training.evaluation.models import TorchModel, TransformersModel, open_model
from training.model import Transformer

CPU = torch.device("cpu")
VOCAB = 256
SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def transformers() -> Any:
    found = pytest.importorskip("transformers")
    found.logging.set_verbosity_error()
    return found


@pytest.fixture
def build(transformers: Any) -> Callable[..., Any]:
    def make(kind: str, **settings: Any) -> Any:
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**{**SMALL, **settings})
        model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim > 1:
                    weight.mul_(4)  # far from uniform, so that a wrong mask or position shows
        return model

    return make


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_model(Transformer(Shape(d_model=32, n_layers=1, n_heads=2, d_hidden=64, context=32), VOCAB, seed=1), folder)
    return folder


def sequences() -> tuple[list[tuple[np.ndarray, int]], list[int]]:
    rng = np.random.default_rng(0)
    found, groups = [], []
    for group in range(12):
        stem = rng.integers(1, VOCAB, rng.integers(3, 50))
        for _ in range(3):
            after = rng.integers(1, VOCAB, rng.integers(1, 7))
            found.append((np.concatenate([stem, after]), len(after)))
            groups.append(group)
    return found, groups


@pytest.mark.parametrize(
    ("kind", "settings", "takes_branches", "note"),
    [
        ("Llama", {"max_position_embeddings": 128, "num_key_value_heads": 2}, True, ""),
        ("GPTNeoX", {"max_position_embeddings": 128}, True, ""),
        ("GPT2", {"n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 4}, True, ""),
        ("Granite", {"max_position_embeddings": 128, "logits_scaling": 8.0}, True, "all logits are computed"),
        ("Bloom", {"n_layer": 2, "n_head": 4}, False, "scored one by one"),
        ("Mistral", {"max_position_embeddings": 128, "sliding_window": 40, "num_key_value_heads": 2}, False, "windows of 40 tokens"),
    ],
)
def test_scores_of_transformers_models_are_their_own(
    build: Callable[..., Any], kind: str, settings: dict[str, Any], takes_branches: bool, note: str
):
    """Whatever way the probe found, the losses are those of the library's logits, one plain sequence at a time."""
    model = build(kind, **settings)
    opened = TransformersModel(model, CPU, "fp32", 128)
    assert opened.takes_branches is takes_branches and note in "; ".join(opened.notes) and bool(note) == bool(opened.notes)
    wanted, groups = sequences()
    for (losses, _), (ids, scored) in zip(token_losses(wanted, opened, Batching(), groups), wanted, strict=True):
        with torch.no_grad():
            log_p = model(input_ids=torch.from_numpy(ids)[None]).logits[0].float().log_softmax(-1)
        expected = [-log_p[len(ids) - 1 - scored + k, ids[len(ids) - scored + k]].item() for k in range(scored)]
        assert losses.tolist() == pytest.approx(expected, abs=2e-4)


def test_a_saved_transformers_folder_opens_with_its_tokenizer(build: Callable[..., Any], transformers: Any, shared: Path, tmp_path: Path):
    build("Llama", vocab_size=50_432, max_position_embeddings=4096).save_pretrained(tmp_path / "model")
    words = transformers.PreTrainedTokenizerFast(tokenizer_file=str(shared / "tokenizer" / "20B_tokenizer.json"), eos_token="<|endoftext|>")
    words.save_pretrained(tmp_path / "model")
    opened = open_model(str(tmp_path / "model"), CPU)
    assert opened.kind == "transformers" and opened.model.context == 2048 and opened.end_of_text_id == 0
    assert opened.encode_batch is not None and opened.encode_batch(["two  spaces", "<|endoftext|>"]) == [[9389, 50276, 31748], [0]]
    assert opened.encode_batch([]) == []
    assert open_model(str(tmp_path / "model"), CPU, context=100).model.context == 100
    before = opened.digest
    (tmp_path / "model" / "generation_config.json").write_text("{}")
    assert open_model(str(tmp_path / "model"), CPU).digest != before


def test_our_checkpoint_opens_by_its_folder(checkpoint: Path, shared: Path):
    opened = open_model(str(checkpoint), CPU, tokenizer=shared / "tokenizer" / "20B_tokenizer.json")
    assert opened.kind == "craw4llm" and isinstance(opened.model, TorchModel) and opened.model.context == 32 and opened.notes == ()
    assert opened.encode_batch is not None and opened.encode_batch(["two  spaces"]) == [[9389, 50276, 31748]] and opened.end_of_text_id == 0
    assert open_model(str(checkpoint), CPU).encode_batch is None


def test_low_precision_is_near(checkpoint: Path):
    exact, low = (open_model(str(checkpoint), CPU, precision).model for precision in ("fp32", "bf16"))
    wanted = [(ids[:30], min(scored, 5)) for ids, scored in sequences()[0] if len(ids) > 8]
    a, b = (np.concatenate([losses for losses, _ in token_losses(wanted, model, Batching())]) for model in (exact, low))
    assert 0 < np.abs(a - b).max() < 0.2


def test_what_is_no_model_is_refused(tmp_path: Path, checkpoint: Path, shared: Path):
    with pytest.raises(InputError, match=r"holds no model: expected model\.pt and config\.json"):
        open_model(str(tmp_path), CPU)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no such type"}))
    with pytest.raises(InputError, match="transformers cannot open it"):
        open_model(str(tmp_path), CPU)
    (tmp_path / "model.pt").write_bytes(b"nothing")
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    with pytest.raises(ArtifactError, match="does not hold the model"):
        open_model(str(tmp_path), CPU)
    with pytest.raises(ConfigError, match="context is 33; expected 0 or 2 to 32"):
        open_model(str(checkpoint), CPU, context=33)
    with pytest.raises(InputError, match=r"no\.json does not exist"):
        open_model(str(checkpoint), CPU, tokenizer=tmp_path / "no.json")
    with pytest.raises(InputError, match=r"is no tokenizer\.json"):
        open_model(str(checkpoint), CPU, tokenizer=tmp_path / "config.json")
