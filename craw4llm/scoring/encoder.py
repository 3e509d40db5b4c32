"""A sentence encoder with a regression head: the kind of scorer that FineWeb-Edu used (Penedo et al., 2024).

    EncoderScorer(folder, about, device).score(texts, ())

`transformers` reads the folder as a sequence classifier (AutoModelForSequenceClassification) with its tokenizer; the score is one of its
outputs, unbounded. White space is kept as it is, the text is cut at `max_tokens`, special tokens of the model included.

Pages go through the model sorted by length, in batches of exactly `batch_rows` rows padded to a multiple of `pad_to` tokens (a batch that
is not full is filled with its last page): all shapes are fixed, so a page's score does not depend on which pages it was scored with.
transformers and torch are imported when the first encoder is opened.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from craw4llm.errors import ConfigError, InputError
from craw4llm.scoring.scorer import EMPTY, SCORED, UNREADABLE, Reads, Reasons, Scores


class EncoderScorer:
    """about: output, max_tokens, batch_rows, pad_to (configs.Encoder). device: "auto", "cpu", "cuda" or "cuda:1"."""

    reads: Reads = "text"

    def __init__(self, folder: Path, about: Mapping[str, Any], device: str) -> None:
        self._about = about
        try:
            import torch
            import transformers
        except ImportError as error:
            raise ConfigError(f"scorer: an encoder needs torch and transformers ({error}); install them") from error
        self.device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        try:
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise InputError(f"scorer model: {folder} cannot be read as a sequence classifier with its tokenizer: {error}") from error
        outputs = int(model.config.num_labels)
        if not 0 <= about["output"] < outputs:
            raise InputError(f"scorer model: output is {about['output']}; the model in {folder} has {outputs} outputs")
        if self._tokenizer.pad_token_id is None:
            raise InputError(f"scorer model: the tokenizer in {folder} has no padding token; set one")
        longest = getattr(model.config, "max_position_embeddings", None)
        if longest is not None and about["max_tokens"] > longest:
            raise InputError(f"scorer model: max_tokens is {about['max_tokens']}; the model in {folder} reads at most {longest}")
        self._model: Any = model.to(self.device, torch.float32).eval()

    def score(self, texts: Sequence[str], urls: Sequence[str], pages: Sequence[int] = ()) -> tuple[Scores, Reasons]:
        import torch

        scores = np.full(len(texts), np.nan, dtype=np.float32)
        reasons = np.full(len(texts), EMPTY, dtype=np.uint8)
        rows = [row for row, text in enumerate(texts) if text and not text.isspace()]
        if not rows:
            return scores, reasons
        limit, width, pad = self._about["max_tokens"], self._about["batch_rows"], self._tokenizer.pad_token_id
        clean = [texts[row].encode("utf-8", "replace").decode() for row in rows]
        ids = self._tokenizer(clean, truncation=True, max_length=limit)["input_ids"]
        groups: dict[int, list[int]] = {}
        for k, one in enumerate(ids):
            groups.setdefault(min(limit, -(-len(one) // self._about["pad_to"]) * self._about["pad_to"]), []).append(k)
        with torch.inference_mode():
            for length in sorted(groups):
                members = groups[length]
                for start in range(0, len(members), width):
                    batch = members[start : start + width]
                    filled = batch + [batch[-1]] * (width - len(batch))
                    tokens = torch.tensor([ids[k] + [pad] * (length - len(ids[k])) for k in filled])
                    mask = torch.tensor([[1] * len(ids[k]) + [0] * (length - len(ids[k])) for k in filled])
                    logits = self._model(input_ids=tokens.to(self.device), attention_mask=mask.to(self.device)).logits
                    values = logits[:, self._about["output"]].float().cpu().numpy()
                    scores[[rows[k] for k in batch]] = values[: len(batch)]
        reasons[rows] = np.where(np.isfinite(scores[rows]), SCORED, UNREADABLE)
        scores[reasons != SCORED] = np.nan
        return scores, reasons
