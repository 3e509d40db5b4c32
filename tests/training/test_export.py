"""Exported models give equal logits in transformers; open_lm's checkpoints are read."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from craw4llm.errors import InputError, StorageError
from training import checkpoint
from training.configs import NEOX_VOCAB, SIZES, Shape
from training.export import export_model, from_open_lm
from training.model import Transformer

SHAPE = Shape(d_model=32, n_layers=3, n_heads=2, d_hidden=64, context=24)
VOCAB = 50


@pytest.fixture
def model() -> Transformer:
    model = Transformer(SHAPE, VOCAB).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:  # gains other than one, so that a gain in the wrong place shows
                p.copy_(torch.linspace(0.5, 1.5, p.numel()))
    return model


def tokens(rows: int = 2, length: int = 24) -> torch.Tensor:
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(0))


LOADS = """
import sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
assert not any(m == "training" or m.startswith(("training.", "craw4llm.")) for m in sys.modules), "the folder must stand alone"
x = torch.load(sys.argv[2])
with torch.no_grad():
    out = {"logits": model(x).logits, "loss": model(x, labels=x).loss}
    left = torch.cat((torch.zeros(len(x), 3, dtype=torch.int64), x[:, :-3]), dim=1)
    mask = torch.ones_like(left)
    mask[:, :3] = 0
    out["left padded"] = model(left, attention_mask=mask).logits
    out["generated"] = model.generate(x[:, :4], max_new_tokens=5, do_sample=False, pad_token_id=0)
out["parameters"] = sum(p.numel() for p in model.parameters())
torch.save(out, sys.argv[3])
"""


def test_transformers_loads_it_with_equal_logits(model: Transformer, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    export_model(model, tmp_path / "exported")
    torch.save(tokens(), tmp_path / "tokens.pt")
    command = [sys.executable, "-c", LOADS, str(tmp_path / "exported"), str(tmp_path / "tokens.pt"), str(tmp_path / "out.pt")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": ""}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "out.pt")
    x = tokens()
    with torch.no_grad():
        expected = model(x)
        assert found["parameters"] == SHAPE.parameters(VOCAB)
        torch.testing.assert_close(found["logits"], expected, rtol=0, atol=1e-6)
        loss = nn.functional.cross_entropy(expected[:, :-1].flatten(0, 1), x[:, 1:].flatten())
        torch.testing.assert_close(found["loss"], loss)
        torch.testing.assert_close(found["left padded"][:, 3:], model(x[:, :-3]), rtol=1e-4, atol=1e-5)
        greedy = x[:, :4]
        for _ in range(5):
            greedy = torch.cat((greedy, model(greedy)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(found["generated"], greedy)


def test_an_existing_folder_is_left_alone(model: Transformer, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(StorageError, match="out exists already"):
        export_model(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_the_tokenizer_goes_along(model: Transformer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    (tmp_path / "tok").mkdir()
    words = {"<end>": 0, "a": 1, "page": 2, "[UNK]": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tok" / "tokenizer.json"))
    with pytest.raises(InputError, match=r"tokenizer_meta\.json beside it"):
        export_model(model, tmp_path / "none", tokenizer=tmp_path / "tok" / "tokenizer.json")
    assert not (tmp_path / "none").exists()
    (tmp_path / "tok" / "tokenizer_meta.json").write_text('{"end_of_text": "<end>", "end_of_text_id": 0, "vocab_size": 4}')
    export_model(model, tmp_path / "out", tokenizer=tmp_path / "tok" / "tokenizer.json")
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded("a page")["input_ids"] == [1, 2]
    assert loaded.eos_token_id == 0


def open_lm_state(model: Transformer) -> dict[str, Any]:
    """The names of open_lm's Transformer, written out from its source."""
    ours = model.state_dict()
    state = {"tok_embeddings.weight": ours["embedding.weight"], "norm.weight": ours["norm.weight"], "output.weight": ours["head.weight"]}
    for i in range(model.shape.n_layers):
        for theirs, mine in (
            ("attention_norm", "norm1"), ("attention.in_proj", "attention.in_proj"), ("attention.out_proj", "attention.out_proj"),
            ("attention.q_norm", "attention.q_norm"), ("attention.k_norm", "attention.k_norm"), ("ffn_norm", "norm2"),
            ("feed_forward.w12", "feed_forward.w12"), ("feed_forward.w3", "feed_forward.w3"),
        ):  # fmt: skip
            state[f"layers.{i}.{theirs}.weight"] = ours[f"blocks.{i}.{mine}.weight"]
        state[f"layers.{i}.attention.pos_embed.inv_freq"] = torch.ones(4)
    return state


