"""Items per second of the evaluation against nanochat's loop and lm-evaluation-harness: the same model, the same items, one run.

    python benchmarks/evaluate.py --nanochat CHECKOUT [--tasks FOLDER] [--quick]
    python benchmarks/evaluate.py --nanochat CHECKOUT --device cuda --size 411M --precision tf32

Tasks: the 10-shot multiple-choice entries, on the sample files in $CRAW4LLM_SHARED/eval_samples (or --tasks). Every side makes its own
prompts from the items, encodes them with the same tokenizer and runs the same weights, on one CPU thread (--threads, --device).

1. Ours against nanochat's `core_eval.evaluate_task` (github.com/karpathy/nanochat), a randomly initialised model of this project's 11M
   shape. Prompts differ a little (nanochat puts an empty line between examples and a begin-of-text in front); tokens are shown.
   Our answers are then compared over batch sizes 1, 8 and the default.
2. Where lm-evaluation-harness can be imported (pip install lm-eval accelerate): ours through transformers against its Hugging Face
   backend, a randomly initialised Llama, the same prompt texts. And a cross-check: on 0-shot multiple-choice items whose token
   boundaries agree, the summed log-likelihood of each option must agree to 1e-3.

Prints tables and, as last line, a JSON object: `ratio` (ours over nanochat, items per second over all tasks), `ratio_lm_eval`,
`max_difference_lm_eval` (nats), `losses_over_batch_sizes` (nats).
"""

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer as Engine

from training.configs import SIZES
from training.device import numerics, resolve
from training.evaluation.likelihood import Batching, score_prompts
from training.evaluation.models import TorchModel, TransformersModel, lower_precision
from training.evaluation.prompts import EncodedPrompt, Prompt, encode_prompts, prompts
from training.evaluation.tasks import TASKS, TaskFile, parse_task_file
from training.model import Transformer

ROOT = Path(__file__).resolve().parent.parent
TEN_SHOT = [t.label for t in TASKS.values() if t.kind == "mc" and t.shots == 10]
ZERO_SHOT = [t.label for t in TASKS.values() if t.kind == "mc" and t.shots == 0]
CONTEXT = 2048

EncodeBatch = Callable[[Sequence[str]], list[list[int]]]


