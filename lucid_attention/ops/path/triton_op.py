"""PaTH's passes by Triton kernels as `torch.library` operators. Triton is imported when one of them runs."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from .. import custom_op
from ..dispatch import DTYPES
from ..packing import NonFinite, nan_at, zeros_at
from .system import DIFFERENTIABLE, INPUTS, PathSystem, from_operator, uninitialised_outputs

LARGEST_HEAD = 256
# What each position of a row has.
PER_POSITION = ("q", "k", "v", "w", "beta")


def obstacle(system: PathSystem) -> str | None:
    """Why the kernels cannot compute this system on any device; None if they can."""
    for name in DIFFERENTIABLE:
        x = getattr(system, name)
        if isinstance(x, Tensor) and x.dtype not in DTYPES:
            return f"it is for bfloat16, float16 and float32, got {name} in {x.dtype}"
    for letter, size in (("D", system.k.shape[3]), ("E", system.v.shape[3])):
        if size > LARGEST_HEAD:
            return f"it is for head sizes up to {LARGEST_HEAD}, got {letter} = {size}"
    return None


def _forward(*inputs: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    from . import triton_pass

    system = from_operator(*inputs)
    if system.cu_seqlens is None:
        return triton_pass.forward(system)
    # A query that is not finite spoils its own row only.
    given: dict[str, Any] = {name: getattr(system, name) for name in PER_POSITION[1:]}
    found = NonFinite(given.values(), system.k.shape[1], system.key_mask, system.cu_seqlens)
    system = replace(system, **{name: zeros_at(x, found.positions) for name, x in given.items()})
    o, lse, y = triton_pass.forward(system)
    return nan_at(o, found.after), lse, nan_at(y, found.after)


def _backward(
    douts: Sequence[Tensor | None], outs: Sequence[Tensor | None], inputs: Sequence[Any], needed: Sequence[bool]
) -> list[Tensor | None]:
    from . import triton_pass

    system, (o, lse, y), (do, _, dy) = from_operator(*inputs), outs, douts
    if system.cu_seqlens is None:
        return triton_pass.backward(system, outs, do, dy)
    given: dict[str, Any] = {name: getattr(system, name) for name in PER_POSITION}
    found = NonFinite((*given.values(), o, y, do, dy), system.k.shape[1], system.key_mask, system.cu_seqlens)
    where = found.documents
    system = replace(system, **{name: zeros_at(x, where) for name, x in given.items()})
    o, lse, y, do, dy = (zeros_at(x, where) for x in (o, lse, y, do, dy))
    grads = triton_pass.backward(system, (o, lse, y), do, dy)
    for i, name in enumerate(DIFFERENTIABLE):
        if name in PER_POSITION:
            grads[i] = nan_at(grads[i], where)
    learned = grads[DIFFERENTIABLE.index("sharpness")]
    if learned is not None:
        learned.masked_fill_(where.any(2), math.nan)
    return grads


path_triton_op = custom_op.register(
    "path_triton",
    INPUTS,
    3,
    forward=_forward,
    backward=_backward,
    shapes=uninitialised_outputs,
    differentiable=len(DIFFERENTIABLE),
    auxiliary=(1,),
    unbatched=("cu_seqlens",),
    about="impl='triton'",
)
