"""Models to evaluate: our checkpoints, and any causal language model that `transformers` opens.

    model = TorchModel(transformer, device, "fp32")               of the chain
    opened = open_model("folder or name", device, precision)      for `craw4llm evaluate`
        a folder of a train artifact, any folder with its model.pt and config.json,
        or whatever `transformers.AutoModelForCausalLM` takes: an exported or downloaded folder, a name in its cache

`transformers` is imported only for its own models. Such a model is tried out when it is opened, on ids drawn at random: whether its head
applied to its last states gives its logits (if not, as where logits are scaled or capped, its own logits are used at every position), and
whether its cache and a mask of ours give what the plain sequences give (if not, options are scored one by one). What was found stands
in `notes`, so that nobody has to guess which way was taken.
"""

import contextlib
import dataclasses
import hashlib
import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as Engine

from craw4llm.errors import ArtifactError, ConfigError, InputError
from craw4llm.externals import sha256_file
from training.checkpoint import CONFIG, MODEL, load_weights
from training.configs import Precision
from training.model import Branches, Transformer

DCLM_CONTEXT = 2048  # max_seq_len of DCLM's evaluation; longer contexts would crop less and give other numbers
PROBE_TOLERANCE = {"fp32": 1e-3, "tf32": 2e-2, "bf16": 2.5e-1}  # nats, of the largest log-probability that matters in the probe
PROBE_LENGTH = 24
CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx", "seq_length")  # of transformers' configs
WINDOW_NAMES = ("sliding_window", "attention_chunk_size")
END_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>")


class TorchModel:
    """A model of this project as a `likelihood.Model`: states and logits apart, so that logits are computed only where they are scored."""

    takes_branches = True

    def __init__(self, model: Transformer, device: torch.device, precision: Precision = "fp32") -> None:
        self._model = model
        self.vocab_size = model.vocab_size
        self.context = model.shape.context
        self.device = device
        self._precision = precision

    def hidden(self, tokens: torch.Tensor, branches: Branches | None = None) -> torch.Tensor:
        with lower_precision(self.device, self._precision):
            return self._model.hidden(tokens.to(self.device), None if branches is None else _to(branches, self.device))

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        with lower_precision(self.device, self._precision):
            logits: torch.Tensor = self._model.head(states)
        return logits.float()


