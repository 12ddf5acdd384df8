"""The leaves of PaTH's tree: up to 64 positions in closed form, batched over all leaves of some heads.

With H_s = I − β_s w_s w_sᵀ, and row vectors for tokens (`docs/path.md`):

    [E, F] = (I + diag(β) stril W Wᵀ)⁻¹ diag(β) [W, stril W Kᵀ],     X = tril Q Wᵀ
    scores  = tril Q Kᵀ − X F                      A_ij = q_iᵀ H_i … H_{j+1} k_j
    moved q = Q − X E,    k = K − Fᵀ W             rows at the start of the leaf, keys at its end
    product   = I − Wᵀ E                           H_last … H_first, as a matrix [D, D]

No inverse of H is taken (it is singular at β = 1), and β = 0 is an ordinary value. Keys are done once; any number of
sets of rows may meet them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..triangular import solve_unit_lower_, solve_unit_lower_transposed_


class KeySide(NamedTuple):
    """k: [m, C, D], moved; product: [m, D, D]; and what rows and the backward need:

    overlap: [m, C, C] = W Wᵀ; rhs, solved: [m, C, D + C] = [W, stril W Kᵀ] and [E, F].
    """

    k: Tensor
    product: Tensor
    overlap: Tensor
    rhs: Tensor
    solved: Tensor


class RowSide(NamedTuple):
    """scores: [m, G·C, C], lower triangular; rows: [m, G·C, D], moved; x: [m, G·C, C], for the backward."""

    scores: Tensor
    rows: Tensor
    x: Tensor


def key_side(k: Tensor, w: Tensor, beta: Tensor) -> KeySide:
    """k, w: [m, C, D]; beta: [m, C, 1]."""
    (m, C, D) = k.shape
    overlap = torch.bmm(w, w.mT)
    rhs = k.new_empty(m, C, D + C)
    rhs[..., :D] = w
    rhs[..., D:] = torch.bmm(w, k.mT).tril_(-1)
    solved = rhs * beta
    solve_unit_lower_(overlap * beta, solved)
    E, F = solved[..., :D], solved[..., D:]
    product = torch.baddbmm(torch.eye(D, dtype=k.dtype, device=k.device), w.mT, E, alpha=-1)
    return KeySide(torch.baddbmm(k, F.mT, w, alpha=-1), product, overlap, rhs, solved)


def row_side(q: Tensor, k: Tensor, w: Tensor, keys: KeySide) -> RowSide:
    """q: [m, G·C, D], G sets of the C rows."""
    D = k.shape[2]
    E, F = keys.solved[..., :D], keys.solved[..., D:]
    x = _tril_(torch.bmm(q, w.mT))
    scores = _tril_(torch.bmm(q, k.mT)).baddbmm_(x, F, alpha=-1)
    return RowSide(scores, torch.baddbmm(q, x, E, alpha=-1), x)


def _tril_(x: Tensor) -> Tensor:
    """The lower triangle of each of the G square pieces of x: [m, G·C, C]."""
    return x.view(x.shape[0], -1, x.shape[2], x.shape[2]).tril_().view(x.shape)


class KeySideGradients:
    """Gradients of k, w, E and F, which all sets of rows add to."""

    def __init__(self, k: Tensor) -> None:
        m, C, _ = k.shape
        self.k, self.w, self.E = (torch.zeros_like(k) for _ in range(3))
        self.F = k.new_zeros(m, C, C)


def row_side_backward(
    dscores: Tensor, drows: Tensor, q: Tensor, k: Tensor, w: Tensor, keys: KeySide, x: Tensor, into: KeySideGradients
) -> Tensor:
    """dq: [m, G·C, D], from the gradients of scores (lower triangular) and moved rows."""
    D = k.shape[2]
    E, F = keys.solved[..., :D], keys.solved[..., D:]
    dx = _tril_(torch.bmm(drows, E.mT).baddbmm_(dscores, F.mT, beta=-1, alpha=-1))
    into.E.baddbmm_(x.mT, drows, alpha=-1)
    into.F.baddbmm_(x.mT, dscores, alpha=-1)
    into.w.baddbmm_(dx.mT, q)
    into.k.baddbmm_(dscores.mT, q)
    return torch.baddbmm(drows, dx, w).baddbmm_(dscores, k)


def key_side_backward(
    dk: Tensor, dproduct: Tensor, k: Tensor, w: Tensor, beta: Tensor, keys: KeySide, into: KeySideGradients
) -> tuple[Tensor, Tensor, Tensor]:
    """dk, dw: [m, C, D] and dbeta: [m, C, 1], from those of moved keys, products and all rows. Uses `keys` up."""
    D = k.shape[2]
    E, F = keys.solved[..., :D], keys.solved[..., D:]
    dw = into.w.baddbmm_(E, dproduct.mT, alpha=-1).baddbmm_(F, dk, alpha=-1)
    into.E.baddbmm_(w, dproduct, alpha=-1)
    into.F.baddbmm_(w, dk.mT, alpha=-1)
    dk = into.k.add_(dk)

    dsolved = torch.cat([into.E, into.F], -1)
    solve_unit_lower_transposed_(keys.overlap * beta, dsolved)
    # Gradients of diag(β) [W, stril W Kᵀ] and of −diag(β) stril W Wᵀ, in this order.
    dsystem = torch.bmm(dsolved, keys.solved.mT).tril_(-1)
    dbeta = keys.rhs.mul_(dsolved).sum(-1, keepdim=True)
    dbeta -= keys.overlap.mul_(dsystem).sum(-1, keepdim=True)
    dsolved.mul_(beta)
    dsystem.mul_(beta)
    dw += dsolved[..., :D]
    dcross = dsolved[..., D:].tril(-1)
    dw.baddbmm_(dcross, k).baddbmm_(dsystem, w, alpha=-1).baddbmm_(dsystem.mT, w, alpha=-1)
    dk.baddbmm_(dcross.mT, w)
    return dk, dw, dbeta
