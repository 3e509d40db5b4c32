"""Matrix products of the blocks in 8-bit floats (torchao), an option of H100-class cards: `TrainConfig.precision = "fp8"`.

Weights stay float32; both operands of every product of a block's linear layers, forward and backward, are scaled by their largest
value and rounded to 8 bits (e4m3 forward, e5m2 for gradients: torchao's recipe "tensorwise"). Embedding, head, norms and attention stay
as under bf16. It is part of a model's identity: the model is another one. What it costs in loss: docs/training.md.
"""

import torch

from craw4llm.errors import ConfigError
from training.model import Transformer

CAPABILITY = (8, 9)  # the first with 8-bit matrix products


def convert(model: Transformer, device: torch.device, *, emulate: bool = False) -> None:
    """Replaces the linear layers of the blocks, in place; names and weights stay.

    emulate: round to 8 bits, multiply in the higher precision: on any device, slowly, for tests. ConfigError where torchao is not
    installed, or the device has no 8-bit products.
    """
    if not emulate and (device.type != "cuda" or torch.cuda.get_device_capability(device) < CAPABILITY):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        raise ConfigError(
            f"precision is fp8, but {name} has no 8-bit matrix products; expected an NVIDIA card of compute capability "
            f"{CAPABILITY[0]}.{CAPABILITY[1]} or above (H100, H200, L40S): use precision bf16"
        )
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise ConfigError("precision is fp8, which needs the package torchao: pip install 'craw4llm[fp8]'") from error
    convert_to_float8_training(model.blocks, config=Float8LinearConfig(emulate=emulate))
