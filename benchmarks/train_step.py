"""Training steps: ours, a plain `transformers` Llama of equal shape, nanochat's GPT of equal shape. Tokens per second in one run.

    python benchmarks/train_step.py --quick                          the 11M size on a CPU, within 5 minutes on two busy cores
    python benchmarks/train_step.py --nanochat ../nanochat           with a checkout of karpathy/nanochat
    python benchmarks/train_step.py --size 411M --batch 16 --compile --precision bf16 --device cuda

A step is: forward, loss, backward, clip to norm 1, fused AdamW, on the same batch, dtype, threads and matrix kernels for all. The models
take turns, and the figure is each one's best round: on a shared machine every disturbance makes a step longer, none makes it shorter.
Llama computes its loss as `transformers` does; nanochat's GPT runs in full attention, without its value embeddings (which would cost
it more) and under AdamW, where its own optimiser (Muon) does more work. The last line is a JSON object; `ratio` is our tokens per
second over the faster peer's.
"""

import argparse
import dataclasses
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from training.configs import NEOX_VOCAB, SIZES, Shape, TrainConfig
from training.device import numerics, resolve
from training.distributed import Ranks
from training.loop import LossOf, gradients
from training.model import Transformer
from training.optimizer import adamw
from training.watch import peak_flops

Step = Callable[[torch.Tensor, torch.Tensor], float]


