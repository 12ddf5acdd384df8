"""The block-wise solve as `torch.library` operators."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import custom_op, packing
from . import blockwise
from .system import INPUTS, from_operator


def _shapes(v: Tensor, *inputs: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    # A compiled graph does not know the value of the strength, so no `System` is made here.
    _, k_past, _, beta, *_, norm = inputs
    total = v.shape[2] + (0 if k_past is None else k_past.shape[2])
    z = v.new_empty(v.shape) if beta is not None else None
    winners = v.new_empty((*v.shape[:2], total), dtype=torch.int64) if norm == "row_max" else None
    return v.new_empty(v.shape), z, winners


def _forward(v: Tensor, *inputs: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """y [B, H, T, E]; z [B, H, T, E] if beta is given; winners [B, H, S + T] for norm="row_max"."""
    system, outputs = from_operator(*inputs), _shapes(v, *inputs)
    for part, (y, z, winners), _ in packing.pieces(system.parts(), outputs):
        assert y is not None
        blockwise.forward(system.part(part), part.take(v), y, z, winners)
    return outputs


def _backward(
    douts: Sequence[Tensor | None], outs: Sequence[Tensor | None], inputs: Sequence[Any], needed: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of v, k, k_past, y_past, beta, sharpness."""
    system, (dy, *_) = from_operator(*inputs[1:]), douts
    assert dy is not None
    _, need_k, need_k_past, _, _, need_sharpness = needed
    key_grads = need_k or need_k_past or need_sharpness
    grads = [None if x is None else x.new_empty(x.shape) for x in inputs[:6]]
    if not key_grads:
        grads[1] = grads[2] = grads[5] = None
    dv, dk, dk_past, dy_past, dbeta, dsharpness = grads
    if dsharpness is not None:
        dsharpness.zero_()
    for part, new, past in packing.pieces(system.parts(), (dv, dk, dbeta), (dk_past, dy_past)):
        y, z, winners = (None if x is None else part.take(x) for x in outs)
        assert new[0] is not None
        assert y is not None
        dc = None if dsharpness is None else torch.empty_like(part.per_sequence(dsharpness))
        written = blockwise.Gradients(new[0], new[1], past[0], past[1], new[2], dc)
        blockwise.backward(system.part(part), part.take_grad(dy), y, z, winners, written)
        if dsharpness is not None and dc is not None:
            part.add_sequences_(dsharpness, dc)
    return grads


precondition_op = custom_op.register(
    "precondition",
    f"Tensor v, {INPUTS}",
    3,
    forward=_forward,
    backward=_backward,
    shapes=_shapes,
    differentiable=6,
    auxiliary=(1, 2),
    unbatched=("cu_seqlens", "strength"),
    # The backward reads the shape of v only: y stands for it.
    replaced={0: 0},
    about="impl='blockwise'",
)