class TransformersModel:
    """A causal model of the `transformers` library as a `likelihood.Model`. notes: what the probe found."""

    def __init__(self, model: Any, device: torch.device, precision: Precision, context: int) -> None:
        self._model = model.to(device).eval()
        self._head = model.get_output_embeddings()
        self._body = getattr(model, getattr(model, "base_model_prefix", "") or "model", None)
        # transformers 5.24 calls it "cache", older versions "past_key_values".
        takes = inspect.signature((self._body or model).forward).parameters
        self._cache = "cache" if "cache" in takes else "past_key_values"
        self.vocab_size = int(self._head.weight.shape[0]) if self._head is not None else int(model.config.vocab_size)
        self.context = context
        self.device = device
        self._precision: Precision = precision
        self.takes_branches = False
        self.notes: list[str] = []
        self._probe()

    def hidden(self, tokens: torch.Tensor, branches: Branches | None = None) -> torch.Tensor:
        tokens = tokens.to(self.device)
        with lower_precision(self.device, self._precision):
            if branches is None:
                return self._states(input_ids=tokens, use_cache=False)[0]
            branches = _to(branches, self.device)
            first, cache = self._states(input_ids=tokens[:, : branches.width], use_cache=True)
            unseen = torch.finfo(first.dtype).min
            mask = torch.zeros(branches.sees_B1QT.shape, dtype=first.dtype, device=self.device).masked_fill(~branches.sees_B1QT, unseen)
            rest, _ = self._states(
                input_ids=tokens[:, branches.width :],
                **{self._cache: cache},
                attention_mask=mask,
                position_ids=branches.position_BT[:, branches.width :],
                use_cache=True,
            )
            return torch.cat((first, rest), dim=1)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        if self._body is None:
            return states.float()
        with lower_precision(self.device, self._precision):
            return self._head(states).float()

    def _states(self, **given: Any) -> tuple[torch.Tensor, Any]:
        out = (self._model if self._body is None else self._body)(**given)
        return (out.logits if self._body is None else out.last_hidden_state), getattr(out, self._cache, None)

    @torch.inference_mode()
    def _probe(self) -> None:
        tolerance = PROBE_TOLERANCE[self._precision]
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self.vocab_size, (2, min(PROBE_LENGTH, self.context)), generator=generator)
        with lower_precision(self.device, self._precision):
            whole = self._model(input_ids=ids.to(self.device), use_cache=False).logits.float()
        if self._body is not None and (self._head is None or not self._agrees(lambda: self._plain(ids), whole, tolerance)):
            self._body = None
            self.notes.append("its head applied to its states does not give its logits: all logits are computed")
        # The second row's beginning is shorter, and each row has two branches, of which the second must not see the first.
        width, lengths, split = ids.shape[1] - 8, (ids.shape[1] - 8, ids.shape[1] - 11), 4
        tokens = torch.zeros((2, width + 8), dtype=torch.int64)
        position = torch.arange(width + 8).expand(2, -1).clone()
        branch = torch.tensor([0] * split + [1] * (8 - split))
        sees = torch.zeros((2, 1, 8, width + 8), dtype=torch.bool)
        for row, length in enumerate(lengths):
            tokens[row, :length] = ids[row, :length]
            for start in (0, split):
                columns = slice(width + start, width + start + split)
                tokens[row, columns] = ids[row, length : length + split] if start == 0 else ids[row, -split:]
                position[row, columns] = torch.arange(length, length + split)
            sees[row, 0, :, :length] = True
            sees[row, 0, :, width:] = (branch[:, None] == branch[None, :]).tril()
        expected = [self._plain(torch.cat((ids[r, :n], ids[r, -split:]))[None])[0, n:] for r, n in enumerate(lengths)]

        def branched() -> torch.Tensor:
            return self.logits(self.hidden(tokens, Branches(width, position, sees)))[:, width + split :]

        window = next((w for name in WINDOW_NAMES if isinstance(w := getattr(self._model.config, name, None), int)), None)
        if window is not None and window < self.context:  # longer than the probe, so the probe might not show it
            self.notes.append(f"it attends to windows of {window} tokens: options are scored one by one")
            return
        self.takes_branches = self._agrees(branched, torch.stack(expected), tolerance)
        if not self.takes_branches:
            self.notes.append("its cache does not take several branches behind one beginning: options are scored one by one")

    def _plain(self, ids: torch.Tensor) -> torch.Tensor:
        return self.logits(self.hidden(ids))

    @staticmethod
    def _agrees(made: Callable[[], torch.Tensor], expected: torch.Tensor, tolerance: float) -> bool:
        """Whether both give the same probabilities, as far as a model that refuses such a call answers at all."""
        try:
            found = made()
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, NotImplementedError):
            return False
        if found.shape != expected.shape:
            return False
        a, b = found.log_softmax(-1), expected.log_softmax(-1)
        likely = b > b.amax(-1, keepdim=True) - 10  # far tails carry no weight and large absolute errors
        return bool((a - b)[likely].abs().max() <= tolerance)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenedModel:
    """model: ready to score. encode_batch: texts -> ids, or None where the model came without a tokenizer. kind: "craw4llm" or
    "transformers". digest: SHA-256 over the names and contents of its files, or of its name where it is no folder. notes: for people."""

    model: TorchModel | TransformersModel
    encode_batch: Callable[[Sequence[str]], list[list[int]]] | None
    end_of_text_id: int | None
    kind: str
    digest: str
    notes: tuple[str, ...]


