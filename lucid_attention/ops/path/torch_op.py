"""PaTH's block-wise passes as one `torch.library` operator: a node with a backward for autograd, compile, export, vmap.

It reads, solves, or does both on one tree. What was not asked for, and gradients of inputs that are None, come back
empty, since an operator's outputs are fixed.
"""

from typing import Any

import torch
from torch import Tensor

from ..folding import fold_vmap
from ..precision import working_dtype
from .blockwise import Inputs, Problem, backward, forward


def _or_empty(tensors: tuple[Tensor | None, ...], like: Tensor) -> tuple[Tensor, ...]:
    return tuple(like.new_empty(0) if x is None else x for x in tensors)


def _some(x: Tensor) -> Tensor | None:
    """Undo `_or_empty`."""
    return None if x.numel() == 0 else x


@torch.library.custom_op("lucid_attention::path", mutates_args=())
def path_op(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    k_past: Tensor | None,
    y_past: Tensor | None,
    scalars_past: Tensor | None,
    sharpness: Tensor | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    default_sharpness: float,
    solves: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """o [B, H·G, T, E] and lse [B, H·G, T] if there is a q; y [B, H, T, E] if `solves`. sharpness: [B, H]."""
    inputs = Inputs(q, k, v, w, beta, k_past, y_past, scalars_past, sharpness)
    made = forward(inputs, Problem(key_mask, cu_seqlens, scale, default_sharpness, solves))
    return _or_empty(made, v)  # type: ignore[return-value]


@path_op.register_fake
def _(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    k_past: Tensor | None,
    y_past: Tensor | None,
    scalars_past: Tensor | None,
    sharpness: Tensor | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    default_sharpness: float,
    solves: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    y = v.new_empty(v.shape if solves else 0)
    if q is None:
        return v.new_empty(0), v.new_empty(0), y
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=working_dtype(q)), y


@torch.library.custom_op("lucid_attention::path_backward", mutates_args=())
def path_backward_op(
    do: Tensor | None,
    dy: Tensor | None,
    o: Tensor,
    lse: Tensor,
    y: Tensor,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    k_past: Tensor | None,
    y_past: Tensor | None,
    scalars_past: Tensor | None,
    sharpness: Tensor | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    default_sharpness: float,
    solves: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, w, beta, k_past, y_past, scalars_past, sharpness."""
    inputs = Inputs(q, k, v, w, beta, k_past, y_past, scalars_past, sharpness)
    problem = Problem(key_mask, cu_seqlens, scale, default_sharpness, solves)
    grads = backward(inputs, problem, (_some(o), _some(lse), _some(y)), do, dy)
    return _or_empty(grads, v)  # type: ignore[return-value]


@path_backward_op.register_fake
def _(
    do: Tensor | None,
    dy: Tensor | None,
    o: Tensor,
    lse: Tensor,
    y: Tensor,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    k_past: Tensor | None,
    y_past: Tensor | None,
    scalars_past: Tensor | None,
    sharpness: Tensor | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    default_sharpness: float,
    solves: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = (q, k, v, w, beta, k_past, y_past, scalars_past, sharpness)
    return tuple(v.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs)  # type: ignore[return-value]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, scale, default_sharpness, solves = inputs
    ctx.numbers = scale, default_sharpness, solves
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*output, *tensors)


def _pull_back(ctx: Any, do: Tensor | None, dlse: Tensor | None, dy: Tensor | None) -> tuple[Any, ...]:
    # The gradient of an output that is empty is empty, too.
    do, dy = (None if x is None or x.numel() == 0 else x for x in (do, dy))
    grads = path_backward_op(do, dy, *ctx.saved_tensors, *ctx.numbers)
    kept = (grad if wanted else None for grad, wanted in zip(grads, ctx.needs_input_grad, strict=False))
    return (*kept, *[None] * 5)


def _refuse_double_backward(ctx: Any, *grads: Tensor) -> None:
    raise RuntimeError(
        "lucid_attention: impl='blockwise' has no second derivative (its backward is written by hand). "
        "Use impl='reference' for double backward: it is dense and made of differentiable torch operations"
    )


path_op.register_autograd(_pull_back, setup_context=_remember)
path_backward_op.register_autograd(_refuse_double_backward, setup_context=lambda ctx, inputs, output: None)
fold_vmap(path_op, unbatched=("cu_seqlens",))
fold_vmap(path_backward_op, unbatched=("cu_seqlens",))