@pytest.mark.parametrize("form", ["plain", "module", "checkpoint", "bfloat16"])
def test_open_lm_checkpoints(model: Transformer, form: str) -> None:
    state = open_lm_state(model)
    if form == "bfloat16":
        state = {name: value.bfloat16() for name, value in state.items()}
    if form in ("module", "checkpoint"):
        state = {f"module.{name}": value for name, value in state.items()}
    if form == "checkpoint":
        state = {"epoch": 6, "state_dict": state, "name": "run"}
    read = from_open_lm(state, SHAPE)
    with torch.no_grad():
        if form == "bfloat16":
            for p in model.parameters():
                p.copy_(p.bfloat16())
        assert torch.equal(read(tokens()), model(tokens()))
    assert {p.dtype for p in read.parameters()} == {torch.float32}


def test_shapes_of_dclms_411m_checkpoint() -> None:
    """Every tensor of the 411M model by open_lm's names, on the meta device."""
    with torch.device("meta"):
        model = Transformer(SIZES["411M"], NEOX_VOCAB)
    state = open_lm_state(model)
    assert state["layers.23.attention.in_proj.weight"].shape == (3072, 1024)
    assert state["layers.0.feed_forward.w12.weight"].shape == (5632, 1024)
    assert state["layers.0.feed_forward.w3.weight"].shape == (1024, 2816)
    assert sum(v.numel() for name, v in state.items() if "inv_freq" not in name) == 411_665_408


def test_other_checkpoints_are_refused(model: Transformer) -> None:
    state = open_lm_state(model)
    with pytest.raises(InputError, match=r"not an open_lm checkpoint of 3 layers .*: 1 tensors missing \(output.weight\), 0 not known"):
        from_open_lm({k: v for k, v in state.items() if k != "output.weight"}, SHAPE)
    with pytest.raises(InputError, match=r"0 tensors missing \(\), 1 not known \(post_embed_norm.weight\)"):
        from_open_lm(state | {"post_embed_norm.weight": torch.ones(32)}, SHAPE)
    with pytest.raises(InputError, match=r"w12.weight has the shape \(128, 32\), this size has \(160, 32\); choose another --size"):
        from_open_lm(state, Shape(d_model=32, n_layers=3, n_heads=2, d_hidden=80))


def test_the_commands(model: Transformer, tmp_path: Path) -> None:
    """open_lm checkpoint -> our folder -> transformers' folder."""
    toy = Transformer(SIZES["toy"], VOCAB)
    torch.save({"state_dict": open_lm_state(toy)}, tmp_path / "epoch_6.pt")

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "training.export", *arguments], capture_output=True, text=True, check=False)

    done = command("open-lm", str(tmp_path / "epoch_6.pt"), str(tmp_path / "ours"), "--size", "toy")
    assert done.returncode == 0, done.stderr
    read, _ = checkpoint.load_folder(tmp_path / "ours")
    assert all(torch.equal(a, b) for a, b in zip(read.parameters(), toy.parameters(), strict=True))
    assert command("model", str(tmp_path / "ours"), str(tmp_path / "theirs")).returncode == 0
    assert sorted(p.name for p in (tmp_path / "theirs").iterdir()) == ["config.json", "model.safetensors", "modeling_craw4llm.py"]
    wrong = command("open-lm", str(tmp_path / "epoch_6.pt"), str(tmp_path / "other"), "--size", "11M")
    assert wrong.returncode == 3
    assert "error: not an open_lm checkpoint of 8 layers" in wrong.stderr
