"""PaTH's passes by Triton kernels as `torch.library` operators. Triton is imported when one of them runs."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .. import custom_op
from ..triton_support import DTYPES
from .system import DIFFERENTIABLE, INPUTS, PathSystem, from_operator, uninitialised_outputs

LARGEST_HEAD = 256


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

    return triton_pass.forward(from_operator(*inputs))


def _backward(
    douts: Sequence[Tensor | None], outs: Sequence[Tensor | None], inputs: Sequence[Any], needed: Sequence[bool]
) -> list[Tensor | None]:
    from . import triton_pass

    do, _, dy = douts
    return triton_pass.backward(from_operator(*inputs), outs, do, dy)


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