def main() -> None:
    shared = Path(os.environ.get("CRAW4LLM_SHARED", ROOT.parent / "shared"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanochat", type=Path, help="a checkout of github.com/karpathy/nanochat")
    parser.add_argument("--tasks", type=Path, default=shared / "eval_samples", help="folder of task files")
    parser.add_argument("--tokenizer", type=Path, default=shared / "tokenizer" / "20B_tokenizer.json")
    parser.add_argument("--size", default="11M", choices=list(SIZES), help="shape of the model for the comparison with nanochat")
    parser.add_argument("--items", type=int, default=40, help="items of each task")
    parser.add_argument("--labels", default=",".join(TEN_SHOT), help="entries for the comparison with nanochat, comma-separated")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "tf32", "bf16"], help="of ours and of nanochat's loop")
    parser.add_argument("--quick", action="store_true", help="12 items of each task")
    arguments = parser.parse_args()
    arguments.items = 12 if arguments.quick else arguments.items
    for path in (arguments.tasks, arguments.tokenizer):
        if not path.exists():
            sys.exit(f"{path} does not exist; give --tasks and --tokenizer, or set CRAW4LLM_SHARED")
    engine = Engine.from_file(str(arguments.tokenizer))

    def encode_batch(texts: Sequence[str]) -> list[list[int]]:
        return [list(e.ids) for e in engine.encode_batch_fast(list(texts), add_special_tokens=False)]

    files = {label: first_items(arguments.tasks, label, arguments.items) for label in (*TEN_SHOT, *ZERO_SHOT)}
    result: dict[str, Any] = {"items_per_task": arguments.items, "threads": arguments.threads, "size": arguments.size}
    device = resolve(arguments.device)
    result["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    with numerics(device, arguments.threads):
        result.update(against_nanochat(arguments, files, encode_batch, device))
        result.update(against_lm_eval(files, encode_batch, arguments.tokenizer, device))
    print(json.dumps(result))
    if (result["max_difference_lm_eval"] or 0) > 1e-3:
        sys.exit("log-likelihoods differ from lm-evaluation-harness by more than 1e-3")


def first_items(folder: Path, label: str, count: int) -> TaskFile:
    task = TASKS[label]
    lines = (folder / task.file_name).read_bytes().split(b"\n")[:count]
    return parse_task_file(task, task.file_name, b"\n".join(lines) + b"\n", own=True)


def ours(file: TaskFile, encode_batch: EncodeBatch, model: Any, batching: Batching = Batching()) -> tuple[list[EncodedPrompt], list[Any]]:  # noqa: B008
    items = encode_prompts(list(prompts(file)), encode_batch, CONTEXT)
    return items, list(score_prompts(items, model, batching))


def against_nanochat(
    arguments: argparse.Namespace, files: dict[str, TaskFile], encode_batch: EncodeBatch, device: torch.device
) -> dict[str, Any]:
    model = Transformer(SIZES[arguments.size], 50_432, seed=1).to(device).eval()
    mine = TorchModel(model, device, arguments.precision)
    spread = 0.0
    choices_equal = True
    labels = arguments.labels.split(",")
    if unknown := [label for label in labels if label not in TEN_SHOT]:
        sys.exit(f"--labels: {', '.join(unknown)}; expected some of {', '.join(TEN_SHOT)}")
    for label in labels[:2]:
        runs = [ours(files[label], encode_batch, mine, b)[1] for b in (Batching(sequences=1), Batching(sequences=8), Batching())]
        for scores in zip(*runs, strict=True):
            choices_equal &= len({score.choice for score in scores}) == 1
            spread = max(spread, *(float(np.abs(score.losses - scores[0].losses).max()) for score in scores))
    result: dict[str, Any] = {"ratio": None, "choices_equal_over_batch_sizes": choices_equal, "losses_over_batch_sizes": spread}
    print(f"batch sizes 1, 8 and default: choices {'equal' if choices_equal else 'DIFFER'}, losses within {spread:.1e} nats\n")
    if arguments.nanochat is None:
        print("nanochat: not measured (--nanochat CHECKOUT)\n")
        return result
    sys.path.insert(0, str(arguments.nanochat))
    try:
        core_eval = importlib.import_module("nanochat.core_eval")
    except ImportError as error:
        sys.exit(f"{arguments.nanochat} is no checkout of nanochat ({error})")

    class Theirs:
        """What nanochat's loop calls: logits of all positions."""

        max_seq_len = CONTEXT

        def __call__(self, ids: torch.Tensor) -> torch.Tensor:
            seen[0] += ids.numel()
            with lower_precision(device, arguments.precision):
                logits: torch.Tensor = model(ids)
            return logits

    class Words:
        def get_bos_token_id(self) -> int:
            return 0

        def __call__(self, texts: list[str], prepend: int) -> list[list[int]]:
            return [[prepend, *ids] for ids in encode_batch(texts)]

    class Counting(TorchModel):
        def hidden(self, tokens: torch.Tensor, branches: Any = None) -> torch.Tensor:
            seen[1] += tokens.numel()
            return super().hidden(tokens, branches)

    counting = Counting(model, device, arguments.precision)
    names = {"mc": "multiple_choice", "lm": "language_modeling", "schema": "schema"}
    print(f"{'task':34} {'items':>5} {'nanochat/s':>11} {'ours/s':>9} {'ratio':>6} {'tokens read: nanochat':>22} {'ours':>9}")
    total = [0.0, 0.0]
    count = tokens = 0
    for label in labels:
        file = files[label]
        seen = [0, 0]
        task = {"task_type": names[file.task.kind], "num_fewshot": file.task.shots, "continuation_delimiter": file.task.delimiter}
        data = [dict(row) for row in file.rows]
        seconds = [
            timed(lambda data=data, task=task: core_eval.evaluate_task(Theirs(), Words(), data, device, task)),
            timed(lambda file=file: ours(file, encode_batch, counting, Batching.on(device))),
        ]
        n = len(file.rows)
        speed, ratio = [n / s for s in seconds], seconds[0] / seconds[1]
        print(f"{label:34} {n:>5} {speed[0]:>11.2f} {speed[1]:>9.2f} {ratio:>6.2f} {seen[0]:>22,} {seen[1]:>9,}", flush=True)
        total = [a + b for a, b in zip(total, seconds, strict=True)]
        count += n
        tokens += seen[1]
    print(f"{'all':34} {count:>5} {count / total[0]:>11.2f} {count / total[1]:>9.2f} {total[0] / total[1]:>6.2f}")
    print(f"ours reads {tokens / total[1]:,.0f} tokens/s\n")
    return {
        **result,
        "ratio": total[0] / total[1],
        "tokens_per_second": tokens / total[1],
        "items_per_second": count / total[1],
        "nanochat_items_per_second": count / total[0],
    }


def against_lm_eval(files: dict[str, TaskFile], encode_batch: EncodeBatch, tokenizer: Path, device: torch.device) -> dict[str, Any]:
    result: dict[str, Any] = {"ratio_lm_eval": None, "max_difference_lm_eval": None, "options_compared_lm_eval": 0}
    try:
        transformers = importlib.import_module("transformers")
        HFLM = importlib.import_module("lm_eval.models.huggingface").HFLM
    except ImportError as error:
        print(f"lm-evaluation-harness: not measured ({error})\n")
        return result
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50_432,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
    )
    llama = transformers.LlamaForCausalLM(config).float().eval()
    mine = TransformersModel(llama, device, "fp32", CONTEXT)
    words = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokenizer), eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    harness = HFLM(pretrained=llama, tokenizer=words, backend="causal", batch_size=8, max_length=CONTEXT, device=str(device))

    def theirs(pairs: list[tuple[str, str]]) -> list[float]:
        return [value for value, _ in harness.loglikelihood([SimpleNamespace(args=pair) for pair in pairs], disable_tqdm=True)]

    difference = 0.0
    compared = 0
    for label in ZERO_SHOT:
        items, scores = ours(files[label], encode_batch, mine)
        pairs, sums = [], []
        for item, score in zip(items, scores, strict=True):
            for k, pair in enumerate(texts(item.prompt)):
                if encode_batch(["".join(pair)])[0] == [*item.contexts[k].tolist(), *item.continuations[k].tolist()]:
                    pairs.append(pair)
                    sums.append(-float(score.losses[k]) * len(item.continuations[k]))
        difference = max(difference, *np.abs(np.array(theirs(pairs)) - np.array(sums)))
        compared += len(pairs)
    print(f"summed log-likelihoods of {compared} options of {', '.join(ZERO_SHOT)}: within {difference:.1e} nats of lm-evaluation-harness")
    labels = [label for label in TEN_SHOT if label != "bigbench_language_identification"]
    n = sum(len(files[label].rows) for label in labels)
    made = {label: [pair for prompt in prompts(files[label]) for pair in texts(prompt)] for label in labels}
    spent = [
        timed(lambda: [theirs(made[label]) for label in labels]),
        timed(lambda: [ours(files[label], encode_batch, mine) for label in labels]),
    ]
    print(
        f"{', '.join(labels)}: lm-evaluation-harness {n / spent[0]:.2f} items/s, ours {n / spent[1]:.2f} ({spent[0] / spent[1]:.2f} times)"
    )
    return {"ratio_lm_eval": spent[0] / spent[1], "max_difference_lm_eval": difference, "options_compared_lm_eval": compared}


def texts(prompt: Prompt) -> list[tuple[str, str]]:
    return [(prompt.preamble + before, after) for before, after in zip(prompt.contexts, prompt.continuations, strict=True)]


def timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
