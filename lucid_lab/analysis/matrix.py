"""The matrix P of one head in float64, computed in blocks of rows.

    P = I + s · diag(β) stril exp(…)

Shapes: N positions of one head, D key size, n ≤ N the length of a prefix. Methods work with the leading n × n block.
"""

import math
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from lucid_attention.ops.keys import inverse_norms
from lucid_attention.ops.path.decode import keys_at_end
from lucid_attention.ops.path.reference import path_scores

from .progress import Progress, silent

# Rows in a block.
BLOCK = 512
# Iterations use the blocks in every step. Those of the first KEPT rows stay in memory, at most 290 MB, and on a GPU all
# of them, if they take no more than this share of its free memory: 17 GB at 65 536 positions.
KEPT, SHARE = 8192, 0.5


class Exponents(Protocol):
    """A function that computes the exponents of the entries of P."""

    def __call__(self, start: int, stop: int) -> Tensor:
        """The exponents in rows start to stop, for all columns before stop: [stop − start, stop]."""
        ...


class KeyMatrix:
    """P of one head.

    exponents: of the entries below the diagonal. size: N. strength: s. beta: [N] or None.
    progress: may be set; it is told which rows are computed.
    """

    def __init__(self, exponents: Exponents, size: int, strength: float = 1.0, beta: Tensor | None = None) -> None:
        self.size, self.strength, self.beta = size, strength, beta
        self._exponents = exponents
        self.progress: Progress = silent
        self._kept: dict[int, Tensor] = {}
        self._keeps: bool | None = None

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows start to stop of P, up to the last column that is not zero: [stop − start, stop]."""
        P = self.strength * self._exponents(start, stop).exp().tril(start - 1)
        if self.beta is not None:
            P = self.beta[start:stop, None] * P
        # The diagonal is one by definition: set it, so that it is not rounded.
        P[:, start:].diagonal().fill_(1)
        return P

    def _blocks(self, n: int, *, backwards: bool = False) -> Iterator[tuple[int, int, Tensor]]:
        """(start, stop, rows) of the leading n × n block."""
        starts = range(0, n, BLOCK)
        for start in reversed(starts) if backwards else starts:
            stop = min(start + BLOCK, self.size)
            rows = self._kept.get(start)
            if rows is None:
                self.progress(f"row {start} of {n}")
                rows = self.rows(start, stop)
                if self._keeps is None:
                    self._keeps = may_keep(self.size, rows)
                if self._keeps or stop <= KEPT:
                    self._kept[start] = rows
            end = min(stop, n)
            yield start, end, rows[: end - start, :end]

    def dense(self, n: int | None = None) -> Tensor:
        """The leading block, [n, n]; all of P for None."""
        n = self.size if n is None else n
        blocks = list(self._blocks(n))
        return torch.cat([torch.nn.functional.pad(rows, (0, n - rows.shape[1])) for _, _, rows in blocks])

    def gram(self, x: Tensor) -> Tensor:
        """Pᵀ P x, for x: [n, m], with one pass over the rows of P."""
        out = torch.zeros_like(x)
        for _, stop, rows in self._blocks(x.shape[0]):
            out[:stop] += rows.mT @ (rows @ x[:stop])
        return out

    def solve(self, x: Tensor) -> Tensor:
        """P⁻¹ x, for x: [n, m], by forward substitution."""
        y = torch.zeros_like(x)
        for start, stop, rows in self._blocks(x.shape[0]):
            rest = x[start:stop] - rows[:, :start] @ y[:start]
            y[start:stop] = torch.linalg.solve_triangular(rows[:, start:], rest, upper=False, unitriangular=True)
        return y

    def solve_transposed(self, x: Tensor) -> Tensor:
        """P⁻ᵀ x, for x: [n, m], by backward substitution."""
        y = x.clone()
        for start, stop, rows in self._blocks(x.shape[0], backwards=True):
            y[start:stop] = torch.linalg.solve_triangular(
                rows[:, start:].mT, y[start:stop], upper=True, unitriangular=True
            )
            y[:start] -= rows[:, :start].mT @ y[start:stop]
        return y


def may_keep(size: int, rows: Tensor) -> bool:
    """Whether all blocks of a matrix with `size` rows may stay in the memory of a GPU. rows: one block."""
    if rows.device.type != "cuda":
        return False
    free, _ = torch.cuda.mem_get_info(rows.device)
    return size * (size + BLOCK) / 2 * rows.element_size() <= SHARE * free


class LikeKeys:
    """Exponents of LUCID: c (cos θ_ij − 1); for norm="row_max" c/D · k_i·k_j minus its maximum over j ≤ i.

    k: [N, D]; norm: as in `lucid_attention`; sharpness: c, None for √D.
    """

    def __init__(self, k: Tensor, norm: str = "key", sharpness: float | None = None) -> None:
        self._c = math.sqrt(k.shape[-1]) if sharpness is None else float(sharpness)
        self._raw = norm == "row_max"
        self._k = k if self._raw else k * inverse_norms(k)

    def __call__(self, start: int, stop: int) -> Tensor:
        products = self._k[start:stop] @ self._k[:stop].mT
        if not self._raw:
            return self._c * (products - 1)
        scores = self._c / self._k.shape[-1] * products
        later = torch.ones_like(scores, dtype=torch.bool).triu(start + 1)
        # Entries above the diagonal are not used: mask them, so that they cannot overflow.
        scores = scores.masked_fill(later, -math.inf)
        return scores - scores.amax(-1, keepdim=True)


class LikePathKeys:
    """Exponents of LUCID-PaTH: c (k̂_jᵀ (∏ H_s) k̂_i − 1). k, w: [N, D]; beta: [N], of the Householder factors."""

    def __init__(self, k: Tensor, w: Tensor, beta: Tensor, sharpness: float | None = None) -> None:
        self._c = math.sqrt(k.shape[-1]) if sharpness is None else float(sharpness)
        self._k, self._w, self._beta = k * inverse_norms(k), w, beta

    def __call__(self, start: int, stop: int) -> Tensor:
        scores = scores_of_path(self._k[None, start:stop], self._k, self._w, self._beta, start, stop)
        return self._c * (scores[0] - 1)


def scores_of_path(q: Tensor, k: Tensor, w: Tensor, beta: Tensor, start: int, stop: int) -> Tensor:
    """q_iᵀ H_i … H_{j+1} k_j for queries start to stop: [G, stop − start, stop].

    q: [G, stop − start, D], of these positions; k, w: [N, D]; beta: [N]. Only this block of scores is in memory.
    """
    before, block = slice(0, start), slice(start, stop)
    past = keys_at_end(k[None, None, before], w[None, None, before], beta[None, None, before]) if start else None
    new = k[None, None, block], w[None, None, block], beta[None, None, block]
    scores, _ = path_scores(q[None], *new, past, None, None)
    return scores[0]
