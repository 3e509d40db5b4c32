"""Models for other tools, and models of other tools.

    python -m training.export model artifacts/train/3f9c2a71b0de OUT        a folder for `transformers`
    python -m training.export open-lm epoch_6.pt OUT --size 411M            an open_lm or DCLM checkpoint, as model.pt and config.json
    python -m training.export model OUT OUT2                                 and on to `transformers`

The decoder is no Llama: LayerNorm subtracts the mean, and q and k are normalised over their whole width. So the folder carries its own
model code (`training/huggingface`), which needs torch and transformers only; its logits are those of `training.model`. A folder is
written beside its final name and renamed.
"""

import contextlib
import json
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from craw4llm.errors import ConfigError, Craw4LLMError, InputError, StorageError
from training import checkpoint
from training.configs import NEOX_VOCAB, SIZES, Shape
from training.model import NORM_EPS, ROTARY_BASE, Transformer

CODE = Path(__file__).with_name("huggingface") / "modeling_craw4llm.py"
# Names in mlfoundations/open_lm, open_lm/model.py (class Transformer) -> ours; {i} is the layer.
OPEN_LM = {
    "tok_embeddings.weight": "embedding.weight",
    "layers.{i}.attention_norm.weight": "blocks.{i}.norm1.weight",
    "layers.{i}.attention.in_proj.weight": "blocks.{i}.attention.in_proj.weight",
    "layers.{i}.attention.out_proj.weight": "blocks.{i}.attention.out_proj.weight",
    "layers.{i}.attention.q_norm.weight": "blocks.{i}.attention.q_norm.weight",
    "layers.{i}.attention.k_norm.weight": "blocks.{i}.attention.k_norm.weight",
    "layers.{i}.ffn_norm.weight": "blocks.{i}.norm2.weight",
    "layers.{i}.feed_forward.w12.weight": "blocks.{i}.feed_forward.w12.weight",
    "layers.{i}.feed_forward.w3.weight": "blocks.{i}.feed_forward.w3.weight",
    "norm.weight": "norm.weight",
    "output.weight": "head.weight",
}
OPEN_LM_BUFFER = re.compile(r"layers\.\d+\.attention\.pos_embed\.inv_freq")  # the rotary table, which is computed


