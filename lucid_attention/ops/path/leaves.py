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

from .algebra import TORCH, Algebra


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


def key_side(k: Tensor, w: Tensor, beta: Tensor, algebra: Algebra = TORCH) -> KeySide:
    """k, w: [m, C, D]; beta: [m, C, 1]."""
    (m, C, D) = k.shape
    overlap = algebra.product(w, w.mT)
    rhs = k.new_empty(m, C, D + C)
    rhs[..., :D] = w
    rhs[..., D:] = algebra.product(w, k.mT).tril_(-1)
    solved = rhs * beta
    algebra.solve_(overlap * beta, solved)
    E, F = solved[..., :D], solved[..., D:]
    product = algebra.plus_product(torch.eye(D, dtype=k.dtype, device=k.device), w.mT, E, alpha=-1)
    return KeySide(algebra.plus_product(k, F.mT, w, alpha=-1), product, overlap, rhs, solved)


def row_side(q: Tensor, k: Tensor, w: Tensor, keys: KeySide, algebra: Algebra = TORCH) -> RowSide:
    """q: [m, G·C, D], G sets of the C rows."""
    D = k.shape[2]
    E, F = keys.solved[..., :D], keys.solved[..., D:]
    x = _tril_(algebra.product(q, w.mT))
    scores = algebra.add_product_(_tril_(algebra.product(q, k.mT)), x, F, alpha=-1)
    return RowSide(scores, algebra.plus_product(q, x, E, alpha=-1), x)


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
    dscores: Tensor,
    drows: Tensor,
    q: Tensor,
    k: Tensor,
    w: Tensor,
    keys: KeySide,
    x: Tensor,
    into: KeySideGradients,
    algebra: Algebra = TORCH,
) -> Tensor:
    """dq: [m, G·C, D], from the gradients of scores (lower triangular) and moved rows."""
    D = k.shape[2]
    E, F = keys.solved[..., :D], keys.solved[..., D:]
    dx = _tril_(algebra.add_product_(algebra.product(drows, E.mT), dscores, F.mT, beta=-1, alpha=-1))
    algebra.add_product_(into.E, x.mT, drows, alpha=-1)
    algebra.add_product_(into.F, x.mT, dscores, alpha=-1)
    algebra.add_product_(into.w, dx.mT, q)
    algebra.add_product_(into.k, dscores.mT, q)
    return algebra.add_product_(algebra.plus_product(drows, dx, w), dscores, k)


def key_side_backward(
    dk: Tensor,
    dproduct: Tensor,
    k: Tensor,
    w: Tensor,
    beta: Tensor,
    keys: KeySide,
    into: KeySideGradients,
    algebra: Algebra = TORCH,
) -> tuple[Tensor, Tensor, Tensor]:
    """dk, dw: [m, C, D] and dbeta: [m, C, 1], from those of moved keys, products and all rows. Uses `keys` up."""
    D = k.shape[2]
    E, F = keys.solved[..., :D], keys.solved[..., D:]
    dw = algebra.add_product_(algebra.add_product_(into.w, E, dproduct.mT, alpha=-1), F, dk, alpha=-1)
    algebra.add_product_(into.E, w, dproduct, alpha=-1)
    algebra.add_product_(into.F, w, dk.mT, alpha=-1)
    dk = into.k.add_(dk)

    dsolved = torch.cat([into.E, into.F], -1)
    algebra.solve_transposed_(keys.overlap * beta, dsolved)
    # Gradients of diag(β) [W, stril W Kᵀ] and of −diag(β) stril W Wᵀ, in this order.
    dsystem = algebra.product(dsolved, keys.solved.mT).tril_(-1)
    dbeta = keys.rhs.mul_(dsolved).sum(-1, keepdim=True)
    dbeta -= keys.overlap.mul_(dsystem).sum(-1, keepdim=True)
    dsolved.mul_(beta)
    dsystem.mul_(beta)
    dw += dsolved[..., :D]
    dcross = dsolved[..., D:].tril(-1)
    algebra.add_product_(dw, dcross, k)
    algebra.add_product_(dw, dsystem, w, alpha=-1)
    algebra.add_product_(dw, dsystem.mT, w, alpha=-1)
    algebra.add_product_(dk, dcross.mT, w)
    return dk, dw, dbeta
