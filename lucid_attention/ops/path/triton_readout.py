"""The softmax read-out over a tree by Triton kernels: leaves are dense, each level of joins is one launch."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .triton_rectangles import Side
from .triton_tree import TritonTree, one_node


def attend(tree: TritonTree, y: Tensor) -> tuple[Tensor, Tensor]:
    """o: [n, leaves, G·C, E'] and lse: [n, leaves, G·C]."""
    p, kernels, G = _leaf_scores(tree), tree.kernels, tree.groups
    lse = p.logsumexp(-1)
    o = kernels.algebra.product(p.sub_(lse[..., None]).exp_(), y)
    for join in tree.scores.all_joins():
        rows, keys = tree.sides(join, 0)
        kernels.readout.attend_(rows, keys, G, join.left_of(y), join.right_of(o), join.right_of(lse))
    if tree.heads.k_past is not None and tree.heads.y_past is not None:
        rows, keys = tree.past_sides(0, tree.heads.k_past)
        kernels.readout.attend_(rows, keys, G, tree.heads.y_past[:, None], one_node(o), one_node(lse))
    return o, lse


def _leaf_scores(tree: TritonTree) -> Tensor:
    """[n, leaves, G·C, C], −∞ where a position is not seen."""
    scores = tree.scores.leaf_scores(0).unflatten(2, (tree.groups, tree.layout.C))
    hidden = tree.hidden(1)[:, :, :, None]
    return tree.per_row(scores).masked_fill(hidden, -math.inf).flatten(0, 1).flatten(2, 3)


def attend_backward(
    tree: TritonTree, y: Tensor, do: Tensor, o: Tensor, lse: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """dy: [n, leaves, C, E'], and the gradients of k_past and y_past."""
    scores, algebra = tree.scores, tree.kernels.algebra
    p = _leaf_scores(tree).sub_(lse[..., None]).exp_()
    along = (do * o).sum(-1)
    dy = algebra.product(p.mT, do)
    scores.leaf_pull_back(0, p.mul_(algebra.product(do, y.mT).sub_(along[..., None])))
    for join in scores.all_joins():
        assert join.dk is not None
        join.drows[0].zero_()
        rows = _OfRows(*(join.right_of(x) for x in (do, lse, along)))
        _pull_back(tree, tree.sides(join, 0), rows, join.left_of(y), join.drows[0], join.dk, join.left_of(dy))
    k_past, y_past = tree.heads.k_past, tree.heads.y_past
    if k_past is None or y_past is None:
        return dy, None
    dk_past, dy_past = torch.zeros_like(k_past), torch.zeros_like(y_past)
    rows = _OfRows(*(one_node(x) for x in (do, lse, along)))
    past = y_past[:, None], one_node(scores.drows[0]), dk_past[:, None], dy_past[:, None]
    _pull_back(tree, tree.past_sides(0, k_past), rows, *past)
    return dy, (dk_past, dy_past)


class _OfRows(NamedTuple):
    """Gradients of the rows of rectangles. do: [n, pairs, R, E']; lse: [n, pairs, R]; along: [n, pairs, R], do · o."""

    do: Tensor
    lse: Tensor
    along: Tensor


def _pull_back(
    tree: TritonTree, sides: tuple[Side, Side], of: _OfRows, y: Tensor, drows: Tensor, dkeys: Tensor, dy: Tensor
) -> None:
    """Add the gradients of rectangles to drows, dkeys and dy: [n, pairs, *, *] of rows, keys and values."""
    (rows, keys), readout, G = sides, tree.kernels.readout, tree.groups
    readout.pull_(rows, keys, G, of.lse, of.along, of.do, y, drows, 1.0, to_rows=True)
    readout.pull_(keys, rows, G, of.lse, of.along, y, of.do, dkeys, 1.0, to_rows=False)
    readout.apply_(keys, rows, G, of.lse, of.do, dy, 1.0, to_rows=False)
