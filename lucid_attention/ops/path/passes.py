"""Forward and backward of PaTH, of LUCID's solve on it, or of both on one tree, for some heads."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..keys import inverse_norms
from ..triangular import Schedule, solve_, solve_adjoint_
from . import readout
from .scores import Layout, PathScores
from .solve import BLOCK_LEAVES, PathTiles, path_schedule


@dataclass(frozen=True)
class Heads:
    """n heads in working precision; as gradients, each in the place of what it belongs to.

    q: [n, G, T, D], scaled, None without a read-out; k, w: [n, T, D]; v: [n, T, E]; beta: [n, T, 1]; of a past k_past:
    [n, S, D], y_past: [n, S, E], scalars_past: [n, S, 1]; sharpness: None without a solve, a number, or [n, 1, 1].
    """

    q: Tensor | None
    k: Tensor
    v: Tensor
    w: Tensor
    beta: Tensor
    k_past: Tensor | None
    y_past: Tensor | None
    scalars_past: Tensor | None
    sharpness: float | Tensor | None

    @property
    def past(self) -> readout.Past | None:
        return None if self.k_past is None or self.y_past is None else (self.k_past, self.y_past)


class Outputs(NamedTuple):
    """o: [n, G, T, E] and lse: [n, G, T] with a read-out; y: [n, T, E] with a solve."""

    o: Tensor | None
    lse: Tensor | None
    y: Tensor | None


class _Tree:
    """The scores of all sets of rows: those of q first, those of the solve last."""

    def __init__(self, heads: Heads, schedule: Schedule, *, keep: bool) -> None:
        solves = heads.sharpness is not None
        self.layout = layout = Layout.of(heads.k.shape[1], BLOCK_LEAVES if solves else 1)
        self.k, w, beta = (layout.cut(x) for x in (heads.k, heads.w, heads.beta))
        rows = [] if heads.q is None else [layout.cut_rows(heads.q)]
        self.scalars = self.k
        if heads.sharpness is not None:
            self.scalars = inverse_norms(self.k)
            rows.append(self.k * self.scalars.mul(_per_leaf(heads.sharpness)))
        past = heads.k_past is not None
        self.scores = PathScores(layout, rows, self.k, w, beta, to_the_root=past, keep=keep or solves)
        self.last = len(rows) - 1
        self.schedule = path_schedule(schedule, layout)
        self.tiles = None
        if heads.sharpness is not None:
            u_past = None
            if heads.k_past is not None and heads.scalars_past is not None:
                u_past = heads.k_past * heads.scalars_past
            self.tiles = PathTiles(self.scores, self.last, self.scalars, u_past, heads.sharpness, self.schedule)


def _per_leaf(sharpness: float | Tensor) -> float | Tensor:
    return sharpness[..., None] if isinstance(sharpness, Tensor) else sharpness


def forward(heads: Heads, schedule: Schedule) -> Outputs:
    tree = _Tree(heads, schedule, keep=False)
    y = None
    if tree.tiles is not None:
        y = heads.v.clone()
        solve_(y, tree.tiles, tree.schedule, y_past=heads.y_past)
    if heads.q is None:
        return Outputs(None, None, y)
    values = tree.layout.cut(heads.v if y is None else y)
    o, lse = readout.attend(tree.scores, 0, values, heads.past)
    return Outputs(tree.layout.join_rows(o), tree.layout.join_rows(lse)[..., 0], y)


def backward(heads: Heads, schedule: Schedule, made: Outputs, do: Tensor | None, dy: Tensor | None) -> Heads:
    """Gradients of the heads; of the sharpness [n], if it is a tensor. do, dy: those of o and y, do if there is a q."""
    tree = _Tree(heads, schedule, keep=True)
    layout, scores, tiles = tree.layout, tree.scores, tree.tiles
    scores.collect_gradients()
    g = torch.zeros_like(heads.v) if dy is None else dy.clone()
    dk_past = dy_past = dscalars_past = dsharpness = None
    if do is not None and made.o is not None and made.lse is not None:
        rows = (layout.cut_rows(x) for x in (do, made.o, made.lse[..., None]))
        values = layout.cut(heads.v if made.y is None else made.y)
        dvalues, dpast = readout.attend_backward(scores, 0, values, heads.past, *rows)
        g += layout.join(dvalues)
        dk_past, dy_past = (None, None) if dpast is None else dpast
    if tiles is not None and made.y is not None:
        tiles.collect_gradients(row_sums=isinstance(heads.sharpness, Tensor))
        if dy_past is None and heads.y_past is not None:
            dy_past = torch.zeros_like(heads.y_past)
        solve_adjoint_(g, made.y, tiles, tree.schedule, y_past=heads.y_past, dy_past=dy_past)
        tiles.finish()
    drows, dk, dw, dbeta = scores.pull_back()
    if tiles is not None:
        dsharpness = _through_the_norm(heads, tree, tiles, drows[tree.last], dk)
        if tiles.du_past is not None and heads.k_past is not None and heads.scalars_past is not None:
            dscalars_past = (tiles.du_past * heads.k_past).sum(-1, keepdim=True)
            dk_past = tiles.du_past.mul_(heads.scalars_past).add_(0 if dk_past is None else dk_past)
    dq = None if heads.q is None else layout.join_rows(drows[0])
    dk, dw, dbeta = (layout.join(x) for x in (dk, dw, dbeta))
    return Heads(dq, dk, g, dw, dbeta, dk_past, dy_past, dscalars_past, dsharpness)


def _through_the_norm(heads: Heads, tree: _Tree, tiles: PathTiles, drows: Tensor, dk: Tensor) -> Tensor | None:
    """Add to dk what comes through the rows c k/‖k‖ and the scalars 1/‖k‖; return the gradient of c."""
    assert heads.sharpness is not None
    c = _per_leaf(heads.sharpness)
    along = (drows * tree.k).sum(-1, keepdim=True)
    dscalars = tiles.dscalars.add_(along * c)
    # 1/‖k‖ falls by k/‖k‖³; in this order nothing overflows for very short keys.
    dk.add_(drows * (tree.scalars * c)).sub_(tree.k * tree.scalars * (dscalars * tree.scalars * tree.scalars))
    if tiles.row_sums is None:
        return None
    return (along * tree.scalars).sum((1, 2, 3)) - tiles.row_sums.sum((1, 2))
