"""At least float32 inside, the caller's dtype outside."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def working_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def autocast_enabled(x: Tensor) -> bool:
    """Whether autocast would narrow x. The meta device has no autocast: torch raises for it."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def no_autocast(x: Tensor) -> AbstractContextManager[None]:
    """Bodies of custom operators inherit the caller's autocast, which would narrow our matrix products."""
    if not autocast_enabled(x):
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def readout_dtype(x: Tensor) -> torch.dtype:
    """What `scaled_dot_product_attention` makes of x: autocast narrows it, unless it is float64."""
    if x.dtype == torch.float64 or not autocast_enabled(x):
        return x.dtype
    return torch.get_autocast_dtype(x.device.type)
