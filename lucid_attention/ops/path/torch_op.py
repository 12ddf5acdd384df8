"""PaTH's block-wise passes as `torch.library` operators that read, solve, or do both on one tree."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .. import custom_op
from . import blockwise
from .system import DIFFERENTIABLE, INPUTS, from_operator, uninitialised_outputs


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
    shapes=uninitialised_outputs,
    differentiable=len(DIFFERENTIABLE),
    auxiliary=(1,),
    unbatched=("cu_seqlens",),
    about="impl='blockwise'",
)
