"""Blocks of tokens that see each other: their borders, and the solve with the symmetric part that they bring.

    P_bb = I + s/2 · (G_bb − I) on the diagonal blocks,   P_bc = s · G_bc below them,   G_ij = exp(c (cos θ_ij − 1))

All diagonal entries of P are 1, also at a zero key. P_bb is symmetric with eigenvalues of at least 1/2
(`docs/mathematics.md`, section 8), so Cholesky's factor exists for any keys. By the length m of a block:

m ≤ SMALL           explicit inverses X of all blocks of a tile at once, then one unit lower triangular solve with X · P
m ≤ LONGEST_FACTOR  blocked Cholesky. The factor takes m² elements per head, of as many heads at a time as fit into
                    FACTOR_ELEMENTS: at most 64 MB in float32, however many heads and blocks there are
longer              conjugate gradients with tiles made on the fly, in linear memory
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from . import packing
from .triangular import (
    Schedule,
    Tiles,
    solve_unit_lower_,
    solve_unit_lower_transposed_,
    spans,
    subtract_product_,
)

# n: blocks of n tokens; None: one block; a tensor: borders of the blocks.
Block = int | Tensor | None

SMALL = 64
# Columns of a panel of the factor: LAPACK, slow here, does the diagonal of a panel and matrix products all the rest.
PANEL = 64
LONGEST_FACTOR = 4096
# 8 MB in float32: what comes back from a cache of this size is faster than fewer, larger products.
FACTOR_ELEMENTS = 2 * 1024**2
# Conjugate gradients stop where every column of the residual is this much shorter than its right-hand side b. Since
# ‖P_bb⁻¹‖ ≤ 2, the error of the solution is then at most twice as long as the residual.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
MOST_STEPS = 500


def is_causal(block: Block) -> bool:
    """Whether no token sees a later one."""
    return isinstance(block, int) and block == 1


def resolved(block: Block, is_causal: bool) -> Block:
    """`block` of a public function, for which is_causal=False is another name of block=None."""
    if is_causal:
        return block
    if not (block is None or (isinstance(block, int) and block == 1)):
        raise ValueError(f"is_causal=False is block=None: expected one of is_causal and block, got block = {block!r}")
    return None


def as_inputs(block: Block) -> tuple[Tensor | None, int]:
    """`block` as inputs "Tensor? borders, int block" of an operator."""
    return (block, 0) if isinstance(block, Tensor) else (None, block or 0)


def from_inputs(given: Tensor | None, block: int) -> Block:
    """The block of `as_inputs`."""
    return given if given is not None else block or None


def borders(block: Block, length: int) -> list[int]:
    """[0, …, length]: the borders of the blocks; raises if those of a tensor do not cover [0, length) in order."""
    if isinstance(block, Tensor):
        return packing.offsets(block, length, "block")
    return [*range(0, length, block or max(1, length)), length]


def numbers(block: Block, length: int, cu_seqlens: Tensor | None, device: torch.device) -> Tensor:
    """The number of its block for each of `length` positions; those of packed documents count from their start."""
    position = torch.arange(length, device=device)
    if isinstance(block, Tensor):
        return packing.document_numbers(block, position)
    if cu_seqlens is not None:
        document = packing.document_numbers(cu_seqlens, position)
        position = position - packing.on_device(cu_seqlens, device)[document]
    return position // block if block else torch.zeros_like(position)


def with_padding_masked(
    key_mask: Tensor | None, block: Block, cu_seqlens: Tensor | None, like: Tensor
) -> Tensor | None:
    """A mask where documents have blocks: a batch of short documents is padded, and a block would see the padding."""
    if key_mask is not None or cu_seqlens is None or is_causal(block):
        return key_mask
    return torch.ones(like.shape[0], like.shape[2], dtype=torch.bool, device=like.device)


class DiagonalBlocks:
    """The diagonal steps of the block solver for blocks of tokens with `borders`; below them it goes on as for L."""

    def __init__(self, borders: list[int], schedule: Schedule) -> None:
        self.longest = max(b - a for a, b in pairwise(borders))
        self.borders, self.schedule = borders, schedule

    @classmethod
    def scheduled(cls, borders: list[int], schedule: Schedule, heads: int) -> "DiagonalBlocks":
        """With as many of `heads` at once as factors may be in memory."""
        blocks = cls(borders, schedule)
        if SMALL < blocks.longest <= LONGEST_FACTOR:
            at_once = max(1, min(heads, FACTOR_ELEMENTS // blocks.longest**2))
            # More heads at once have smaller tiles.
            elements = max(schedule.block**2, schedule.elements * schedule.heads // at_once)
            blocks.schedule = replace(schedule, heads=at_once, elements=elements)
        return blocks

    def steps(self) -> list[slice]:
        """Columns that are solved together: one block, or small blocks of one length that fit into a tile."""
        steps: list[slice] = []
        lengths: list[int] = []
        for a, b in pairwise(self.borders):
            if a == b:
                continue
            small = b - a <= SMALL and bool(lengths) and lengths[-1] == b - a
            if small and b - steps[-1].start <= self.schedule.block:
                steps[-1] = slice(steps[-1].start, b)
            else:
                steps.append(slice(a, b))
                lengths.append(b - a)
        self._lengths = {step.start: length for step, length in zip(steps, lengths, strict=True)}
        return steps

    def solve_(self, y: Tensor, tiles: Tiles, cols: slice, S: int, mask: Tensor | None) -> None:
        """y ← P⁻¹ y for the diagonal part [cols] of P. y: [n, C, E]; mask: [n, C, 1], 0 at masked keys, or None."""
        self._apply_(y, tiles, cols, S, mask, transposed=False)

    def solve_adjoint_(
        self, g: Tensor, y: Tensor, tiles: Tiles, cols: slice, S: int, mask: Tensor | None, *, tile_grads: bool
    ) -> None:
        """g ← P⁻ᵀ g, and the gradient −g yᵀ of this part of P to `tiles` if `tile_grads`."""
        self._apply_(g, tiles, cols, S, mask, transposed=True)
        if not tile_grads:
            return
        length, C = self._lengths[cols.start], cols.stop - cols.start
        here = _moved(cols, S)
        if length <= SMALL:
            tile = tiles.make(here, here)
            tiles.pull_back(here, here, tile.mul_(_pattern(C, length, tile)), g, y, False)
            return
        # P_bb is symmetric: entry (i, j) with i > j stands for (j, i) as well, each with the factor 1/2.
        left, right = torch.cat([g, y], -1), torch.cat([y, g], -1)
        for rows, done in self._lower(C):
            tile = tiles.make(_moved(rows, here.start), _moved(done, here.start)).mul_(0.5)
            on_diagonal = rows.start == done.start
            operands = left[:, rows], right[:, done]
            tiles.pull_back(_moved(rows, here.start), _moved(done, here.start), tile, *operands, on_diagonal)

    def _apply_(self, y: Tensor, tiles: Tiles, cols: slice, S: int, mask: Tensor | None, transposed: bool) -> None:
        length = self._lengths[cols.start]
        if mask is not None:
            # Rows of earlier blocks were subtracted from masked ones, too.
            y.mul_(mask)
        if length <= SMALL:
            self._solve_small_(y, tiles, _moved(cols, S), length, mask, transposed)
        elif length <= LONGEST_FACTOR:
            self._solve_by_factor_(y, tiles, cols.start + S, mask)
        else:
            self._solve_by_gradients_(y, tiles, cols.start + S, mask)

    def _solve_small_(
        self, y: Tensor, tiles: Tiles, here: slice, w: int, mask: Tensor | None, transposed: bool
    ) -> None:
        A = tiles.make(here, here).mul_(tiles.alpha)
        if mask is not None:
            A.mul_(mask).mul_(mask.mT)
        n, C, _ = A.shape
        count = C // w
        blocks = A.view(n, count, w, count, w).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).mul(0.5)
        blocks.diagonal(dim1=2, dim2=3).fill_(1)
        root = _inverse_root(blocks.reshape(n * count, w, w))
        X = torch.bmm(root.mT, root)
        if transposed and count > 1:
            solve_unit_lower_transposed_(_scaled_rows(X, A, count), y)
        y.copy_(torch.bmm(X, y.reshape(n * count, w, -1)).view(y.shape))
        if not transposed and count > 1:
            solve_unit_lower_(_scaled_rows(X, A, count), y)

    def _solve_by_factor_(self, y: Tensor, tiles: Tiles, start: int, mask: Tensor | None) -> None:
        """Left-looking Cholesky by panels, with the forward substitution; then the backward substitution."""
        n, m, _ = y.shape
        F = y.new_empty(n, m, m)
        steps: list[tuple[slice, Tensor]] = []
        for here in spans(0, m, PANEL):
            a, b, w = here.start, here.stop, here.stop - here.start
            panel = y.new_empty(n, m - a, w)
            for rows in spans(a, m, self.schedule.elements // PANEL):
                tile = tiles.make(_moved(rows, start), _moved(here, start))
                torch.mul(tile, 0.5 * tiles.alpha, out=panel[:, _moved(rows, -a)])
            if mask is not None:
                panel.mul_(mask[:, a:]).mul_(mask[:, here].mT)
            panel[:, :w].diagonal(dim1=1, dim2=2).fill_(1)
            if a:
                panel.baddbmm_(F[:, a:, :a], F[:, here, :a].mT, alpha=-1)
                subtract_product_(y[:, here], F[:, here, :a], y[:, :a], 1.0)
            inverse = _inverse_root(panel[:, :w])
            steps.append((here, inverse))
            F[:, b:, here] = torch.bmm(panel[:, w:], inverse.mT)
            y[:, here] = torch.bmm(inverse, y[:, here])
        for here, inverse in reversed(steps):
            if here.stop < m:
                subtract_product_(y[:, here], F[:, here.stop :, here].mT, y[:, here.stop :], 1.0)
            y[:, here] = torch.bmm(inverse.mT, y[:, here])

    def _solve_by_gradients_(self, y: Tensor, tiles: Tiles, start: int, mask: Tensor | None) -> None:
        """Conjugate gradients, every column of y with its own steps.

        The residual is updated from step to step, and rounding moves it away from the true one. So at the end the true
        residual is computed in float64 from the same tiles, and if it is too long the steps start again from it.
        """
        tolerance = TOLERANCE[y.dtype]
        wide = y.dtype if y.device.type == "mps" else torch.float64
        x, r = torch.zeros_like(y, dtype=wide), y.clone()
        b2 = (r * r).sum(1, keepdim=True)
        limit, p, r2 = tolerance**2 * b2, r.clone(), b2
        recent = True
        for _ in range(MOST_STEPS):
            if bool((r2 <= limit).all()):
                if recent:
                    y.copy_(x)
                    return
                r = (y - self._product(x, tiles, start, mask)).to(y.dtype)
                r2, recent = (r * r).sum(1, keepdim=True), True
                p = r.clone()
                continue
            Ap = self._product(p, tiles, start, mask)
            along = (p * Ap).sum(1, keepdim=True)
            # A column that has arrived has p = 0 sooner or later, and 0/0.
            step = torch.where(along > 0, r2 / along, 0)
            x.addcmul_(p, step)
            r.addcmul_(Ap, step, value=-1)
            before, r2, recent = r2, (r * r).sum(1, keepdim=True), False
            p.mul_(torch.where(before > 0, r2 / before, 0)).add_(r)
        reached = (r2 / b2.clamp_min(torch.finfo(y.dtype).tiny)).max().sqrt().item()
        if math.isnan(reached):
            # NaN in, NaN out, as the other solvers have it.
            y.fill_(math.nan)
            return
        raise RuntimeError(
            f"block: conjugate gradients for a block of {y.shape[1]} tokens must reach a relative residual of "
            f"{tolerance:g}, got {reached:.1e} after {MOST_STEPS} steps. Use shorter blocks (up to {LONGEST_FACTOR} "
            "tokens are solved directly), a larger sharpness, less strength or float64"
        )

    def _product(self, x: Tensor, tiles: Tiles, start: int, mask: Tensor | None) -> Tensor:
        """P_bb x, each pair of tokens once. x: [n, m, E], zero at masked keys."""
        out, half = x.clone(), -0.5 * tiles.alpha
        for rows, cols in self._lower(x.shape[1]):
            tile = tiles.make(_moved(rows, start), _moved(cols, start)).to(x.dtype)
            if rows.start == cols.start:
                tile.diagonal(dim1=1, dim2=2).zero_()
            else:
                subtract_product_(out[:, cols], tile.mT, x[:, rows], half)
            subtract_product_(out[:, rows], tile, x[:, cols], half)
        return out if mask is None else out.mul_(mask)

    def _lower(self, m: int) -> Iterator[tuple[slice, slice]]:
        """Tiles (rows, cols) of the lower triangle of m × m, those on the diagonal square."""
        for cols in spans(0, m, self.schedule.block):
            yield cols, cols
            for rows in spans(cols.stop, m, self.schedule.rows):
                yield rows, cols


def _moved(where: slice, offset: int) -> slice:
    return slice(where.start + offset, where.stop + offset)


def _inverse_root(A: Tensor) -> Tensor:
    """L⁻¹ of A = L Lᵀ: [n, w, w]. NaN in, NaN out."""
    identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    return torch.linalg.solve_triangular(torch.linalg.cholesky_ex(A)[0], identity, upper=False)


def _scaled_rows(X: Tensor, A: Tensor, count: int) -> Tensor:
    """X · A with zeros in the diagonal blocks, for the block diagonal matrix X: [n · count, w, w]; A: [n, C, C]."""
    n, C, _ = A.shape
    w = C // count
    M = torch.bmm(X, A.view(n * count, w, C)).view(n, C, C)
    M.view(n, count, w, count, w).diagonal(dim1=1, dim2=3).zero_()
    return M


def _pattern(C: int, w: int, like: Tensor) -> Tensor:
    """[C, C]: the factor of each entry of G in P − I: 1 below the blocks, 1/2 in them, 0 on the diagonal."""
    number = torch.arange(C, device=like.device) // w
    below, inside = number[:, None] > number, number[:, None] == number
    return (below + 0.5 * inside).to(like.dtype).fill_diagonal_(0)
