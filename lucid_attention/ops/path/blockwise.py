"""PaTH, LUCID's solve on PaTH scores, or both on one tree: sequence by sequence, some heads at a time.

Memory is linear in the length. What a tree needs beyond the inputs exists only for the heads in flight.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .. import packing
from ..keys import inverse_norms
from ..precision import no_autocast
from ..triangular import Schedule, pick_schedule, solve_, solve_adjoint_
from . import readout
from .heads import Outputs, PathHeads, by_kv_head, flat, heads_of, per_leaf, store, through_the_norm
from .scores import Layout, PathScores
from .system import DIFFERENTIABLE, PathSystem
from .tiles import BLOCK_LEAVES, PathTiles, path_schedule

# Heads of short sequences run together, up to this many positions: many small steps would cost more than their work.
POSITIONS = 2048


def _schedule(system: PathSystem) -> Schedule:
    heads, T = system.k.shape[0] * system.k.shape[1], system.k.shape[2]
    picked = pick_schedule(system.k.device, heads, T, system.past_length)
    return replace(picked, heads=max(picked.heads, min(heads, POSITIONS // T)))


def forward(system: PathSystem) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """o: [B, H·G, T, E] in the dtype of q and lse: [B, H·G, T], if there is a q; y: [B, H, T, E], if it solves."""
    q, v = system.q, system.v
    o = lse = None
    if q is not None:
        o = system.output(*q.shape[:3], v.shape[3], like=q)
        lse = system.output(*q.shape[:3], like=q, dtype=system.dtype)
    y = system.output(*v.shape, like=v) if system.solves else None
    with no_autocast(v):
        for part, written, _ in packing.pieces(system.parts(), (o, lse, y)):
            sequences = system.part(part)
            schedule = _schedule(sequences)
            for group in schedule.groups(*sequences.k.shape[:2]):
                made = forward_heads(heads_of(sequences, group, reads=True), schedule)
                for whole, value in zip(written, made, strict=True):
                    if whole is not None and value is not None:
                        store(by_kv_head(whole, sequences), group, value)
    return o, lse, y


def backward(
    system: PathSystem, made: Sequence[Tensor | None], do: Tensor | None, dy: Tensor | None
) -> list[Tensor | None]:
    """Gradients of `DIFFERENTIABLE`. made: what `forward` gave; do, dy: gradients of o and y."""
    inputs = [x if isinstance(x := getattr(system, name), Tensor) else None for name in DIFFERENTIABLE]
    grads = [None if x is None else system.output(*x.shape, like=x) for x in inputs]
    if system.q is not None and do is None:
        grads[0] = torch.zeros_like(system.q)
    dsharpness = grads[-1]
    if dsharpness is not None:
        dsharpness.zero_()
    new = [None if do is None else grads[0], *grads[1:5]]
    with no_autocast(system.v):
        for part, new_pieces, past_pieces in packing.pieces(system.parts(), new, grads[5:8]):
            dc = None if dsharpness is None else torch.empty_like(part.per_sequence(dsharpness))
            saved = [None if x is None else part.take(x) for x in made]
            dout, dvalues = (None if x is None else part.take_grad(x) for x in (do, dy))
            _backward_of_part(system.part(part), [*new_pieces, *past_pieces, dc], saved, dout, dvalues)
            if dsharpness is not None and dc is not None:
                part.add_sequences_(dsharpness, dc)
    return grads


def _backward_of_part(
    system: PathSystem,
    written: list[Tensor | None],
    saved: list[Tensor | None],
    do: Tensor | None,
    dy: Tensor | None,
) -> None:
    schedule = _schedule(system)
    for group in schedule.groups(*system.k.shape[:2]):
        o, lse, y, row_grads = (None if x is None else flat(by_kv_head(x, system), group, system) for x in (*saved, do))
        outputs = Outputs(o, lse, None if y is None else y[:, 0])
        value_grads = None if dy is None else flat(dy, group, system)
        heads = heads_of(system, group, reads=do is not None)
        grads = backward_heads(heads, schedule, outputs, row_grads, value_grads)
        if grads.q is not None:
            grads.q.mul_(system.scale)
        for name, whole in zip(DIFFERENTIABLE, written, strict=True):
            if whole is not None:
                store(by_kv_head(whole, system) if name == "q" else whole, group, getattr(grads, name))


class _Tree:
    """The scores of all sets of rows: those of q first, those of the solve last."""

    def __init__(self, heads: PathHeads, schedule: Schedule, *, keep: bool) -> None:
        solves = heads.sharpness is not None
        self.layout = layout = Layout.of(heads.k.shape[1], BLOCK_LEAVES if solves else 1)
        self.k, w, beta = (layout.cut(x) for x in (heads.k, heads.w, heads.beta))
        rows = [] if heads.q is None else [layout.cut_rows(heads.q)]
        self.inverse = self.k
        if heads.sharpness is not None:
            self.inverse = inverse_norms(self.k)
            rows.append(self.k * self.inverse.mul(per_leaf(heads.sharpness)))
        past = heads.k_past is not None
        self.scores = PathScores(layout, rows, self.k, w, beta, to_the_root=past, keep=keep or solves)
        self.last = len(rows) - 1
        self.schedule = path_schedule(schedule, layout)
        self.tiles = None
        if heads.sharpness is not None:
            u_past = None
            if heads.k_past is not None and heads.inverse_norms is not None:
                u_past = heads.k_past * heads.inverse_norms
            self.tiles = PathTiles(self.scores, self.last, self.inverse, u_past, heads.sharpness, self.schedule)


def forward_heads(heads: PathHeads, schedule: Schedule) -> Outputs:
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


def backward_heads(
    heads: PathHeads, schedule: Schedule, made: Outputs, do: Tensor | None, dy: Tensor | None
) -> PathHeads:
    """Gradients of the heads; of the sharpness [n], if it is a tensor. do, dy: those of o and y, do if there is a q."""
    tree = _Tree(heads, schedule, keep=True)
    layout, scores, tiles = tree.layout, tree.scores, tree.tiles
    scores.collect_gradients()
    g = torch.zeros_like(heads.v) if dy is None else dy.clone()
    dk_past = dy_past = dinverse_norms = dsharpness = None
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
        assert heads.sharpness is not None
        dsharpness = through_the_norm(
            heads.sharpness, tree.k, tree.inverse, drows[tree.last], tiles.dinverse, tiles.row_sums, dk
        )
        if tiles.du_past is not None and heads.k_past is not None and heads.inverse_norms is not None:
            dinverse_norms = (tiles.du_past * heads.k_past).sum(-1, keepdim=True)
            dk_past = tiles.du_past.mul_(heads.inverse_norms).add_(0 if dk_past is None else dk_past)
    dq = None if heads.q is None else layout.join_rows(drows[0])
    dk, dw, dbeta = (layout.join(x) for x in (dk, dw, dbeta))
    return PathHeads(dq, dk, g, dw, dbeta, dk_past, dy_past, dinverse_norms, dsharpness)
