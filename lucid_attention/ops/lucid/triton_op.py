"""The solve by Triton kernels as `torch.library` operators. Triton is imported when one of them runs."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from .. import custom_op
from ..dispatch import DTYPES
from ..packing import NonFinite, nan_at, zeros_at
from .system import INPUTS, System, from_operator

LARGEST_HEAD = 256


def obstacle(system: System, v: Tensor) -> str | None:
    """Why the kernels cannot solve this system on any device; None if they can."""
    if system.row_max:
        return "its kernels have no norm='row_max'"
    for name, x in (("v", v), ("k_past", system.k_past), ("y_past", system.y_past)):
        if x is not None and x.dtype not in DTYPES:
            return f"it is for bfloat16, float16 and float32, got {name} in {x.dtype}"
    for letter, size in (("D", system.k.shape[3]), ("E", v.shape[3])):
        if size > LARGEST_HEAD:
            return f"it is for head sizes up to {LARGEST_HEAD}, got {letter} = {size}"
    return None


def _shapes(v: Tensor, *inputs: Any) -> tuple[Tensor, Tensor | None]:
    beta = inputs[3]
    return v.new_empty(v.shape), None if beta is None else v.new_empty(v.shape)


def _forward(v: Tensor, *inputs: Any) -> tuple[Tensor, Tensor | None]:
    """y [B, H, T, E]; z [B, H, T, E] if beta is given."""
    from . import triton_solve

    y, z = _shapes(v, *inputs)
    system = from_operator(*inputs)
    if system.cu_seqlens is None:
        triton_solve.forward(system, v, y, z)
        return y, z
    found = NonFinite((v, system.k, system.beta), v.shape[1], system.key_mask, system.cu_seqlens)
    v, system = v.masked_fill(found.positions[..., None], 0), _without(system, found.positions)
    triton_solve.forward(system, v, y, z)
    return y.masked_fill_(found.after[..., None], math.nan), nan_at(z, found.after)


def _without(system: System, where: Tensor) -> System:
    """The system with zeros at `where`: [B, H, T]."""
    return replace(system, k=zeros_at(system.k, where), beta=zeros_at(system.beta, where))


def _backward(
    douts: Sequence[Tensor | None], outs: Sequence[Tensor | None], inputs: Sequence[Any], needed: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of v, k, k_past, y_past, beta, sharpness."""
    from . import triton_solve

    (dy, _), (y, z) = douts, outs
    assert dy is not None
    assert y is not None
    _, need_k, need_k_past, _, _, need_sharpness = needed
    grads = [None if x is None else x.new_empty(x.shape) for x in inputs[:6]]
    if not (need_k or need_k_past or need_sharpness):
        grads[1] = grads[2] = grads[5] = None
    dv, *others = grads
    assert dv is not None
    system = from_operator(*inputs[1:])
    if system.cu_seqlens is None:
        triton_solve.backward(system, dy, y, z, triton_solve.Gradients(dv, *others))
        return grads
    found = NonFinite((dy, y, z, system.k, system.beta), dy.shape[1], system.key_mask, system.cu_seqlens)
    where = found.documents
    dy, y = (x.masked_fill(where[..., None], 0) for x in (dy, y))
    triton_solve.backward(_without(system, where), dy, y, zeros_at(z, where), triton_solve.Gradients(dv, *others))
    dk, _, _, dbeta, dsharpness = others
    if dsharpness is not None:
        dsharpness.masked_fill_(where.any(2), math.nan)
    return [nan_at(dv, where), nan_at(dk, where), None, None, nan_at(dbeta, where), dsharpness]


precondition_triton_op = custom_op.register(
    "precondition_triton",
    f"Tensor v, {INPUTS}",
    2,
    forward=_forward,
    backward=_backward,
    shapes=_shapes,
    differentiable=6,
    auxiliary=(1,),
    unbatched=("cu_seqlens", "strength"),
    # The backward reads the shape of v only: y stands for it.
    replaced={0: 0},
    about="impl='triton'",
)
