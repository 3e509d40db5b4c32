"""Which device a stage runs on, and how it multiplies there."""

import contextlib
from collections.abc import Iterator

import torch

from craw4llm.errors import ConfigError


def resolve(device: str) -> torch.device:
    """The torch device of `Execution.device`: "auto" is the first CUDA device where there is one, else the CPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device is {device!r}; expected auto, cpu, cuda or cuda:<number>") from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {device!r}, but this installation of torch sees no CUDA device; use --device cpu")
    return found


@contextlib.contextmanager
def numerics(device: torch.device, threads: int) -> Iterator[None]:
    """Sets torch's number of threads and, on a CPU, its fastest float32 matrix products; puts both back afterwards.

    By default torch multiplies float32 with MKL, which takes its AVX2 kernels on AMD processors: 105 GFLOP/s a core on a Zen 5, where
    oneDNN's AVX-512 kernels reach 230. torch only sends float32 to oneDNN under the precision "medium", which allows bfloat16; a
    processor with AMX makes use of that. So the setting is kept only where a product shows all bits of float32.
    """
    before_threads, before_precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(max(1, threads))
    try:
        if device.type == "cpu":
            torch.set_float32_matmul_precision("medium")
            probe = 1 + torch.arange(64 * 64, dtype=torch.float32).reshape(64, 64) / (1 << 23)
            if not torch.equal(probe @ torch.eye(64), probe):
                torch.set_float32_matmul_precision("highest")
        yield
    finally:
        torch.set_num_threads(before_threads)
        torch.set_float32_matmul_precision(before_precision)
