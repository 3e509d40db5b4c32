"""Models and tokenizers for the tests of the evaluation: right answers without training."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from training.evaluation.tasks import TASKS, TaskFile, parse_task_file
from training.model import Branches

# jeopardy's sample lines are all of one category; the golden files use another cut of it.
GOLDEN_FILES = {"jeopardy": "jeopardy_all_8_per_category.jsonl"}


class FormulaModel:
    """The weightless model of the reference data's golden_scores.jsonl: causal, exact in float32 (formula: README there)."""

    vocab_size = 50_432
    context = 2048
    takes_branches = False

    def __init__(self) -> None:
        self._v = np.arange(self.vocab_size, dtype=np.int64)

    def hidden(self, tokens: torch.Tensor, branches: Branches | None = None) -> torch.Tensor:
        """States [B, T, T + 1]: the position and all tokens of the row, from which `logits` uses those up to the position."""
        batch, width = tokens.shape
        position = torch.arange(width).expand(batch, width)[..., None]
        return torch.cat([position, tokens[:, None, :].expand(batch, width, width)], dim=2)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.stack([self._at(row[1:], int(row[0])) for row in states.numpy()]))

    def _at(self, x: NDArray[np.int64], t: int) -> NDArray[np.float32]:
        p = x[t - 1] if t > 0 else 0
        z = ((((x[t] + 7) * (self._v + 11) * 48271 + p * 69621) % 65521) / 8192).astype(np.float32)
        s = np.arange(1, t)
        pairs = s[(x[s - 1] == p) & (x[s] == x[t])]
        np.add.at(z, x[pairs + 1], np.float32(3))
        same = np.flatnonzero(x[:t] == x[t])
        if len(same):
            z[x[same[-1] + 1]] += 5
        return z


class NextToken:
    """Every token is followed by `follow(token)` with probability p; the rest of the mass is spread evenly."""

    takes_branches = True  # it reads nothing but the token itself

    def __init__(self, follow: Callable[[int], int], vocab_size: int, context: int = 64, p: float = 0.9) -> None:
        self.vocab_size, self.context = vocab_size, context
        table = torch.full((vocab_size, vocab_size), (1 - p) / (vocab_size - 1))
        for token in range(vocab_size):
            table[token, follow(token)] = p
        self._table = table.log()

    def hidden(self, tokens: torch.Tensor, branches: Branches | None = None) -> torch.Tensor:
        return tokens[..., None]

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self._table[states[:, 0]]


class Mixer(torch.nn.Module):
    """A small random causal network whose every state depends on all tokens so far and on their positions."""

    takes_branches = True

    def __init__(self, vocab_size: int = 300, context: int = 96, width: int = 16, seed: int = 0) -> None:
        super().__init__()
        self.vocab_size, self.context = vocab_size, context
        generator = torch.Generator().manual_seed(seed)
        self.embed = torch.randn(vocab_size, width, generator=generator)
        self.position = torch.randn(context, width, generator=generator)
        self.query, self.key, self.value = (torch.randn(width, width, generator=generator) / 4 for _ in range(3))
        self.head = torch.randn(width, vocab_size, generator=generator)

    def hidden(self, tokens: torch.Tensor, branches: Branches | None = None) -> torch.Tensor:
        """A state is its token plus a weighted mean over what it sees; the mask is written out here, unlike in the product."""
        width = tokens.shape[1]
        sees = torch.ones(width, width, dtype=torch.bool).tril()[None].repeat(len(tokens), 1, 1)
        place = torch.arange(width).expand(len(tokens), -1)
        if branches is not None:
            place = branches.position_BT
            sees[:, branches.width :] = branches.sees_B1QT[:, 0]
        x = self.embed[tokens] + self.position[place]
        weights = (x @ self.query) @ (x @ self.key).transpose(1, 2) / x.shape[-1] ** 0.5
        return x + weights.masked_fill(~sees, -torch.inf).softmax(-1) @ (x @ self.value)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return states @ self.head


def letters(text: str) -> list[int]:
    """One id per character: its code point."""
    return [ord(character) for character in text]


def golden_file(shared: Path, label: str) -> TaskFile:
    """The sample file that the golden rows of a task were made from."""
    task = TASKS[label]
    path = shared / "eval_samples" / GOLDEN_FILES.get(label, task.file_name)
    return parse_task_file(task, path.name, path.read_bytes(), own=True)


def file_of(label: str, *rows: object) -> TaskFile:
    """A task file of these rows."""
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    return parse_task_file(TASKS[label], f"{label}.jsonl", content, own=True)


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
