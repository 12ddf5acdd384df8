"""The matrix products of PaTH's tree: leaves, tree and scores are written on them."""

from typing import Protocol

import torch
from torch import Tensor

from ..triangular import solve_unit_lower_, solve_unit_lower_transposed_


class Algebra(Protocol):
    """Batched products [..., I, K] · [..., K, J] and triangular solves [m, C, C], [m, C, E]."""

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """a · b."""

    def plus_product(self, c: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0) -> Tensor:
        """c + alpha · a · b for batches of one dimension; c may be broadcast."""

    def add_product_(self, c: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
        """c ← beta · c + alpha · a · b in place, for batches of one dimension."""

    def solve_(self, matrix: Tensor, y: Tensor) -> None:
        """y ← (I + stril matrix)⁻¹ y in place. Entries on and above the diagonal are not read."""

    def solve_transposed_(self, matrix: Tensor, y: Tensor) -> None:
        """y ← (I + stril matrix)⁻ᵀ y in place."""


class TorchAlgebra:
    """By torch, in the dtype of the operands."""

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    def plus_product(self, c: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0) -> Tensor:
        return torch.baddbmm(c, a, b, alpha=alpha)

    def add_product_(self, c: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
        return c.baddbmm_(a, b, alpha=alpha, beta=beta)

    def solve_(self, matrix: Tensor, y: Tensor) -> None:
        solve_unit_lower_(matrix, y)

    def solve_transposed_(self, matrix: Tensor, y: Tensor) -> None:
        solve_unit_lower_transposed_(matrix, y)


TORCH = TorchAlgebra()
