"""PaTH's block-wise passes as `torch.library` operators that read, solve, or do both on one tree."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .. import custom_op
from . import blockwise
from .system import DIFFERENTIABLE, INPUTS, from_operator


def shapes(*inputs: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Uninitialised outputs."""
    system = from_operator(*inputs)
    q, v = system.q, system.v
    y = v.new_empty(v.shape) if system.solves else None
    if q is None:
        return None, None, y
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=system.dtype), y


def _forward(*inputs: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """o [B, H·G, T, E] and lse [B, H·G, T] if there is a q; y [B, H, T, E] if `solves`."""
    return blockwise.forward(from_operator(*inputs))


def _backward(
    douts: Sequence[Tensor | None], outs: Sequence[Tensor | None], inputs: Sequence[Any], needed: Sequence[bool]
) -> list[Tensor | None]:
    do, _, dy = douts
    return blockwise.backward(from_operator(*inputs), outs, do, dy)


path_op = custom_op.register(
    "path",
    INPUTS,
    3,
    forward=_forward,
    backward=_backward,
    shapes=shapes,
    differentiable=len(DIFFERENTIABLE),
    auxiliary=(1,),
    unbatched=("cu_seqlens",),
    about="impl='blockwise'",
)
