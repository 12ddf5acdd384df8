"""Blocks of tokens that see each other: their borders, and the solve with the symmetric part that they bring.

    P_bb = I + s/2 · (G_bb − I) on the diagonal blocks,   P_bc = s · G_bc below them,   G_ij = exp(c (cos θ_ij − 1))

All diagonal entries of P are 1, also at a zero key. P_bb is symmetric with eigenvalues of at least 1/2
(`docs/mathematics.md`, section 9), so Cholesky's factor exists for any keys. By the length m of a block:

m ≤ SMALL           explicit inverses X of all blocks of a tile at once, then block substitution, for m < LEAF as one
                    unit lower triangular solve with X · P
m ≤ LONGEST_FACTOR  blocked Cholesky. The factor takes m² elements per head, of as many heads at a time as fit into
                    FACTOR_ELEMENTS, however many heads and blocks there are, and m E for the values that go along
longer              conjugate gradients with tiles made on the fly, in linear memory
"""

import math
import os
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
# Columns of a panel of the factor: LAPACK, slow here, does squares on its diagonal, matrix products the rest. Blocks
# below LEAF are too small for products of their own.
PANEL, LEAF = 64, 32
LONGEST_FACTOR = 4096
# 8 MB in float32: what comes back from a cache of this size is faster than fewer, larger products.
FACTOR_ELEMENTS = 2 * 1024**2
# By default conjugate gradients stop where every column of the residual is this much shorter than its right-hand side.
# Since ‖P_bb⁻¹‖ ≤ 2, the error of the solution is then at most twice as long as the residual.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
MOST_STEPS = 500


def is_causal(block: Block) -> bool:
    """Whether no token sees a later one."""
    return isinstance(block, int) and block == 1


