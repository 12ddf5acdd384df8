"""The features u of LUCID's matrix, L_ij = s · exp(u_i·u_j − shift_i), and the way from keys to them and back.

norm="key":      u = √c · k/‖k‖,   shift = c, so that L_ij = s · exp(c (cos θ_ij − 1))
norm="row_max":  u = √(c/D) · k,   shift_i = max_{j ≤ i} u_i·u_j
"""

import math

import torch
from torch import Tensor

from ..exponential import FOLDED_SHIFT, ExponentialTiles
from ..keys import inverse_norms
from ..triangular import Schedule, spans


class KeyFeatures:
    """u of n heads with what is needed to take du back to the keys.

    k: [n, S + T, D], overwritten by u; a masked key must be zero. sharpness: a number or [n, 1, 1]. strength: s.
    """

    def __init__(self, k: Tensor, sharpness: float | Tensor, strength: float, row_max: bool) -> None:
        self.sharpness, self.strength, self.row_max = sharpness, strength, row_max
        root = math.sqrt(sharpness) if isinstance(sharpness, float) else sharpness.sqrt()
        self.slope = k.new_full((1, 1, 1), k.shape[-1] ** -0.5) if row_max else inverse_norms(k)
        self.slope = self.slope * root
        self.u = k.mul_(self.slope)

    def tiles(self, elements: int, winners: Tensor | None) -> ExponentialTiles:
        """winners: [n, S + T], where the maximum of each row stands, for row_max."""
        if winners is not None:
            return ExponentialTiles(self.u, self.strength, self._row_maxima(winners), elements)
        if isinstance(self.sharpness, Tensor):
            return ExponentialTiles(self.u, self.strength, self.sharpness, elements)
        if self.sharpness > FOLDED_SHIFT:
            return ExponentialTiles(self.u, self.strength, self.u.new_full((1, 1, 1), self.sharpness), elements)
        return ExponentialTiles(self.u, self.strength * math.exp(-self.sharpness), None, elements)

    def _winning(self, winners: Tensor) -> Tensor:
        return self.u.gather(1, winners[:, :, None].expand_as(self.u))

    def _row_maxima(self, winners: Tensor) -> Tensor:
        return (self.u * self._winning(winners)).sum(-1, keepdim=True)

    def pull_back(self, tiles: ExponentialTiles, winners: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return dk: [n, S + T, D] and dc: [n] (None if `tiles` did not keep row sums)."""
        u, du = self.u, tiles.du
        if winners is not None and tiles.row_sums is not None:
            # shift_i = u_i · u_winner; in S it stands with a minus.
            index = winners[:, :, None].expand_as(u)
            du.sub_(tiles.row_sums * self._winning(winners)).scatter_add_(1, index, -tiles.row_sums * u)
        along = (u * du).sum(-1, keepdim=True)
        dc = None
        if tiles.row_sums is not None:
            c = self.sharpness if isinstance(self.sharpness, float) else self.sharpness[:, 0]
            dc = (along.sum(1) / (2 * c) - (0.0 if self.row_max else tiles.row_sums.sum(1)))[:, 0]
        if not self.row_max:
            # u has a fixed length √c: only the part of du across u reaches the key.
            du.sub_(u * along.div_(self.sharpness))
        return du.mul_(self.slope), dc


def row_winners(u: Tensor, past: int, key_mask: Tensor | None, schedule: Schedule) -> Tensor:
    """argmax_{j ≤ i} u_i·u_j over unmasked j (and i itself), for the rows behind `past`: [n, S + T] (earlier rows: 0).

    u: [n, S + T, D]; key_mask: [n, S + T].
    """
    n, total, _ = u.shape
    index = torch.arange(total, device=u.device)
    best = (u * u).sum(-1)
    winners = index.expand(n, total).clone()
    for rows in spans(past, total, schedule.block):
        for cols in spans(0, rows.stop, max(1, schedule.elements // (rows.stop - rows.start))):
            scores = torch.bmm(u[:, rows], u[:, cols].mT)
            scores.masked_fill_(index[cols] >= index[rows, None], -math.inf)
            if key_mask is not None:
                scores.masked_fill_(~key_mask[:, None, cols], -math.inf)
            value, where = scores.max(-1)
            better = value > best[:, rows]
            best[:, rows] = torch.where(better, value, best[:, rows])
            winners[:, rows] = torch.where(better, where + cols.start, winners[:, rows])
    return winners
