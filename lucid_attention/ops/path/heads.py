"""Some heads of a `PathSystem` as the passes over a tree take them, and what these passes share."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from .system import PathSystem

Group = tuple[slice, slice]


@dataclass(frozen=True)
class PathHeads:
    """n heads of a `PathSystem` in working precision; as gradients, each in the place of its input.

    q: [n, G, T, D], scaled, None without a read-out; k, w: [n, T, D]; v: [n, T, E]; beta: [n, T, 1]; of a past k_past:
    [n, S, D], y_past: [n, S, E], inverse_norms: [n, S, 1]; sharpness: None without a solve, a number, or [n, 1, 1].
    """

    q: Tensor | None
    k: Tensor
    v: Tensor
    w: Tensor
    beta: Tensor
    k_past: Tensor | None
    y_past: Tensor | None
    inverse_norms: Tensor | None
    sharpness: float | Tensor | None

    @property
    def past(self) -> tuple[Tensor, Tensor] | None:
        """k_past and y_past."""
        return None if self.k_past is None or self.y_past is None else (self.k_past, self.y_past)


def heads_of(system: PathSystem, group: Group, *, reads: bool) -> PathHeads:
    rows = None
    if system.q is not None and reads:
        rows = flat(by_kv_head(system.q, system), group, system) * system.scale
    c: float | Tensor | None = None
    if system.solves:
        c = system.sharpness
        c = flat(c, group, system)[:, None, None] if isinstance(c, Tensor) else c
    k_past, y_past, inverse = (
        None if x is None else flat(x, group, system) for x in (system.k_past, system.y_past, system.inverse_norms)
    )
    k, v, w, beta = (flat(x, group, system) for x in (system.k, system.v, system.w, system.beta))
    inverse = None if inverse is None else inverse[..., None]
    return PathHeads(rows, k, v, w, beta[..., None], k_past, y_past, inverse, c)


class Outputs(NamedTuple):
    """o: [n, G, T, E] and lse: [n, G, T] with a read-out; y: [n, T, E] with a solve."""

    o: Tensor | None
    lse: Tensor | None
    y: Tensor | None


def flat(x: Tensor, group: Group, system: PathSystem) -> Tensor:
    """[B, H, *] -> [n, *] in working precision."""
    return x[group].flatten(0, 1).to(system.dtype)


def by_kv_head(x: Tensor, system: PathSystem) -> Tensor:
    """[B, H·G, *] -> [B, H, G, *]."""
    return x.unflatten(1, (system.k.shape[1], -1))


def store(out: Tensor, group: Group, value: Tensor) -> None:
    target = out[group]
    target.copy_(value.view(target.shape))


def per_leaf(sharpness: float | Tensor) -> float | Tensor:
    return sharpness[..., None] if isinstance(sharpness, Tensor) else sharpness


def through_the_norm(
    c: float | Tensor, k: Tensor, inverse: Tensor, drows: Tensor, dinverse: Tensor, row_sums: Tensor | None, dk: Tensor
) -> Tensor | None:
    """Add to dk what comes through the rows c k/‖k‖ and the factors 1/‖k‖ of a solve; return the gradient of c.

    c: as `PathHeads.sharpness`; k, drows, dk: [n, leaves, C, D]; inverse, dinverse: [n, leaves, C, 1], the latter
    overwritten; row_sums: [n, *, *], the sums of the gradients of all scores of a row, None for a c without gradient.
    """
    c = per_leaf(c)
    along = (drows * k).sum(-1, keepdim=True)
    dinverse = dinverse.add_(along * c)
    # 1/‖k‖ falls by k/‖k‖³; in this order nothing overflows for very short keys.
    dk.add_(drows * (inverse * c)).sub_(k * inverse * (dinverse * inverse * inverse))
    if row_sums is None:
        return None
    return (along * inverse).sum((1, 2, 3)) - row_sums.sum((1, 2))
