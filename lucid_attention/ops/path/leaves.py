"""The leaves of PaTH's tree: up to 64 positions in closed form, batched over all leaves of some heads.

With H_s = I − β_s w_s w_sᵀ, and row vectors for tokens (`docs/mathematics.md`, section on PaTH):

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
    """What the backward needs of the forward. system: [m, C, C]; solved: [m, C, D + C] = [E, F]; x: [m, G·C, C]."""

    system: Tensor
    solved: Tensor
    x: Tensor


def leaves(q: Tensor, k: Tensor, w: Tensor, beta: Tensor) -> tuple[Leaves, Saved]:
    """q: [m, G·C, D], G sets of the C rows; k, w: [m, C, D]; beta: [m, C, 1]."""
    D = k.shape[2]
    overlap = torch.bmm(w, w.mT)
    solved = _right_hand_side(k, w)
    system = overlap.mul_(beta)
    solved.mul_(beta)
    solve_unit_lower_(system, solved)
    E, F = solved[..., :D], solved[..., D:]
    x = _tril_(torch.bmm(q, w.mT))
    scores = _tril_(torch.bmm(q, k.mT)).sub_(torch.bmm(x, F))
    product = torch.bmm(w.mT, E).neg_()
    product.diagonal(dim1=1, dim2=2).add_(1)
    return Leaves(scores, q - torch.bmm(x, E), k - torch.bmm(F.mT, w), product), Saved(system, solved, x)


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
    """From the gradients of `Leaves` (that of the scores lower triangular) to those of the inputs."""
    D = k.shape[2]
    dscores, dq, dk, dproduct = grad
    E, F = saved.solved[..., :D], saved.solved[..., D:]
    dx = _tril_(torch.bmm(dq, E.mT).baddbmm_(dscores, F.mT).neg_())
    dsolved = torch.empty_like(saved.solved)
    dsolved[..., :D] = torch.bmm(saved.x.mT, dq).baddbmm_(w, dproduct)
    dsolved[..., D:] = torch.bmm(saved.x.mT, dscores).baddbmm_(w, dk.mT)
    dsolved.neg_()
    dw = torch.bmm(E, dproduct.mT).baddbmm_(F, dk).neg_()
    dw.baddbmm_(dx.mT, q)
    dk = torch.baddbmm(dk, dscores.mT, q)
    dq = torch.baddbmm(dq, dx, w).baddbmm_(dscores, k)

    solve_unit_lower_transposed_(saved.system, dsolved)
    # Gradients of diag(β) [W, stril W Kᵀ] and of diag(β) stril W Wᵀ, in this order.
    dbeta = (dsolved * _right_hand_side(k, w)).sum(-1, keepdim=True)
    dsystem = torch.bmm(dsolved, saved.solved.mT).neg_().tril_(-1)
    dbeta += (dsystem * torch.bmm(w, w.mT)).sum(-1, keepdim=True)
    dsolved.mul_(beta)
    dsystem.mul_(beta)
    dcross = dsolved[..., D:].tril(-1)
    dw += dsolved[..., :D]
    dw.baddbmm_(dcross, k).baddbmm_(dsystem + dsystem.mT, w)
    dk.baddbmm_(dcross.mT, w)
    return LeafGradients(dq, dk, dw, dbeta)