def ours(shape: Shape, config: TrainConfig, device: torch.device, micro: int, compiled: bool) -> tuple[Step, int]:
    model = Transformer(shape, config.vocab_size).to(device)
    if compiled:
        for block in model.blocks:
            block.compile()
    loss_of, optimizer, parameters = LossOf(model, config), adamw(model, config), list(model.parameters())

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        loss = gradients(loss_of, inputs, targets, micro, Ranks())
        torch.nn.utils.clip_grad_norm_(parameters, config.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step, sum(p.numel() for p in parameters)


def peer(model: torch.nn.Module, loss_of: Callable[..., torch.Tensor], config: TrainConfig, micro: int, low: bool) -> tuple[Step, int]:
    """The same step around a peer's model."""
    optimizer, parameters = adamw(model, config), list(model.parameters())

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        total = 0.0
        for start in range(0, len(inputs), micro):
            x, y = inputs[start : start + micro], targets[start : start + micro]
            with torch.autocast(inputs.device.type, dtype=torch.bfloat16, enabled=low):
                loss = loss_of(x, y) * (len(x) / len(inputs))
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(parameters, config.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step, sum(p.numel() for p in parameters)


def llama(shape: Shape, config: TrainConfig, device: torch.device, micro: int, compiled: bool) -> tuple[Step, int]:
    from transformers import LlamaConfig, LlamaForCausalLM

    described = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=shape.d_model,
        intermediate_size=shape.d_hidden,
        num_hidden_layers=shape.n_layers,
        num_attention_heads=shape.n_heads,
        max_position_embeddings=shape.context,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(described).to(device)
    called = torch.compile(model) if compiled else model
    # labels are moved on by the model itself, so it is given the targets as already moved (shift_labels)
    return peer(model, lambda x, y: called(x, labels=y, shift_labels=y).loss, config, micro, config.precision == "bf16")


def nanochat(checkout: Path, shape: Shape, config: TrainConfig, device: torch.device, micro: int, compiled: bool) -> tuple[Step, int]:
    os.environ["NANOCHAT_DTYPE"] = "bfloat16" if config.precision == "bf16" else "float32"
    sys.path.insert(0, str(checkout))
    try:
        from nanochat import gpt
    except ImportError as error:
        sys.exit(f"{checkout} is no checkout of karpathy/nanochat ({error})")
    gpt.has_ve = lambda layer, layers: False
    described = gpt.GPTConfig(
        sequence_len=shape.context,
        vocab_size=config.vocab_size,
        n_layer=shape.n_layers,
        n_head=shape.n_heads,
        n_kv_head=shape.n_heads,
        n_embd=shape.d_model,
        window_pattern="L",
    )
    with torch.device("meta"):
        model = gpt.GPT(described)
    model.to_empty(device=device)
    model.init_weights()
    called = torch.compile(model) if compiled else model
    return peer(model, lambda x, y: called(x, y), config, micro, False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sorted(SIZES), default="11M")
    parser.add_argument("--batch", type=int, default=2, help="sequences a step")
    parser.add_argument("--micro-batch", type=int, default=0, help="sequences at once (0: all)")
    parser.add_argument("--context", type=int, default=0, help="tokens of a sequence (0: the size's)")
    parser.add_argument("--vocab", type=int, default=NEOX_VOCAB)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--compile", action="store_true", help="torch.compile for all")
    parser.add_argument("--nanochat", type=Path, metavar="CHECKOUT")
    parser.add_argument("--quick", action="store_true", help="3 rounds of 1 sequence")
    options = parser.parse_args()
    rounds = 3 if options.quick else options.rounds
    options.batch = 1 if options.quick else options.batch
    device = resolve(options.device)
    shape = SIZES[options.size]
    if options.context:
        shape = dataclasses.replace(shape, context=options.context)
    micro = options.micro_batch or options.batch
    tokens = options.batch * shape.context
    config = TrainConfig(
        size=options.size,
        vocab_size=options.vocab,
        batch_tokens=options.batch * SIZES[options.size].context,
        token_budget=options.batch * SIZES[options.size].context,
        precision=options.precision,
    )
    generator = torch.Generator().manual_seed(0)
    samples = torch.randint(options.vocab, (options.batch, shape.context + 1), generator=generator).to(device)
    inputs, targets = samples[:, :-1].contiguous(), samples[:, 1:].contiguous()
    makers: dict[str, Callable[[], tuple[Step, int]]] = {
        "craw4llm": lambda: ours(shape, config, device, micro, options.compile),
        "transformers Llama": lambda: llama(shape, config, device, micro, options.compile),
    }
    if options.nanochat is not None:
        makers["nanochat GPT"] = lambda: nanochat(options.nanochat, shape, config, device, micro, options.compile)
    with numerics(device, options.threads):
        made = {name: make() for name, make in makers.items()}
        seconds: dict[str, list[float]] = {name: [] for name in made}
        losses: dict[str, float] = {}
        for number in range(rounds + 1):
            for name, (step, _) in made.items():
                gc.collect()
                began = time.perf_counter()
                losses[name] = step(inputs, targets)  # reads the loss, so the device is done with the forward and backward pass
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                if number:  # the first is a warm-up
                    seconds[name].append(time.perf_counter() - began)
    peak = peak_flops(device)
    print(f"{options.size}, {options.batch} x {shape.context} tokens a step, {options.precision}, {device}, {options.threads} threads, "
          f"{'compiled, ' if options.compile else ''}best of {rounds} rounds")  # fmt: skip
    print(f"{'model':<20}{'parameters':>13}{'s a step':>10}{'tokens/s':>11}{'MFU':>7}{'loss':>9}")
    speeds = {}
    for name, (_, parameters) in made.items():
        best = min(seconds[name])
        speeds[name] = tokens / best
        mfu = f"{speeds[name] * shape.flops_per_token(options.vocab) / peak:.1%}" if peak else "-"
        print(f"{name:<20}{parameters:>13,}{best:>10.3f}{speeds[name]:>11,.0f}{mfu:>7}{losses[name]:>9.3f}")
    fastest = max(speed for name, speed in speeds.items() if name != "craw4llm")
    result = {
        "ratio": round(speeds["craw4llm"] / fastest, 3),
        "ratios": {name: round(speeds["craw4llm"] / speed, 3) for name, speed in speeds.items() if name != "craw4llm"},
        "tokens_per_s": {name: round(speed, 1) for name, speed in speeds.items()},
        "size": options.size,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
