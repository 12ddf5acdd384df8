"""The block-wise solve as a `torch.library` operator: one node with a backward for autograd, compile, export and vmap.

Optional tensors travel as None; outputs that were not asked for are empty, since an operator's outputs are fixed.
"""

from typing import Any

import torch
from torch import Tensor

from .. import packing
from ..folding import fold_vmap
from .blockwise import Gradients, Problem, backward, forward


def _empty(like: Tensor) -> Tensor:
    return like.new_empty(0)


def _some(x: Tensor) -> Tensor | None:
    """Undo `_empty`."""
    return None if x.numel() == 0 else x


def _number(strength: Tensor | None) -> float:
    return 1.0 if strength is None else strength.item()


def _outputs(
    k: Tensor, v: Tensor, k_past: Tensor | None, beta: Tensor | None, row_max: bool
) -> tuple[Tensor, Tensor, Tensor]:
    S = 0 if k_past is None else k_past.shape[2]
    y = v.new_empty(v.shape)
    z = v.new_empty(v.shape) if beta is not None else _empty(v)
    winners = k.new_empty((*k.shape[:2], S + k.shape[2]) if row_max else 0, dtype=torch.int64)
    return y, z, winners


@torch.library.custom_op("lucid_attention::precondition", mutates_args=())
def precondition_op(
    k: Tensor,
    v: Tensor,
    k_past: Tensor | None,
    y_past: Tensor | None,
    beta: Tensor | None,
    sharpness: Tensor | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    default_sharpness: float,
    row_max: bool,
    strength: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """y [B, H, T, E]; z [B, H, T, E] if beta is given; winners [B, H, S + T] if row_max. sharpness: [B, H].

    strength: [], on the CPU, None for 1. A number would be a constant of a compiled graph, one graph for each.
    """
    y, z, winners = _outputs(k, v, k_past, beta, row_max)
    c: float | Tensor = default_sharpness if sharpness is None else sharpness
    problem = Problem(k, k_past, y_past, beta, c, key_mask, row_max, _number(strength))
    if cu_seqlens is None:
        forward(problem, v, y, _some(z), _some(winners))
        return y, z, winners
    for part in packing.parts(cu_seqlens, k.shape[2]):
        pieces = [None if _some(x) is None else part.scratch(x) for x in (y, z, winners)]
        assert pieces[0] is not None
        forward(problem.part(part), part.take(v), pieces[0], pieces[1], pieces[2])
        for whole, piece in zip((y, z, winners), pieces, strict=True):
            if piece is not None:
                part.put_(whole, piece)
    return y, z, winners


@precondition_op.register_fake
def _(
    k: Tensor,
    v: Tensor,
    k_past: Tensor | None,
    y_past: Tensor | None,
    beta: Tensor | None,
    sharpness: Tensor | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    default_sharpness: float,
    row_max: bool,
    strength: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    return _outputs(k, v, k_past, beta, row_max)


def _gradient_buffers(
    dy: Tensor,
    k: Tensor,
    k_past: Tensor | None,
    y_past: Tensor | None,
    beta: Tensor | None,
    sharpness: Tensor | None,
    key_grads: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    nothing = _empty(dy)
    return (
        dy.new_empty(dy.shape),
        k.new_empty(k.shape) if key_grads else _empty(k),
        k_past.new_empty(k_past.shape) if key_grads and k_past is not None else nothing.clone(),
        nothing.clone() if y_past is None else y_past.new_empty(y_past.shape),
        nothing.clone() if beta is None else beta.new_empty(beta.shape),
        sharpness.new_empty(sharpness.shape) if key_grads and sharpness is not None else nothing.clone(),
    )


@torch.library.custom_op("lucid_attention::precondition_backward", mutates_args=())
def precondition_backward_op(
    dy: Tensor,
    y: Tensor,
    z: Tensor,
    winners: Tensor,
    k: Tensor,
    k_past: Tensor | None,
    y_past: Tensor | None,
    beta: Tensor | None,
    sharpness: Tensor | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    default_sharpness: float,
    row_max: bool,
    key_grads: bool,
    strength: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dv, dk, dk_past, dy_past, dbeta, dsharpness; empty where the input is None or, for keys, not `key_grads`."""
    buffers = _gradient_buffers(dy, k, k_past, y_past, beta, sharpness, key_grads)
    c: float | Tensor = default_sharpness if sharpness is None else sharpness
    problem = Problem(k, k_past, y_past, beta, c, key_mask, row_max, _number(strength))
    dv, dk, dk_past, dy_past, dbeta, dsharpness = (_some(x) for x in buffers)
    assert dv is not None
    if cu_seqlens is None:
        out = Gradients(dv, dk, dk_past, dy_past, dbeta, dsharpness)
        backward(problem, dy, y, _some(z), _some(winners), out)
        return buffers
    if dsharpness is not None:
        dsharpness.zero_()
    for part in packing.parts(cu_seqlens, k.shape[2]):
        piece = problem.part(part)
        dc = (
            torch.empty_like(piece.sharpness)
            if dsharpness is not None and isinstance(piece.sharpness, Tensor)
            else None
        )
        out = Gradients(
            part.scratch(dv),
            None if dk is None else part.scratch(dk),
            None,
            None,
            None if dbeta is None else part.scratch(dbeta),
            dc,
        )
        saved = [None if _some(x) is None else part.take(x) for x in (z, winners)]
        backward(piece, part.take_grad(dy), part.take(y), saved[0], saved[1], out)
        for whole, part_of_it in ((dv, out.dv), (dk, out.dk), (dbeta, out.dbeta)):
            if whole is not None and part_of_it is not None:
                part.put_(whole, part_of_it)
        if dsharpness is not None and dc is not None:
            dsharpness.add_(dc.unflatten(0, (dsharpness.shape[0], -1)).sum(1))
    return buffers


@precondition_backward_op.register_fake
def _(
    dy: Tensor,
    y: Tensor,
    z: Tensor,
    winners: Tensor,
    k: Tensor,
    k_past: Tensor | None,
    y_past: Tensor | None,
    beta: Tensor | None,
    sharpness: Tensor | None,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    default_sharpness: float,
    row_max: bool,
    key_grads: bool,
    strength: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _gradient_buffers(dy, k, k_past, y_past, beta, sharpness, key_grads)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    k, _, k_past, y_past, beta, sharpness, key_mask, cu_seqlens, default_sharpness, row_max, strength = inputs
    y, z, winners = output
    ctx.mark_non_differentiable(winners)
    ctx.save_for_backward(y, z, winners, k, k_past, y_past, beta, sharpness, key_mask, cu_seqlens, strength)
    ctx.default_sharpness, ctx.row_max = default_sharpness, row_max


def _pull_back(ctx: Any, dy: Tensor, dz: Tensor | None, dwinners: Tensor | None) -> tuple[Any, ...]:
    need_k, need_v, need_k_past, need_y_past, need_beta, need_sharpness = ctx.needs_input_grad[:6]
    key_grads = need_k or need_k_past or need_sharpness
    *saved, strength = ctx.saved_tensors
    grads = precondition_backward_op(dy, *saved, ctx.default_sharpness, ctx.row_max, key_grads, strength)
    dv, dk, dk_past, dy_past, dbeta, dsharpness = grads
    return (
        dk if need_k else None,
        dv if need_v else None,
        dk_past if need_k_past else None,
        dy_past if need_y_past else None,
        dbeta if need_beta else None,
        dsharpness if need_sharpness else None,
        *[None] * 5,
    )


def _refuse_double_backward(ctx: Any, *grads: Tensor) -> None:
    raise RuntimeError(
        "lucid_attention: impl='blockwise' has no second derivative (its backward is written by hand). "
        "Use impl='reference' for double backward: it is dense and made of differentiable torch operations"
    )


precondition_op.register_autograd(_pull_back, setup_context=_remember)
precondition_backward_op.register_autograd(_refuse_double_backward, setup_context=lambda ctx, inputs, output: None)
fold_vmap(precondition_op, unbatched=("cu_seqlens", "strength"))
fold_vmap(precondition_backward_op, unbatched=("cu_seqlens", "strength"))
