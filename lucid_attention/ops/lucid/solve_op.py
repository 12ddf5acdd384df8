"""The solve as `torch.library` operators: block-wise, and by Triton kernels, which are imported when they run."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import custom_op, packing
from ..blocks import is_causal
from ..dispatch import kernel_obstacle
from ..packing import NonFinite, nan_at, zeros_at
from . import blockwise
from .system import INPUTS, Gradients, System, from_operator

MaybeTensors = Sequence[Tensor | None]
Outputs = tuple[Tensor, Tensor | None, Tensor | None]


def obstacle(system: System, v: Tensor) -> str | None:
    """Why the kernels cannot solve this system on any device; None if they can."""
    if system.row_max:
        return "its kernels have no norm='row_max'"
    if not is_causal(system.block):
        return "its kernels solve causal systems, block=1"
    return kernel_obstacle(system.k.shape[3], v.shape[3], v=v, k_past=system.k_past, y_past=system.y_past)


def _shapes(v: Tensor, *inputs: Any) -> Outputs:
    """y [B, H, T, E]; z [B, H, T, E] if there is a beta; winners [B, H, S + T] for norm="row_max"."""
    # A compiled graph does not know the value of the strength, so no `System` is made here.
    _, k_past, _, beta, *_, norm = inputs
    total = v.shape[2] + (0 if k_past is None else k_past.shape[2])
    z = v.new_empty(v.shape) if beta is not None else None
    winners = v.new_empty((*v.shape[:2], total), dtype=torch.int64) if norm == "row_max" else None
    return v.new_empty(v.shape), z, winners


def _gradients(inputs: Sequence[Any], needed: Sequence[bool]) -> Gradients:
    """Buffers for the gradients of v, k, k_past, y_past, beta and sharpness."""
    _, need_k, need_k_past, _, _, need_sharpness = needed
    dv, dk, dk_past, dy_past, dbeta, dsharpness = (None if x is None else x.new_empty(x.shape) for x in inputs[:6])
    assert dv is not None
    if not (need_k or need_k_past or need_sharpness):
        dk = dk_past = dsharpness = None
    return Gradients(dv, dk, dk_past, dy_past, dbeta, dsharpness)


def _forward_blockwise(v: Tensor, *inputs: Any) -> Outputs:
    system, outputs = from_operator(*inputs), _shapes(v, *inputs)
    for part, (y, z, winners), _ in packing.pieces(system.parts(), outputs):
        assert y is not None
        blockwise.forward(system.part(part), part.take(v), y, z, winners)
    return outputs


def _backward_blockwise(
    douts: MaybeTensors, outs: MaybeTensors, inputs: Sequence[Any], needed: Sequence[bool]
) -> MaybeTensors:
    system, dy, out = from_operator(*inputs[1:]), douts[0], _gradients(inputs, needed)
    assert dy is not None
    if out.dsharpness is not None:
        out.dsharpness.zero_()
    new, past = (out.dv, out.dk, out.dbeta), (out.dk_past, out.dy_past)
    for part, (dv, dk, dbeta), (dk_past, dy_past) in packing.pieces(system.parts(), new, past):
        y, z, winners = (None if x is None else part.take(x) for x in outs)
        assert dv is not None
        assert y is not None
        dc = None if out.dsharpness is None else torch.empty_like(part.per_sequence(out.dsharpness))
        written = Gradients(dv, dk, dk_past, dy_past, dbeta, dc)
        blockwise.backward(system.part(part), part.take_grad(dy), y, z, winners, written)
        if out.dsharpness is not None and dc is not None:
            part.add_sequences_(out.dsharpness, dc)
    return out


def _without(system: System, where: Tensor) -> System:
    """The system with zeros at `where`: [B, H, T]."""
    return replace(system, k=zeros_at(system.k, where), beta=zeros_at(system.beta, where))


def _forward_triton(v: Tensor, *inputs: Any) -> Outputs:
    from . import triton_solve

    system, (y, z, _) = from_operator(*inputs), _shapes(v, *inputs)
    if system.cu_seqlens is None:
        triton_solve.forward(system, v, y, z)
        return y, z, None
    found = NonFinite((v, system.k, system.beta), v.shape[1], system.key_mask, system.cu_seqlens)
    triton_solve.forward(_without(system, found.positions), zeros_at(v, found.positions), y, z)
    return nan_at(y, found.after), nan_at(z, found.after), None


def _backward_triton(
    douts: MaybeTensors, outs: MaybeTensors, inputs: Sequence[Any], needed: Sequence[bool]
) -> MaybeTensors:
    from . import triton_solve

    system, dy, (y, z, _), out = from_operator(*inputs[1:]), douts[0], outs, _gradients(inputs, needed)
    assert dy is not None
    assert y is not None
    if system.cu_seqlens is None:
        triton_solve.backward(system, dy, y, z, out)
        return out
    found = NonFinite((dy, y, z, system.k, system.beta), dy.shape[1], system.key_mask, system.cu_seqlens)
    where = found.documents
    dy, y, z = (zeros_at(x, where) for x in (dy, y, z))
    assert dy is not None
    assert y is not None
    triton_solve.backward(_without(system, where), dy, y, z, out)
    if out.dsharpness is not None:
        out.dsharpness.masked_fill_(where.any(2), math.nan)
    dv, dk, dbeta = nan_at(out.dv, where), nan_at(out.dk, where), nan_at(out.dbeta, where)
    return out._replace(dv=dv, dk=dk, dbeta=dbeta)


def _registered(name: str, impl: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> custom_op.Operator:
    return custom_op.register(
        name,
        f"Tensor v, {INPUTS}",
        3,
        forward=forward,
        backward=backward,
        shapes=_shapes,
        differentiable=6,
        auxiliary=(1, 2),
        unbatched=("cu_seqlens", "strength", "borders"),
        # The backward reads the shape of v only: y stands for it.
        replaced={0: 0},
        about=f"impl={impl!r}",
    )


precondition_op = _registered("precondition", "blockwise", _forward_blockwise, _backward_blockwise)
precondition_triton_op = _registered("precondition_triton", "triton", _forward_triton, _backward_triton)
