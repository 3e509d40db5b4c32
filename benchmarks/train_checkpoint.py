"""What saving and reading cost a training step: seconds for which a background save stops it, tokens a second of the loader.

    python benchmarks/train_checkpoint.py --quick               the 79M size, 1 GB of state
    python benchmarks/train_checkpoint.py                       the 411M size: 5 GB of state, 12 GB of memory
    python benchmarks/train_checkpoint.py --device cuda         with the copy from the card in it
    python benchmarks/train_checkpoint.py --folder /scratch     where the states go

A save copies the state and writes it in the background (`training.states`); its peer is `torch.save` of the same tensors, which stops
the step until all is written. The loader is `training.data` with one thread; its peer is mosaicml-streaming's StreamingDataset with a
DataLoader of one worker over the same shards, shuffled. Both read files that are in the page cache.

Shares are calculated for 411M at 161,000 tokens/s on each of 1 and 8 cards (45% MFU: 6.5 s and 0.81 s a step of 1,048,576 tokens): one
save per 1,000 steps, its stall scaled by the bytes of the state; the loader's wait is what reading a batch takes longer than a step, and
"read" what it would be without reading ahead. The last line is a JSON object; `ratio` is tokens/s of the loader over the peer's.
"""

import argparse
import contextlib
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from craw4llm.tokens.shards import Shards, write_shards
from craw4llm.tokens.streaming_shim import streaming
from training.configs import NEOX_VOCAB, SIZES, TrainConfig
from training.data import Batches, Prefetch, inputs_and_targets
from training.device import resolve
from training.model import Transformer
from training.optimizer import adamw, empty_state, restore, state_of
from training.states import States

TOKENS_PER_S, CARDS, SAVE_STEPS = 161_000, (1, 8), 1000


def saves(size: str, device: torch.device, folder: Path, rounds: int) -> dict[str, float]:
    """Seconds of the stall, of the whole write and of torch.save (best of the rounds), and the state's bytes."""
    model = Transformer(SIZES[size], NEOX_VOCAB).to(device)
    optimizer = adamw(model, TrainConfig(size=size, token_budget=1 << 40))
    restore(optimizer, model, empty_state(model))
    tensors = state_of(optimizer, model) | {"model": model.state_dict()}
    states = States(folder / "states", {}, keep=1)
    stalls, writes, plain = [], [], []
    for step in range(rounds):
        before = states.stall_s
        states.save(step, tensors, {})
        stalls.append(states.stall_s - before)
        states.finish()
        writes.append(states.write_s)
        began = time.perf_counter()
        torch.save(tensors, folder / "plain.pt")
        plain.append(time.perf_counter() - began)
    size_bytes = sum(value.numel() * value.element_size() for named in tensors.values() for value in named.values())
    return {"stall_s": min(stalls), "write_s": min(writes), "torch_save_s": min(plain), "bytes": size_bytes}


def loads(folder: Path, samples: int, batch: int) -> dict[str, float]:
    """Tokens a second of the loader and of StreamingDataset over the same shards."""
    tokens = np.random.default_rng(0).integers(0, 50_000, (samples, 2049)).astype(np.uint16)
    write_shards(folder / "shards", tokens, np.arange(samples))
    shards = Shards(folder / "shards")
    steps = samples // batch

    def ours() -> float:
        batches = Batches(shards, batch_sequences=batch, seed=124)
        began = time.perf_counter()
        with contextlib.closing(Prefetch(batches, slice(None), torch.device("cpu"), 0, steps)) as data:
            for step in range(steps):
                data[step]
        return steps * batch * 2048 / (time.perf_counter() - began)

    package = streaming()
    package.base.util.clean_stale_shared_memory()
    dataset = package.StreamingDataset(
        local=str(folder / "shards"), shuffle=True, shuffle_seed=124, batch_size=batch, num_canonical_nodes=1, predownload=batch
    )

    def peer() -> float:
        loader = torch.utils.data.DataLoader(
            dataset, batch_size=batch, num_workers=1, collate_fn=lambda rows: inputs_and_targets(np.stack([row["tokens"] for row in rows]))
        )
        began, count = time.perf_counter(), 0
        for inputs, _ in loader:
            count += inputs.numel()
        return count / (time.perf_counter() - began)

    found: dict[str, list[float]] = {"loader": [], "streaming": []}
    for _ in range(3):
        found["loader"].append(ours())
        found["streaming"].append(peer())
    return {name: max(values) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sorted(SIZES), default="411M")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where files go (default: the temporary folder)")
    parser.add_argument("--quick", action="store_true", help="the 79M size, 2 rounds, 40 MB of samples")
    options = parser.parse_args()
    size, rounds, samples = ("79M", 2, 10_240) if options.quick else (options.size, options.rounds, 40_960)
    with tempfile.TemporaryDirectory(prefix="train-checkpoint-", dir=options.folder) as name:
        saved = saves(size, resolve(options.device), Path(name), rounds)
        read = loads(Path(name), samples, 512)
    scale = SIZES["411M"].parameters(NEOX_VOCAB) / SIZES[size].parameters(NEOX_VOCAB)
    print(f"{size}: {saved['bytes'] / 1e9:.2f} GB of state, {options.device}")
    print(f"  save: stops the step for {saved['stall_s']:.3f} s, on disk and verified after {saved['write_s']:.2f} s")
    print(f"  torch.save in the foreground: {saved['torch_save_s']:.2f} s (not flushed, not verified)")
    print(f"  loader: {read['loader'] / 1e6:,.1f} million tokens/s; StreamingDataset: {read['streaming'] / 1e6:,.1f}")
    shares = {}
    for cards in CARDS:
        step_s = 1_048_576 / (TOKENS_PER_S * cards)
        read_s = 1_048_576 / read["loader"]
        shares[str(cards)] = {
            "stall": round(saved["stall_s"] * scale / (SAVE_STEPS * step_s), 6),
            "wait": round(max(0.0, read_s - step_s) / step_s, 6),
            "read": round(read_s / step_s, 6),
        }
        stall, wait, reading = shares[str(cards)].values()
        print(f"  411M on {cards} card(s), {step_s:.2f} s a step: stall {stall:.4%}, wait for data {wait:.2%} (read {reading:.2%})")
    result = {
        "ratio": round(read["loader"] / read["streaming"], 2),
        "loader_tokens_per_s": round(read["loader"]),
        "stall_s": round(saved["stall_s"], 4),
        "stall_over_torch_save": round(saved["stall_s"] / saved["torch_save_s"], 3),
        "shares": shares,
        "size": size,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