def export_model(model: Transformer, out: Path, *, tokenizer: Path | None = None) -> None:
    """Writes a folder that `AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)` loads.

    tokenizer: a tokenizer.json with its tokenizer_meta.json beside it (a tokenizer artifact's), for `AutoTokenizer`.
    """
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ConfigError("exporting needs the package safetensors: pip install safetensors") from error
    shape = model.shape
    config: dict[str, Any] = {
        "architectures": ["Craw4LLMForCausalLM"],
        "auto_map": {"AutoConfig": f"{CODE.stem}.Craw4LLMConfig", "AutoModelForCausalLM": f"{CODE.stem}.Craw4LLMForCausalLM"},
        "model_type": "craw4llm",
        "vocab_size": model.vocab_size,
        "hidden_size": shape.d_model,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "intermediate_size": shape.d_hidden,
        "max_position_embeddings": shape.context,
        "layer_norm_eps": NORM_EPS,
        "rotary_base": ROTARY_BASE,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_cache": False,
    }
    with _folder(out) as folder:
        if tokenizer is not None:
            config |= _write_tokenizer(tokenizer, folder, shape.context)
        tensors = {name: value.detach().to("cpu", torch.float32).contiguous() for name, value in model.state_dict().items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        shutil.copyfile(CODE, folder / CODE.name)
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def from_open_lm(state: Mapping[str, Any], shape: Shape) -> Transformer:
    """The model with the weights of an open_lm state dict, float32; its vocabulary is that of the embedding.

    state: the dict itself, or a checkpoint that holds it as "state_dict", with or without the prefix "module." of DDP. InputError names
    what is missing, left over or of another shape. open_lm rounds the rotary frequencies to bfloat16 while it trains; here they are
    float32, so logits are near its own, not equal.
    """
    tensors: dict[str, Any] = {name.removeprefix("module."): value for name, value in dict(state.get("state_dict", state)).items()}
    tensors = {name: value for name, value in tensors.items() if not OPEN_LM_BUFFER.fullmatch(name)}
    names = {}
    for theirs, ours in OPEN_LM.items():
        for layer in range(shape.n_layers) if "{i}" in theirs else (0,):
            names[theirs.format(i=layer)] = ours.format(i=layer)
    missing, extra = sorted(set(names) - set(tensors)), sorted(set(tensors) - set(names))
    if missing or extra:
        raise InputError(
            f"not an open_lm checkpoint of {shape.n_layers} layers with QK-norm and SwiGLU: {len(missing)} tensors missing "
            f"({', '.join(missing[:3])}), {len(extra)} not known ({', '.join(extra[:3])}); choose its --size"
        )
    vocab_size = int(tensors["tok_embeddings.weight"].shape[0])
    with torch.device("meta"):
        model = Transformer(shape, vocab_size)
    expected = {name: tuple(p.shape) for name, p in model.state_dict().items()}
    weights: dict[str, Tensor] = {}
    for theirs, ours in names.items():
        found = tuple(tensors[theirs].shape)
        if found != expected[ours]:
            raise InputError(f"{theirs} has the shape {found}, this size has {expected[ours]}; choose another --size")
        weights[ours] = tensors[theirs].to("cpu", torch.float32).contiguous()
    model.load_state_dict(weights, assign=True)
    return model.with_rotary_table().eval()


@contextlib.contextmanager
def _folder(out: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `out` at the end."""
    if out.exists():
        raise StorageError(f"{out} exists already; choose another folder or delete it")
    partial = out.with_name(f".partial-{out.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    partial.rename(out)


def _write_tokenizer(path: Path, folder: Path, context: int) -> dict[str, Any]:
    """Copies the tokenizer; returns what config.json says of it."""
    meta_path = path.with_name("tokenizer_meta.json")
    try:
        meta = json.loads(meta_path.read_text())
        end, end_id = str(meta["end_of_text"]), int(meta["end_of_text_id"])
        shutil.copyfile(path, folder / "tokenizer.json")
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{path}: expected a tokenizer.json with its tokenizer_meta.json beside it ({error!r})") from error
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "model_max_length": context}
    (folder / "tokenizer_config.json").write_text(json.dumps(described, indent=2, sort_keys=True) + "\n")
    return {"eos_token_id": end_id}


@click.group()
def cli() -> None:
    """Models for other tools, and models of other tools."""


@cli.command("model")
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--tokenizer", type=click.Path(path_type=Path, exists=True), help="A tokenizer artifact's tokenizer.json.")
def model_command(folder: Path, out: Path, tokenizer: Path | None) -> None:
    """Write the model of FOLDER (a train artifact) as a folder for transformers."""
    model, _ = checkpoint.load_folder(folder)
    export_model(model, out, tokenizer=tokenizer)
    click.echo(f"{out}: AutoModelForCausalLM.from_pretrained({str(out)!r}, trust_remote_code=True)")


@cli.command("open-lm")
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--size", type=click.Choice(list(SIZES)), default="411M", show_default=True)
def open_lm_command(file: Path, out: Path, size: str) -> None:
    """Read an open_lm or DCLM checkpoint FILE and write model.pt and config.json."""
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many types for a file that it cannot read
        raise InputError(f"{file} cannot be read as a torch checkpoint of tensors ({type(error).__name__})") from error
    model = from_open_lm(state, SIZES[size])
    with _folder(out) as folder:
        checkpoint.save_model(model, folder)
    note = "" if model.vocab_size == NEOX_VOCAB else f" (vocabulary of {model.vocab_size})"
    click.echo(f"{out}: {SIZES[size].parameters(model.vocab_size):,} parameters{note}")


if __name__ == "__main__":
    try:
        cli(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except Craw4LLMError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
