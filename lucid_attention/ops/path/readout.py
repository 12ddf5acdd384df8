"""The softmax read-out of PaTH scores: o = softmax(scores) y over a tree, in linear memory.

Blocks are dense, every join above them is one non-causal rectangle, and rows collect their parts by log-sum-exps.
Works on n heads with G query heads each; q comes with the scale inside.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..rectangles import attend_rectangle, attend_rectangle_backward
from ..triangular import spans
from .scores import Layout, PathScores

# Elements of the dense scores of blocks in flight: they should stay in the processor's cache.
BLOCK_ELEMENTS = 512 * 1024


@dataclass(frozen=True)
class Heads:
    """q: [n, G, T, D]; k, w: [n, T, D]; y: [n, T, E]; beta: [n, T, 1]; k_past, y_past: [n, S, D], [n, S, E]."""

    q: Tensor
    k: Tensor
    y: Tensor
    w: Tensor
    beta: Tensor
    k_past: Tensor | None
    y_past: Tensor | None


def _scores(heads: Heads, layout: Layout, *, keep: bool) -> PathScores:
    q, (k, w, beta) = layout.cut_rows(heads.q), (layout.cut(x) for x in (heads.k, heads.w, heads.beta))
    return PathScores(layout, q, k, w, beta, to_the_root=heads.k_past is not None, keep=keep)


def _above_diagonal(layout: Layout, rows: int, device: torch.device) -> Tensor:
    """Which scores of a block are in the future: [L · rows, L · C], where a leaf has `rows` = G · C rows."""
    position = torch.arange(layout.block, device=device)
    row = position.view(layout.L, 1, layout.C).expand(-1, rows // layout.C, -1).reshape(-1, 1)
    return position > row


def _block_spans(layout: Layout, n: int, rows: int) -> list[slice]:
    each = n * layout.L * rows * layout.block
    return list(spans(0, layout.blocks, max(1, BLOCK_ELEMENTS // each)))


def attend(heads: Heads) -> tuple[Tensor, Tensor]:
    """o: [n, G, T, E] and the log-sum-exp of each row: [n, G, T]."""
    layout = Layout.of(heads.k.shape[1])
    scores = _scores(heads, layout, keep=False)
    y = layout.cut(heads.y)
    n, rows = y.shape[0], scores.rows.shape[2]
    o = y.new_empty(n, layout.leaves, rows, y.shape[3])
    lse = y.new_empty(n, layout.leaves, rows, 1)
    _attend_blocks(scores, y, o, lse)
    for join in scores.joins:
        part, part_lse = attend_rectangle(join.q, join.k, join.left_of(y))
        _merge_(join.right_of(o), join.right_of(lse), part, part_lse[..., None])
    if heads.k_past is not None and heads.y_past is not None:
        every_row = scores.rows.flatten(1, 2)[:, None]
        part, part_lse = attend_rectangle(every_row, heads.k_past[:, None], heads.y_past[:, None])
        _merge_(o.flatten(1, 2)[:, None], lse.flatten(1, 2)[:, None], part, part_lse[..., None])
    return layout.join_rows(o), layout.join_rows(lse)[..., 0]


def _attend_blocks(scores: PathScores, y: Tensor, o: Tensor, lse: Tensor) -> None:
    layout, (n, _, rows, _) = scores.layout, o.shape
    future = _above_diagonal(layout, rows, y.device)
    y, o, lse = (x.flatten(1, 2).unflatten(1, (layout.blocks, -1)) for x in (y, o, lse))
    for here in _block_spans(layout, n, rows):
        p = scores.block_scores(here.start, here.stop).masked_fill_(future, -math.inf)
        top = p.amax(-1, keepdim=True)
        p.sub_(top).exp_()
        total = p.sum(-1, keepdim=True)
        o[:, here] = (p @ y[:, here]).div_(total)
        lse[:, here] = total.log_().add_(top)


def _merge_(o: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Put what other keys gave into o: [n, m, R, E] and lse: [n, m, R, 1], in place."""
    both = torch.logaddexp(lse, part_lse)
    o.mul_((lse - both).exp_()).addcmul_(part, (part_lse - both).exp_())
    lse.copy_(both)


def attend_backward(heads: Heads, do: Tensor, o: Tensor, lse: Tensor) -> Heads:
    """Gradients, each in the place of what it belongs to. do, o: [n, G, T, E]; lse: [n, G, T]."""
    layout = Layout.of(heads.k.shape[1])
    scores = _scores(heads, layout, keep=True)
    y = layout.cut(heads.y)
    do, o, lse = layout.cut_rows(do), layout.cut_rows(o), layout.cut_rows(lse[..., None])
    dy = torch.empty_like(y)
    scores.collect_gradients()
    _attend_blocks_backward(scores, y, do, o, lse, dy)
    for join in scores.joins:
        args = join.right_of(do), join.q, join.k, join.left_of(y), join.right_of(o), join.right_of(lse)[..., 0]
        join.dq, join.dk, dy_left = attend_rectangle_backward(*args)
        join.left_of(dy).add_(dy_left)
    droot = dk_past = dy_past = None
    if heads.k_past is not None and heads.y_past is not None:
        rows, rows_do, rows_o, rows_lse = (x.flatten(1, 2)[:, None] for x in (scores.rows, do, o, lse))
        droot, dk_past, dy_past = attend_rectangle_backward(
            rows_do, rows, heads.k_past[:, None], heads.y_past[:, None], rows_o, rows_lse[..., 0]
        )
        droot, dk_past, dy_past = droot[:, 0].view(scores.rows.shape), dk_past[:, 0], dy_past[:, 0]
    grads = scores.pull_back(droot)
    return Heads(
        layout.join_rows(grads.dq),
        layout.join(grads.dk),
        layout.join(dy),
        layout.join(grads.dw),
        layout.join(grads.dbeta),
        dk_past,
        dy_past,
    )


def _attend_blocks_backward(scores: PathScores, y: Tensor, do: Tensor, o: Tensor, lse: Tensor, dy: Tensor) -> None:
    layout, (n, _, rows, _) = scores.layout, o.shape
    future = _above_diagonal(layout, rows, y.device)
    y, do, o, lse, dy = (x.flatten(1, 2).unflatten(1, (layout.blocks, -1)) for x in (y, do, o, lse, dy))
    for here in _block_spans(layout, n, rows):
        p = scores.block_scores(here.start, here.stop).sub_(lse[:, here]).exp_().masked_fill_(future, 0)
        dy[:, here] = p.mT @ do[:, here]
        along = (do[:, here] * o[:, here]).sum(-1, keepdim=True)
        scores.block_pull_back(here.start, here.stop, p.mul_((do[:, here] @ y[:, here].mT).sub_(along)))
