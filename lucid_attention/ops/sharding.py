"""Refuse a sequence that is split over processes: P is made of all keys before a token, and a shard lacks some.

Heads may be split (tensor parallelism, Ulysses): every head is solved on its own.
"""

import sys
from typing import Any

import torch
import torch.nn.functional as F

HELP = (
    "LUCID solves with all keys of a sequence, and would take the part of this process for the whole. Leave "
    "context_parallel (accelerate: cp_size) out, and split the batch or the heads instead"
)


# The kernel to which torch's newer form of context parallelism gives a meaning of its own.
KERNEL = torch.ops.aten._scaled_dot_product_flash_attention.default


def refuse_sharded_sequence(x: Any = None) -> None:
    """Raise inside torch's context parallelism, and for a DTensor [B, H, T, *] whose T is sharded."""
    if context_parallel_is_active():
        raise RuntimeError(f"the sequence is split over processes (torch's context parallelism is active): {HELP}")
    placements = getattr(x, "placements", None)
    if placements is not None and x.ndim == 4 and any(getattr(placement, "dim", None) == 2 for placement in placements):
        raise RuntimeError(f"the sequence is split over processes, as a DTensor with placements {placements}: {HELP}")


def context_parallel_is_active() -> bool:
    """Whether torch gives `scaled_dot_product_attention` to processes that hold parts of a sequence."""
    # `context_parallel` replaces the function. Other tools replace it too, and leave sequences whole.
    if F.scaled_dot_product_attention.__module__.startswith("torch.distributed."):
        return True
    dtensor = sys.modules.get("torch.distributed.tensor")
    if dtensor is None:
        return False
    dispatcher = getattr(dtensor.DTensor, "_op_dispatcher", None)
    return KERNEL in getattr(dispatcher, "_custom_op_handlers", ())
