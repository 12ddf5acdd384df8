"""Tiles of an exponential matrix, L_ij = alpha · exp(u_i·u_j − shift_i), for the block solver."""

import torch
from torch import Tensor

from .triangular import subtract_product_

# Below this shift e^c · e^−c is harmless in float32, and the factor e^−c is part of the matrix products at no cost.
FOLDED_SHIFT = 40.0


class ExponentialTiles:
    """Tiles of L for n heads, of which u: [n, S + T, D] are the features.

    shift: None (folded into alpha), or [n, 1, 1], or [n, S + T, 1].
    """

    def __init__(self, u: Tensor, alpha: float, shift: Tensor | None, elements: int) -> None:
        self.u, self.alpha, self.shift = u, alpha, shift
        self._tile = u.new_empty(u.shape[0] * elements)

    def make(self, rows: slice, cols: slice) -> Tensor:
        left, right = self.operands(rows, cols)
        tile = self._tile[: left.shape[0] * left.shape[1] * right.shape[1]].view(*left.shape[:2], right.shape[1])
        torch.bmm(left, right.mT, out=tile)
        return self.exponentiate_(tile, rows)

    def exponentiate_(self, scores: Tensor, rows: slice) -> Tensor:
        if self.shift is not None:
            scores.sub_(self.shift if self.shift.shape[1] == 1 else self.shift[:, rows])
        return scores.exp_()

    def operands(self, rows: slice, cols: slice) -> tuple[Tensor, Tensor]:
        """left: [n, R, D], right: [n, C, D], whose product is the tile's exponent."""
        return self.u[:, rows], self.u[:, cols]

    def operand_grads(self, rows: slice, cols: slice) -> tuple[Tensor, Tensor]:
        """Where the gradients of `operands` add up."""
        return self.du[:, rows], self.du[:, cols]

    def collect_gradients(self, row_sums: bool) -> None:
        """Allocate what `pull_back` adds to: `du` and, if `row_sums`, `row_sums` = Σ_j dS_ij, S = log L."""
        self.du = torch.zeros_like(self.u)
        self.row_sums = self.u.new_zeros(*self.u.shape[:2], 1) if row_sums else None
        self._grad = torch.empty_like(self._tile)

    def pull_back(self, rows: slice, cols: slice, tile: Tensor, left: Tensor, right: Tensor, diagonal: bool) -> None:
        w = self.score_grads(rows, tile, left, right, diagonal)
        rows_u, cols_u = self.operands(rows, cols)
        rows_du, cols_du = self.operand_grads(rows, cols)
        subtract_product_(rows_du, w, cols_u, self.alpha)
        subtract_product_(cols_du, w.mT, rows_u, self.alpha)

    def score_grads(self, rows: slice, tile: Tensor, left: Tensor, right: Tensor, diagonal: bool) -> Tensor:
        """−dS / alpha of a tile: [n, R, C], valid until the next call."""
        w = self._grad[: tile.numel()].view(tile.shape)
        torch.bmm(left, right.mT, out=w).mul_(tile)
        if diagonal:
            w.tril_(-1)
        if self.row_sums is not None:
            self.row_sums[:, rows].sub_(w.sum(-1, keepdim=True), alpha=self.alpha)
        return w
