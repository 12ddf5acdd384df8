"""At least float32 inside, the caller's dtype outside."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def working_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def no_autocast(x: Tensor) -> AbstractContextManager[None]:
    """Bodies of custom operators inherit the caller's autocast, which would narrow our matrix products."""
    if not torch.is_autocast_enabled(x.device.type):
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)
