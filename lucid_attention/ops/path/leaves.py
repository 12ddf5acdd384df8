"""The leaves of PaTH's tree: up to 64 positions in closed form, batched over all leaves of some heads.

With H_s = I − β_s w_s w_sᵀ, and row vectors for tokens (`docs/path.md`):

    [E, F] = (I + diag(β) stril W Wᵀ)⁻¹ diag(β) [W, stril W Kᵀ],     X = tril Q Wᵀ
    scores  = tril Q Kᵀ − X F                      A_ij = q_iᵀ H_i … H_{j+1} k_j
    rebased q = Q − X E,  k = K − Fᵀ W             rows at the start of the leaf, keys at its end
    product   = I − Wᵀ E                           H_last … H_first, as a matrix [D, D]

No inverse of H is taken (it is singular at β = 1), and β = 0 is an ordinary value.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..triangular import solve_unit_lower_, solve_unit_lower_transposed_


class Leaves(NamedTuple):
    """scores: [m, G·C, C], lower triangular; q: [m, G·C, D]; k: [m, C, D]; product: [m, D, D]."""

    scores: Tensor
    q: Tensor
    k: Tensor
    product: Tensor


class Saved(NamedTuple):
    """What the backward needs of the forward.

    overlap: [m, C, C] = W Wᵀ; rhs, solved: [m, C, D + C] = [W, stril W Kᵀ] and [E, F]; x: [m, G·C, C].
    """

    overlap: Tensor
    rhs: Tensor
    solved: Tensor
    x: Tensor


def leaves(q: Tensor, k: Tensor, w: Tensor, beta: Tensor) -> tuple[Leaves, Saved]:
    """q: [m, G·C, D], G sets of the C rows; k, w: [m, C, D]; beta: [m, C, 1]."""
    D = k.shape[2]
    overlap = torch.bmm(w, w.mT)
    rhs = _right_hand_side(k, w)
    solved = rhs * beta
    solve_unit_lower_(overlap * beta, solved)
    E, F = solved[..., :D], solved[..., D:]
    x = _tril_(torch.bmm(q, w.mT))
    scores = _tril_(torch.bmm(q, k.mT)).baddbmm_(x, F, alpha=-1)
    moved_q, moved_k = torch.baddbmm(q, x, E, alpha=-1), torch.baddbmm(k, F.mT, w, alpha=-1)
    product = torch.baddbmm(torch.eye(D, dtype=k.dtype, device=k.device), w.mT, E, alpha=-1)
    return Leaves(scores, moved_q, moved_k, product), Saved(overlap, rhs, solved, x)


def _right_hand_side(k: Tensor, w: Tensor) -> Tensor:
    """[W, stril W Kᵀ]: [m, C, D + C]."""
    (m, C, D) = k.shape
    out = k.new_empty(m, C, D + C)
    out[..., :D] = w
    out[..., D:] = torch.bmm(w, k.mT).tril_(-1)
    return out


def _tril_(x: Tensor) -> Tensor:
    """The lower triangle of each of the G square pieces of x: [m, G·C, C]."""
    return x.view(x.shape[0], -1, x.shape[2], x.shape[2]).tril_().view(x.shape)


class LeafGradients(NamedTuple):
    """dq: [m, G·C, D]; dk, dw: [m, C, D]; dbeta: [m, C, 1]."""

    dq: Tensor
    dk: Tensor
    dw: Tensor
    dbeta: Tensor


def leaves_backward(grad: Leaves, q: Tensor, k: Tensor, w: Tensor, beta: Tensor, saved: Saved) -> LeafGradients:
    """From the gradients of `Leaves` (that of the scores lower triangular) to those of the inputs. Uses `saved` up."""
    D = k.shape[2]
    dscores, dq, dk, dproduct = grad
    E, F = saved.solved[..., :D], saved.solved[..., D:]
    dx = _tril_(torch.bmm(dq, E.mT).baddbmm_(dscores, F.mT, beta=-1, alpha=-1))
    dsolved = torch.empty_like(saved.solved)
    dsolved[..., :D] = torch.bmm(saved.x.mT, dq).baddbmm_(w, dproduct, beta=-1, alpha=-1)
    dsolved[..., D:] = torch.bmm(saved.x.mT, dscores).baddbmm_(w, dk.mT, beta=-1, alpha=-1)
    dw = torch.bmm(E, dproduct.mT).baddbmm_(F, dk, beta=-1, alpha=-1)
    dw.baddbmm_(dx.mT, q)
    dk = torch.baddbmm(dk, dscores.mT, q)
    dq = torch.baddbmm(dq, dx, w).baddbmm_(dscores, k)

    solve_unit_lower_transposed_(saved.overlap * beta, dsolved)
    # Gradients of diag(β) [W, stril W Kᵀ] and of −diag(β) stril W Wᵀ, in this order.
    dsystem = torch.bmm(dsolved, saved.solved.mT).tril_(-1)
    dbeta = saved.rhs.mul_(dsolved).sum(-1, keepdim=True)
    dbeta -= saved.overlap.mul_(dsystem).sum(-1, keepdim=True)
    dsolved.mul_(beta)
    dsystem.mul_(beta)
    dw += dsolved[..., :D]
    dcross = dsolved[..., D:].tril(-1)
    dw.baddbmm_(dcross, k).baddbmm_(dsystem, w, alpha=-1).baddbmm_(dsystem.mT, w, alpha=-1)
    dk.baddbmm_(dcross.mT, w)
    return LeafGradients(dq, dk, dw, dbeta)
