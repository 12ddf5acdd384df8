"""The processes that work together: one, or as many as torchrun started."""

import torch
from accelerate import PartialState


def processes() -> PartialState:
    """All of them. Without an accelerator accelerate sees several processes only if it is told that it is on a CPU."""
    return PartialState(cpu=not torch.accelerator.is_available())
