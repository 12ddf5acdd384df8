"""One tree of some heads, whose products are made by Triton kernels, and the rectangles of its joins.

All tensors are float32 with padded head sizes D' and E'; a past has whole leaves.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..keys import inverse_norms
from ..triton_tiles import Precisions
from .heads import PathHeads, per_leaf
from .scores import Layout, PathScores
from .tiles import BLOCK_LEAVES
from .tree import Join
from .triton_configs import PathTileSizes
from .triton_products import TritonAlgebra
from .triton_rectangles import Rectangles, Side


@dataclass(frozen=True)
class Places:
    """Which positions see each other.

    new: [B, at least all leaves], the document of each position, −1 where it takes no part; old: [B, S'], the same of
    the past; documents: [2, as new], where the document of a position starts and ends. None: all see all before them.
    only_past: only the past has positions that take no part.
    """

    new: Tensor | None
    old: Tensor | None
    documents: Tensor | None
    only_past: bool = False

    def rows(self, where: slice) -> "Places":
        """Those of some rows of the batch."""
        return replace(
            self, new=None if self.new is None else self.new[where], old=None if self.old is None else self.old[where]
        )


@dataclass(frozen=True)
class Kernels:
    """What launches kernels for heads that are computed together, `heads` of each row of the batch, in leaves of `leaf`
    positions."""

    tiles: PathTileSizes
    multiply: Precisions
    heads: int
    places: Places
    leaf: int

    @property
    def algebra(self) -> TritonAlgebra:
        return TritonAlgebra(self.tiles.product, self.multiply.keys, self.leaf)

    @property
    def readout(self) -> Rectangles:
        """Scores of a read-out need no more than its products with values."""
        return Rectangles(self.tiles, replace(self.multiply, keys=self.multiply.values), self.heads, self.leaf)

    @property
    def solve(self) -> Rectangles:
        return Rectangles(self.tiles, self.multiply, self.heads, self.leaf)


class TritonTree:
    """The scores of all sets of rows: those of q first, those of the solve last."""

    def __init__(self, heads: PathHeads, kernels: Kernels, *, keep: bool) -> None:
        solves = heads.sharpness is not None
        self.heads, self.kernels = heads, kernels
        self.layout = layout = Layout.of_whole_blocks(heads.k.shape[1], BLOCK_LEAVES if solves else 1)
        self.k, w, beta = (layout.cut(x) for x in (heads.k, heads.w, heads.beta))
        self.groups = 0 if heads.q is None else heads.q.shape[1]
        rows = [] if heads.q is None else [layout.cut_rows(heads.q)]
        if heads.sharpness is not None:
            self.inverse = inverse_norms(self.k)
            rows.append(self.k * self.inverse.mul(per_leaf(heads.sharpness)))
        past = heads.k_past is not None
        self.scores = PathScores(
            layout, rows, self.k, w, beta, to_the_root=past, keep=keep or solves, algebra=kernels.algebra
        )
        self.last = len(rows) - 1

    def sides(self, join: Join, which: int, keys: Tensor | None = None) -> tuple[Side, Side]:
        """Rows and keys of a join."""
        places, step = self.kernels.places, 2 * join.size * self.layout.C
        ids = None if places.only_past else places.new
        starts, ends = (None, None) if places.documents is None else places.documents
        right, left = (join.first + join.size) * self.layout.C, join.first * self.layout.C
        keys = join.k if keys is None else keys
        return Side(join.rows[which], ids, right, step, starts), Side(keys, ids, left, step, ends)

    def past_sides(self, which: int, keys: Tensor) -> tuple[Side, Side]:
        """All rows, at the root, and keys of the past [n, S', D']."""
        rows = self.scores.rows[which].flatten(1, 2)[:, None]
        return Side(rows, self.kernels.places.new), Side(keys[:, None], self.kernels.places.old)

    def hidden(self, size: int) -> Tensor:
        """Which positions are not seen within blocks of `size` leaves: [1 or B, 1, blocks, size·C, size·C]."""
        C, device = size * self.layout.C, self.k.device
        future = torch.ones(C, C, dtype=torch.bool, device=device).triu(1)[None, None, None]
        ids = self.kernels.places.new
        if ids is None or self.kernels.places.only_past:
            return future
        ids = ids[:, None, : self.layout.leaves * self.layout.C].unflatten(2, (-1, C))
        other = (ids[..., :, None] != ids[..., None, :]) | (ids < 0)[..., None, :]
        own = torch.eye(C, dtype=torch.bool, device=device)
        # A position always sees itself, also if it takes no part: nothing is divided by zero.
        return future | (other & ~own)

    def per_row(self, x: Tensor) -> Tensor:
        """[n, *] -> [B, H, *]."""
        return x.unflatten(0, (-1, self.kernels.heads))


def one_node(x: Tensor) -> Tensor:
    """All rows as those of one node: [n, leaves, R, *] -> [n, 1, leaves · R, *]."""
    return x.flatten(1, 2)[:, None]
