"""PaTH's block-wise passes as `torch.library` operators: nodes with a backward for autograd, compile, export and vmap.

Gradients of inputs that are None come back empty, since an operator's outputs are fixed.
"""

from typing import Any

import torch
from torch import Tensor

from ..folding import fold_vmap
from ..precision import working_dtype
from .blockwise import (
    AttentionInputs,
    Sequences,
    SolveInputs,
    attend,
    attend_backward,
    precondition,
    precondition_backward,
)


def _or_empty(grads: tuple[Tensor | None, ...], like: Tensor) -> tuple[Tensor, ...]:
    return tuple(like.new_empty(0) if grad is None else grad for grad in grads)


def _like(*inputs: Tensor | None) -> tuple[Tensor, ...]:
    """What a backward returns, without values."""
    first = next(x for x in inputs if x is not None)
    return tuple(first.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs)


@torch.library.custom_op("lucid_attention::path_attention", mutates_args=())
def path_attention_op(
    q: Tensor,
    k: Tensor,
    y: Tensor,
    w: Tensor,
    beta: Tensor,
    k_past: Tensor | None,
    y_past: Tensor | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """o [B, H·G, T, E] and the log-sum-exp of every row [B, H·G, T]."""
    inputs = AttentionInputs(q, k, y, w, beta, k_past, y_past)
    return attend(inputs, _sequences(k, k_past, key_mask, cu_seqlens), scale)


def _sequences(k: Tensor, k_past: Tensor | None, key_mask: Tensor | None, cu_seqlens: Tensor | None) -> Sequences:
    return Sequences(key_mask, cu_seqlens, k.shape[2], 0 if k_past is None else k_past.shape[2])


@path_attention_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    y: Tensor,
    w: Tensor,
    beta: Tensor,
    k_past: Tensor | None,
    y_past: Tensor | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], y.shape[3]), q.new_empty(q.shape[:3], dtype=working_dtype(q))


@torch.library.custom_op("lucid_attention::path_attention_backward", mutates_args=())
def path_attention_backward_op(
    do: Tensor,
    o: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    y: Tensor,
    w: Tensor,
    beta: Tensor,
    k_past: Tensor | None,
    y_past: Tensor | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dy, dw, dbeta, dk_past, dy_past."""
    inputs = AttentionInputs(q, k, y, w, beta, k_past, y_past)
    grads = attend_backward(inputs, _sequences(k, k_past, key_mask, cu_seqlens), scale, do, o, lse)
    return _or_empty(grads, q)  # type: ignore[return-value]


@path_attention_backward_op.register_fake
def _(
    do: Tensor,
    o: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    y: Tensor,
    w: Tensor,
    beta: Tensor,
    k_past: Tensor | None,
    y_past: Tensor | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _like(q, k, y, w, beta, k_past, y_past)  # type: ignore[return-value]


@torch.library.custom_op("lucid_attention::path_precondition", mutates_args=())
def path_precondition_op(
    u: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    u_past: Tensor | None,
    y_past: Tensor | None,
    shift: Tensor | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    default_shift: float,
) -> Tensor:
    """y [B, H, T, E]. shift: [B, H], or None for `default_shift`."""
    inputs = SolveInputs(u, v, w, beta, u_past, y_past, default_shift if shift is None else shift)
    return precondition(inputs, _sequences(u, u_past, key_mask, cu_seqlens))


@path_precondition_op.register_fake
def _(
    u: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    u_past: Tensor | None,
    y_past: Tensor | None,
    shift: Tensor | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    default_shift: float,
) -> Tensor:
    return v.new_empty(v.shape)


@torch.library.custom_op("lucid_attention::path_precondition_backward", mutates_args=())
def path_precondition_backward_op(
    dy: Tensor,
    y: Tensor,
    u: Tensor,
    w: Tensor,
    beta: Tensor,
    u_past: Tensor | None,
    y_past: Tensor | None,
    shift: Tensor | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    default_shift: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """du, dv, dw, dbeta, du_past, dy_past, dshift."""
    inputs = SolveInputs(u, y, w, beta, u_past, y_past, default_shift if shift is None else shift)
    grads = precondition_backward(inputs, _sequences(u, u_past, key_mask, cu_seqlens), dy, y)
    return _or_empty(grads, u)  # type: ignore[return-value]


@path_precondition_backward_op.register_fake
def _(
    dy: Tensor,
    y: Tensor,
    u: Tensor,
    w: Tensor,
    beta: Tensor,
    u_past: Tensor | None,
    y_past: Tensor | None,
    shift: Tensor | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    default_shift: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _like(u, y, w, beta, u_past, y_past, shift)  # type: ignore[return-value]


def _wanted(ctx: Any, grads: tuple[Tensor, ...], rest: int) -> tuple[Any, ...]:
    kept = (grad if wanted else None for grad, wanted in zip(grads, ctx.needs_input_grad, strict=False))
    return (*kept, *[None] * rest)


def _remember_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    o, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(o, lse, *tensors)


def _pull_back_attention(ctx: Any, do: Tensor, dlse: Tensor | None) -> tuple[Any, ...]:
    return _wanted(ctx, path_attention_backward_op(do, *ctx.saved_tensors, ctx.scale), 3)


def _remember_precondition(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    u, _, *tensors, ctx.default_shift = inputs
    ctx.save_for_backward(output, u, *tensors)


def _pull_back_precondition(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    return _wanted(ctx, path_precondition_backward_op(dy, *ctx.saved_tensors, ctx.default_shift), 3)


def _refuse_double_backward(ctx: Any, *grads: Tensor) -> None:
    raise RuntimeError(
        "lucid_attention: impl='blockwise' has no second derivative (its backward is written by hand). "
        "Use impl='reference' for double backward: it is dense and made of differentiable torch operations"
    )


path_attention_op.register_autograd(_pull_back_attention, setup_context=_remember_attention)
path_precondition_op.register_autograd(_pull_back_precondition, setup_context=_remember_precondition)
for _backward in (path_attention_backward_op, path_precondition_backward_op):
    _backward.register_autograd(_refuse_double_backward, setup_context=lambda ctx, inputs, output: None)
for _op in (path_attention_op, path_attention_backward_op, path_precondition_op, path_precondition_backward_op):
    fold_vmap(_op, unbatched=("cu_seqlens",))