def resolved(block: Block, causal: bool | None) -> Block:
    """`block` of a public function, where is_causal=True is another name of block=1, and False of block=None."""
    if causal is None:
        return block
    same = 1 if causal else None
    if not (is_causal(block) or (block is None and not causal)):
        raise ValueError(
            f"is_causal={causal} is block={same}: expected one of is_causal and block, got block = {block!r}"
        )
    return same


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

    def __init__(self, borders: list[int], schedule: Schedule, tolerance: float | None) -> None:
        self.borders, self.schedule, self.tolerance = borders, schedule, tolerance
        self._patterns: dict[tuple[int, int], Tensor] = {}

    @classmethod
    def scheduled(cls, borders: list[int], schedule: Schedule, k: Tensor, tolerance: float | None) -> "DiagonalBlocks":
        """With as many heads of k: [B, H, *] at once as factors or tiles may be in memory.

        More heads at once have smaller tiles, but whole panels. Steps of small blocks are short for a single head, and
        go to threads of their own. Those of a factor are short for threads: torch divides products over the heads,
        unless its threads sleep between products.
        """
        longest = max(b - a for a, b in pairwise(borders))
        if longest <= LONGEST_FACTOR:
            own = longest <= SMALL or os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive"
            threads = torch.get_num_threads() if k.device.type == "cpu" and own else 1
            tile, elements = schedule.block**2, schedule.elements * schedule.heads
            room = elements // tile if longest <= SMALL else FACTOR_ELEMENTS // longest**2
            at_once = max(1, min(k.shape[0] * k.shape[1] // threads, room))
            schedule = replace(schedule, heads=at_once, elements=max(tile, elements // at_once, longest * PANEL))
        return cls(borders, schedule, tolerance)

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
        tile = self._apply_(g, tiles, cols, S, mask, transposed=True)
        if not tile_grads:
            return
        if tile is not None:
            here = _moved(cols, S)
            tiles.pull_back(here, here, tile.mul_(self._pattern(tile, self._lengths[cols.start])), g, y, False)
            return
        # P_bb is symmetric: entry (i, j) with i > j stands for (j, i) as well, each with the factor 1/2.
        left, right = torch.cat([g, y], -1).mul_(0.5), torch.cat([y, g], -1)
        for rows, done in self._panels(g.shape[1]):
            where = _moved(rows, cols.start + S), _moved(done, cols.start + S)
            diagonal = rows.start == done.start
            tiles.pull_back(*where, tiles.make(*where), left[:, rows], right[:, done], diagonal)

    def _apply_(
        self, y: Tensor, tiles: Tiles, cols: slice, S: int, mask: Tensor | None, transposed: bool
    ) -> Tensor | None:
        """y ← P⁻¹ y, or P⁻ᵀ y. Returns the tile of small blocks, with zeros at masked keys."""
        length = self._lengths[cols.start]
        if mask is not None:
            # Rows of earlier blocks were subtracted from masked ones, too.
            y.mul_(mask)
        if length > LONGEST_FACTOR:
            self._solve_by_gradients_(y, tiles, cols.start + S, mask)
        elif length > SMALL:
            _solve_by_factor_(y, tiles, cols.start + S, mask)
        else:
            tile = tiles.make(_moved(cols, S), _moved(cols, S))
            if mask is not None:
                tile.mul_(mask).mul_(mask.mT)
            _solve_small_(y, tile, tiles.alpha, length, transposed)
            return tile
        return None

    def _solve_by_gradients_(self, y: Tensor, tiles: Tiles, start: int, mask: Tensor | None) -> None:
        """Conjugate gradients, every column of y with its own steps.

        The residual is updated from step to step, and rounding moves it away from the true one. So at the end the true
        residual is computed in float64 from the same tiles, and if it is too long the steps start again from it.
        """
        tolerance = self.tolerance or TOLERANCE[y.dtype]
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
            "tokens are solved directly), a larger sharpness or tolerance, less strength or float64"
        )

    def _product(self, x: Tensor, tiles: Tiles, start: int, mask: Tensor | None) -> Tensor:
        """P_bb x, each pair of tokens once. x: [n, m, E], zero at masked keys."""
        out, half = x.clone(), -0.5 * tiles.alpha
        for rows, cols in self._panels(x.shape[1]):
            tile = tiles.make(_moved(rows, start), _moved(cols, start)).to(x.dtype)
            if rows.start == cols.start:
                tile.tril_(-1)
            subtract_product_(out[:, cols], tile.mT, x[:, rows], half)
            subtract_product_(out[:, rows], tile, x[:, cols], half)
        return out if mask is None else out.mul_(mask)

    def _panels(self, m: int) -> Iterator[tuple[slice, slice]]:
        """Tiles (rows, cols) that cover the lower triangle of m × m. Those on the diagonal begin with a square."""
        for cols in spans(0, m, PANEL):
            for rows in spans(cols.start, m, self.schedule.elements // PANEL):
                yield rows, cols

    def _pattern(self, tile: Tensor, w: int) -> Tensor:
        """[C, C]: the factor of each entry of G in P − I: 1 below the blocks, 1/2 in them, 0 on the diagonal."""
        key = tile.shape[-1], w
        if key not in self._patterns:
            number = torch.arange(key[0], device=tile.device) // w
            below, inside = number[:, None] > number, number[:, None] == number
            self._patterns[key] = (below + 0.5 * inside).to(tile.dtype).fill_diagonal_(0)
        return self._patterns[key]


def _moved(where: slice, offset: int) -> slice:
    return slice(where.start + offset, where.stop + offset)


def _solve_by_factor_(y: Tensor, tiles: Tiles, start: int, mask: Tensor | None) -> None:
    """Left-looking Cholesky by panels. Rows yᵀ below P_bb become (L⁻¹ y)ᵀ; then the backward substitution."""
    n, m, E = y.shape
    F, room = y.new_empty(n, m + E, m), y.new_empty(n * (m + E) * min(m, PANEL))
    roots: list[tuple[slice, Tensor]] = []
    for here in spans(0, m, PANEL):
        a, b, w = here.start, here.stop, here.stop - here.start
        tile = tiles.make(slice(start + a, start + m), _moved(here, start))
        if mask is not None:
            tile.mul_(mask[:, a:]).mul_(mask[:, here].mT)
        panel = room[: n * (m - a + E) * w].view(n, m - a + E, w)
        square = panel[:, :w]
        torch.mul(tile, 0.5 * tiles.alpha, out=panel[:, : m - a])
        square.diagonal(dim1=1, dim2=2).fill_(1)
        panel[:, m - a :] = y[:, here].mT
        panel.baddbmm_(F[:, a:, :a], F[:, here, :a].mT, alpha=-1)
        root = _inverse_root(square)
        roots.append((here, root))
        F[:, b:, here] = torch.bmm(panel[:, w:], root.mT)
    L, z = F[:, :m], F[:, m:]
    for here, root in reversed(roots):
        below = slice(here.stop, m)
        solved = torch.bmm(torch.baddbmm(z[:, :, here], z[:, :, below], L[:, below, here], alpha=-1), root)
        z[:, :, here] = solved
        y[:, here] = solved.mT


def _inverse_root(A: Tensor) -> Tensor:
    """L⁻¹ of A = L Lᵀ: [n, w, w]. NaN in, NaN out."""
    R = torch.linalg.cholesky_ex(A, upper=True)[0]
    X = torch.eye(A.shape[1], dtype=A.dtype, device=A.device).expand(A.shape).contiguous()
    # From the right, as in `solve_unit_lower_`: nothing is copied.
    torch.linalg.solve_triangular(R, X.mT, upper=True, left=False, out=X.mT)
    return X


def _solve_small_(y: Tensor, tile: Tensor, alpha: float, w: int, transposed: bool) -> None:
    """y ← P⁻¹ y, or P⁻ᵀ y, for blocks of w tokens in a tile: [n, C, C]; y: [n, C, E]."""
    n, C, E = y.shape
    count = C // w
    blocks = tile.view(n, count, w, count, w).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).mul(0.5 * alpha)
    blocks.diagonal(dim1=2, dim2=3).fill_(1)
    root = _inverse_root(blocks.reshape(n * count, w, w))
    X = torch.bmm(root.mT, root)
    if w < LEAF:
        # Steps of single blocks are too short: L of the whole tile is scaled, and unit lower triangular.
        M = torch.bmm(X, tile.view(n * count, w, C)).view(n, C, C).mul_(alpha)
        M.view(n, count, w, count, w).diagonal(dim1=1, dim2=3).zero_()
        if transposed:
            solve_unit_lower_transposed_(M, y)
        y.copy_(torch.bmm(X, y.reshape(n * count, w, E)).view(y.shape))
        if not transposed:
            solve_unit_lower_(M, y)
        return
    X = X.view(n, count, w, w)
    for i in reversed(range(count)) if transposed else range(count):
        here, before, after = slice(i * w, i * w + w), slice(0, i * w), slice(i * w + w, C)
        if transposed:
            subtract_product_(y[:, here], tile[:, after, here].mT, y[:, after], alpha)
        else:
            subtract_product_(y[:, here], tile[:, here, before], y[:, before], alpha)
        y[:, here] = torch.bmm(X[:, i], y[:, here])
