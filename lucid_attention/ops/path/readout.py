"""The softmax read-out of PaTH scores: o = softmax(scores) y over a tree, in linear memory.

Leaves are dense, every join is one non-causal rectangle, and rows collect their parts by log-sum-exps. With the final
output and log-sum-exp the gradient of each part is exact by itself. Rows come with the scale inside. Shapes are those
of `Layout`: y [n, leaves, C, E]; o, do [n, leaves, G·C, E]; lse [n, leaves, G·C, 1].
"""

import math

import torch
from torch import Tensor

from ..softmax.strips import attend_rectangle, attend_rectangle_backward
from .scores import PathScores

# A past: keys moved to its end [n, S, D] and their values [n, S, E].
Past = tuple[Tensor, Tensor]


def _future(scores: PathScores, rows: int, device: torch.device) -> Tensor:
    """Which scores of a leaf are above the diagonal: [G·C, C]."""
    C = scores.layout.C
    position = torch.arange(C, device=device)
    return position > position.repeat(rows // C)[:, None]


def attend(scores: PathScores, which: int, y: Tensor, past: Past | None) -> tuple[Tensor, Tensor]:
    """o and lse of the rows `which`."""
    o, lse = _attend_leaves(scores, which, y)
    for join in scores.all_joins():
        part, part_lse = attend_rectangle(join.rows[which], join.k, join.left_of(y))
        _merge_(join.right_of(o), join.right_of(lse), part, part_lse[..., None])
    if past is not None:
        part, part_lse = attend_rectangle(_one(scores.rows[which]), past[0][:, None], past[1][:, None])
        _merge_(_one(o), _one(lse), part, part_lse[..., None])
    return o, lse


def _one(x: Tensor) -> Tensor:
    """All rows as those of one node: [n, leaves, R, *] -> [n, 1, leaves · R, *]."""
    return x.flatten(1, 2)[:, None]


def _attend_leaves(scores: PathScores, which: int, y: Tensor) -> tuple[Tensor, Tensor]:
    p = scores.leaf_scores(which)
    p = p.masked_fill(_future(scores, p.shape[2], p.device), -math.inf)
    top = p.amax(-1, keepdim=True)
    p.sub_(top).exp_()
    total = p.sum(-1, keepdim=True)
    return (p @ y).div_(total), total.log().add_(top)


def _merge_(o: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Put what other keys gave into o: [n, m, R, E] and lse: [n, m, R, 1], in place."""
    both = torch.logaddexp(lse, part_lse)
    o.mul_((lse - both).exp_()).addcmul_(part, (part_lse - both).exp_())
    lse.copy_(both)


def attend_backward(
    scores: PathScores, which: int, y: Tensor, past: Past | None, do: Tensor, o: Tensor, lse: Tensor
) -> tuple[Tensor, Past | None]:
    """dy and the gradients of the past; those of scores go to `scores`."""
    dy = _attend_leaves_backward(scores, which, y, do, o, lse)
    for join in scores.all_joins():
        assert join.dk is not None
        args = join.right_of(do), join.rows[which], join.k, join.left_of(y), join.right_of(o)
        join.drows[which], dk, dy_left = attend_rectangle_backward(*args, join.right_of(lse)[..., 0])
        join.dk += dk
        join.left_of(dy).add_(dy_left)
    if past is None:
        return dy, None
    args = _one(do), _one(scores.rows[which]), past[0][:, None], past[1][:, None], _one(o)
    drows, dk_past, dy_past = attend_rectangle_backward(*args, _one(lse)[..., 0])
    scores.drows[which].add_(drows[:, 0].view(scores.rows[which].shape))
    return dy, (dk_past[:, 0], dy_past[:, 0])


def _attend_leaves_backward(scores: PathScores, which: int, y: Tensor, do: Tensor, o: Tensor, lse: Tensor) -> Tensor:
    p = scores.leaf_scores(which).sub(lse).exp_()
    p.masked_fill_(_future(scores, p.shape[2], p.device), 0)
    dy = p.mT @ do
    along = (do * o).sum(-1, keepdim=True)
    scores.leaf_pull_back(which, p.mul_((do @ y.mT).sub_(along)))
    return dy