def open_model(
    where: str,
    device: torch.device,
    precision: Precision = "fp32",
    *,
    tokenizer: Path | None = None,
    context: int = 0,
    trust_remote_code: bool = False,
) -> OpenedModel:
    """The model at `where`.

    tokenizer: a tokenizer.json to use instead of the model's own. context: tokens at most; 0: the model's context, DCLM_CONTEXT at most.
    trust_remote_code: run Python code that comes with a transformers model. Raises InputError, ConfigError, ArtifactError.
    """
    folder = Path(where)
    own = folder / CONFIG
    is_own = own.is_file() and (folder / MODEL).is_file() and "shape" in _json(own)
    found: TorchModel | TransformersModel
    encode_batch: Callable[[Sequence[str]], list[list[int]]] | None = None
    end: int | None = None
    if is_own:
        found = TorchModel(load_weights(folder / MODEL, _json(own), device), device, precision)
        limit = found.context
    else:
        found, encode_batch, end, limit = _open_transformers(where, device, precision, trust_remote_code)
    if not 0 <= context <= limit or context == 1:
        raise ConfigError(f"evaluate: context is {context}; expected 0 or 2 to {limit}, the context of {where}")
    found.context = context or min(limit, DCLM_CONTEXT)
    own_tokenizer = folder / "tokenizer.json"
    if tokenizer is None and encode_batch is None and own_tokenizer.is_file():
        tokenizer = own_tokenizer
    if tokenizer is not None:
        encode_batch, end = _engine(tokenizer)
    return OpenedModel(
        model=found,
        encode_batch=encode_batch,
        end_of_text_id=end,
        kind="craw4llm" if is_own else "transformers",
        digest=_digest(where),
        notes=tuple(found.notes) if isinstance(found, TransformersModel) else (),
    )


@contextlib.contextmanager
def lower_precision(device: torch.device, precision: Precision) -> Any:
    """bf16: matrix products under autocast. tf32: CUDA's 19-bit products (a CPU has none and computes in float32). fp32: all bits."""
    if precision == "bf16":
        with torch.autocast(device.type, dtype=torch.bfloat16):
            yield
    elif device.type == "cuda":
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        try:
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before
    else:
        yield


def _open_transformers(
    where: str, device: torch.device, precision: Precision, trust: bool
) -> tuple[TransformersModel, Any, int | None, int]:
    if Path(where).exists() and not (Path(where) / "config.json").is_file():
        raise InputError(
            f"{where} holds no model: expected {MODEL} and {CONFIG} of a train artifact, or config.json and weights of a transformers model"
        )
    try:
        import transformers
    except ImportError as error:
        raise InputError(
            f"{where} is no checkpoint of this project, and transformers is not installed: pip install transformers"
        ) from error
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, trust_remote_code=trust)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise InputError(f"{where}: transformers cannot open it as a causal language model ({_first_line(error)})") from error
    config = model.config
    limits = [
        getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx", "seq_length")
    ]
    limit = next((int(n) for n in limits if isinstance(n, int) and n > 1), DCLM_CONTEXT)
    opened = TransformersModel(model, device, precision, limit)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, trust_remote_code=trust)
    except (OSError, ValueError, ImportError, KeyError, AttributeError):
        return opened, None, None, limit

    def encode_batch(texts: Sequence[str]) -> list[list[int]]:
        # No begin of text and no end: DCLM's prompts have none.
        return [list(ids) for ids in tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]] if texts else []

    return opened, encode_batch, tokenizer.eos_token_id, limit


def _engine(path: Path) -> tuple[Callable[[Sequence[str]], list[list[int]]], int | None]:
    if not path.is_file():
        raise InputError(f"tokenizer: {path} does not exist; give a tokenizer.json of the tokenizers library")
    try:
        engine = Engine.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"tokenizer: {path} is no tokenizer.json of the tokenizers library ({_first_line(error)})") from error
    engine.no_truncation()
    engine.no_padding()
    end = next(
        (engine.token_to_id(name) for name in ("<|endoftext|>", "</s>", "<|end_of_text|>") if engine.token_to_id(name) is not None), None
    )
    return lambda texts: [list(e.ids) for e in engine.encode_batch_fast(list(texts), add_special_tokens=False)], end


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path} cannot be read as JSON ({error}); give the folder of a whole model") from error
    return found if isinstance(found, dict) else {}


def _digest(where: str) -> str:
    folder = Path(where)
    if not folder.is_dir():
        return hashlib.sha256(where.encode()).hexdigest()
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "manifest.json")
    return hashlib.sha256("".join(f"{sha256_file(p)}  {p.relative_to(folder).as_posix()}\n" for p in files).encode()).hexdigest()


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0][:200]


def _to(branches: Branches, device: torch.device) -> Branches:
    return Branches(branches.width, branches.position_BT.to(device), branches.sees_B1QT.to(device))
