"""The inputs of one layer of attention, its matrix P, and its weights for chosen rows, in float64.

    A = softmax(q kᵀ · scale + causal),     W = A P⁻¹:  the weights of the values themselves
    P = I + s · diag(β) stril exp(…)

Shapes: B batch, H key/value heads, G query heads per key/value head, T positions of the input, N positions without
padding, n chosen rows or the length of a prefix, D key size, E value size. P is computed in blocks of rows: its methods
work with the leading n × n block.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from lucid_attention.ops.keys import KeyMap, inverse_norms, map_keys
from lucid_attention.ops.path.decode import keys_at_end
from lucid_attention.ops.path.reference import path_scores

# Rows in a block of P. Iterations use the blocks in every step: those of the first KEPT rows stay in memory, 290 MB.
BLOCK, KEPT = 512, 8192
# Weights in memory at a time, over all heads of a group: 128 MB.
ELEMENTS = 1 << 24
# From (start, stop) to the exponents of P in these rows, for all columns before stop: [stop − start, stop].
Exponents = Callable[[int, int], Tensor]


class KeyMatrix:
    """P of one head.

    exponents: of the entries below the diagonal. size: N. strength: s. beta: [N] or None.
    """

    def __init__(self, exponents: Exponents, size: int, strength: float = 1.0, beta: Tensor | None = None) -> None:
        self.size, self.strength, self.beta = size, strength, beta
        self._exponents = exponents
        self._kept: dict[int, Tensor] = {}

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows start to stop of P, up to the last column that is not zero: [stop − start, stop]."""
        P = self.strength * self._exponents(start, stop).exp().tril(start - 1)
        if self.beta is not None:
            P = self.beta[start:stop, None] * P
        # The diagonal is one by definition: set it, so that it is not rounded.
        P[:, start:].diagonal().fill_(1)
        return P

    def _blocks(self, n: int, *, backwards: bool = False) -> Iterator[tuple[int, int, Tensor]]:
        """(start, stop, rows) of the leading n × n block."""
        starts = range(0, n, BLOCK)
        for start in reversed(starts) if backwards else starts:
            stop = min(start + BLOCK, self.size)
            rows = self._kept.get(start)
            if rows is None:
                rows = self.rows(start, stop)
                if stop <= KEPT:
                    self._kept[start] = rows
            end = min(stop, n)
            yield start, end, rows[: end - start, :end]

    def dense(self, n: int | None = None) -> Tensor:
        """The leading block, [n, n]; all of P for None."""
        n = self.size if n is None else n
        blocks = list(self._blocks(n))
        return torch.cat([torch.nn.functional.pad(rows, (0, n - rows.shape[1])) for _, _, rows in blocks])

    def gram(self, x: Tensor) -> Tensor:
        """Pᵀ P x, for x: [n, m], with one pass over the rows of P."""
        out = torch.zeros_like(x)
        for _, stop, rows in self._blocks(x.shape[0]):
            out[:stop] += rows.mT @ (rows @ x[:stop])
        return out

    def solve(self, x: Tensor) -> Tensor:
        """P⁻¹ x, for x: [n, m], by forward substitution."""
        y = torch.zeros_like(x)
        for start, stop, rows in self._blocks(x.shape[0]):
            rest = x[start:stop] - rows[:, :start] @ y[:start]
            y[start:stop] = torch.linalg.solve_triangular(rows[:, start:], rest, upper=False, unitriangular=True)
        return y

    def solve_transposed(self, x: Tensor) -> Tensor:
        """P⁻ᵀ x, for x: [n, m], by backward substitution."""
        y = x.clone()
        for start, stop, rows in self._blocks(x.shape[0], backwards=True):
            y[start:stop] = torch.linalg.solve_triangular(
                rows[:, start:].mT, y[start:stop], upper=True, unitriangular=True
            )
            y[:start] -= rows[:, :start].mT @ y[start:stop]
        return y


class LikeKeys:
    """Exponents of LUCID: c (cos θ_ij − 1); for norm="row_max" c/D · k_i·k_j minus its maximum over j ≤ i.

    k: [N, D]; norm: as in `lucid_attention`; sharpness: c, None for √D.
    """

    def __init__(self, k: Tensor, norm: str = "key", sharpness: float | None = None) -> None:
        self._c = math.sqrt(k.shape[-1]) if sharpness is None else float(sharpness)
        self._raw = norm == "row_max"
        self._k = k if self._raw else k * inverse_norms(k)

    def __call__(self, start: int, stop: int) -> Tensor:
        products = self._k[start:stop] @ self._k[:stop].mT
        if not self._raw:
            return self._c * (products - 1)
        scores = self._c / self._k.shape[-1] * products
        later = torch.ones_like(scores, dtype=torch.bool).triu(start + 1)
        # Entries above the diagonal are not used: mask them, so that they cannot overflow.
        scores = scores.masked_fill(later, -math.inf)
        return scores - scores.amax(-1, keepdim=True)


class LikePathKeys:
    """Exponents of LUCID-PaTH: c (k̂_jᵀ (∏ H_s) k̂_i − 1). k, w: [N, D]; beta: [N], of the Householder factors."""

    def __init__(self, k: Tensor, w: Tensor, beta: Tensor, sharpness: float | None = None) -> None:
        self._c = math.sqrt(k.shape[-1]) if sharpness is None else float(sharpness)
        self._k, self._w, self._beta = k * inverse_norms(k), w, beta

    def __call__(self, start: int, stop: int) -> Tensor:
        scores = scores_of_path(self._k[None, start:stop], self._k, self._w, self._beta, start, stop)
        return self._c * (scores[0] - 1)


def scores_of_path(q: Tensor, k: Tensor, w: Tensor, beta: Tensor, start: int, stop: int) -> Tensor:
    """q_iᵀ H_i … H_{j+1} k_j for queries start to stop: [G, stop − start, stop].

    q: [G, stop − start, D], of these positions; k, w: [N, D]; beta: [N]. Only this block of scores is in memory.
    """
    before, block = slice(0, start), slice(start, stop)
    past = keys_at_end(k[None, None, before], w[None, None, before], beta[None, None, before]) if start else None
    new = k[None, None, block], w[None, None, block], beta[None, None, block]
    scores, _ = path_scores(q[None], *new, past, None, None)
    return scores[0]


@dataclass(frozen=True)
class Layer:
    """The arguments of one layer's attention, after rotary embedding and norms, as the softmax sees them.

    index: of the layer among those that attend. attention: its name in `ATTENTIONS`, or that of its class.
    q: [B, H·G, T, D]; k: [B, H, T, D]; v: [B, H, T, E]; key_mask: [B, T] bool or None; scale: of the scores.
    preconditioned: whether the layer reads P⁻¹v. If not, norm, sharpness and strength define the P it would have.
    norm, sharpness, strength, key_map, beta: of P, as in `lucid_attention`. sharpness: a number, [H], or None for √D.
    strength: a number or [H].
    window: positions that a token sees, itself included, or None. softcap: of the scores, or None.
    factors: w: [B, H, T, D] and β: [B, H, T] of PaTH, or None.
    lam: λ of differential attention (heads in pairs of neighbours, v: [B, H/2, T, E]), or None.
    unlike: why analysis cannot compute the weights, or None.
    """

    index: int
    attention: str
    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None = None
    scale: float | None = None
    preconditioned: bool = False
    norm: str = "key"
    sharpness: float | Tensor | None = None
    strength: float | Tensor = 1.0
    key_map: KeyMap | None = None
    beta: Tensor | None = None
    window: int | None = None
    softcap: float | None = None
    factors: tuple[Tensor, Tensor] | None = None
    lam: float | None = None
    unlike: str | None = None

    @property
    def query_heads(self) -> int:
        """Heads with weights of their own: in differential attention half of the heads of q."""
        return self.q.shape[1] // (1 if self.lam is None else 2)

    def heads(self, heads: Sequence[int] | None = None) -> Iterator["Head"]:
        """The heads of the layer, one key/value head of one row at a time. heads: query heads, None for all."""
        query_heads = range(self.query_heads) if heads is None else heads
        for head in query_heads:
            if not 0 <= head < self.query_heads:
                last = self.query_heads - 1
                raise ValueError(f"heads must be query heads of layer {self.index}, 0 to {last}, got {head}")
        groups = self.k.shape[1] // (1 if self.lam is None else 2)
        G = self.query_heads // groups
        chosen = [(row, group) for row in range(self.q.shape[0]) for group in range(groups)]
        # The bar appears on a terminal, if the layer takes more than five seconds.
        for row, group in tqdm(chosen, f"layer {self.index}, heads", leave=False, delay=5, disable=None):
            if members := [head for head in query_heads if head // G == group]:
                yield self._head(row, group, members)

    def _head(self, row: int, group: int, members: list[int]) -> "Head":
        if self.lam is None:
            return self._part(row, group, members, members)
        first, second = (
            self._part(row, 2 * group + i, [2 * head + i for head in members], members, value=group) for i in (0, 1)
        )
        return Difference(**{**vars(first), "second": second, "lam": self.lam, "head": group})

    def _part(self, row: int, head: int, queries: list[int], names: list[int], value: int | None = None) -> "Head":
        """One head of k with some heads of q, without padding, in float64."""
        T = self.q.shape[2]
        token_positions = (
            torch.arange(T, device=self.q.device) if self.key_mask is None else self.key_mask[row].nonzero()[:, 0]
        )
        q, k = _wide(self.q[row, queries][:, token_positions]), _wide(self.k[row, head, token_positions])
        v = _wide(self.v[row, head if value is None else value, token_positions])
        c, s = (x[head].item() if isinstance(x, Tensor) else x for x in (self.sharpness, self.strength))
        assert s is not None
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        beta = None if self.beta is None else _wide(self.beta[row, head, token_positions])
        shared: dict[str, Any] = {"layer": self.index, "row": row, "head": head, "query_heads": names, "q": q, "k": k}
        shared |= {"v": v, "scale": scale, "positions": token_positions.cpu(), "preconditioned": self.preconditioned}
        shared |= {"window": self.window, "softcap": self.softcap, "unlike": self.unlike}
        if self.factors is not None:
            w, b = (_wide(factor[row, head, token_positions]) for factor in self.factors)
            return PathHead(P=KeyMatrix(LikePathKeys(k, w, b, c), len(k), s), w=w, factor=b, **shared)
        u = k
        if self.key_map is not None:
            u = map_keys(k[None, None], KeyMap(*(None if x is None else x[head, None] for x in self.key_map)))[0, 0]
        return Head(P=KeyMatrix(LikeKeys(u, self.norm, c), len(k), s, beta), **shared)


def _wide(x: Tensor) -> Tensor:
    """x in float64, on the CPU if its device has no float64."""
    return (x.cpu() if x.device.type == "mps" else x).to(torch.float64)


@dataclass(frozen=True)
class Head:
    """One key/value head of one row, without padding: a masked key is neither in P nor in the softmax.

    head: the key/value head; query_heads: the chosen query heads of its group, G.
    positions: [N], of its tokens in the input. q: [G, N, D]; k: [N, D]; v: [N, E]; P: of its keys.
    """

    layer: int
    row: int
    head: int
    query_heads: list[int]
    positions: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    P: KeyMatrix
    scale: float
    preconditioned: bool
    window: int | None = None
    softcap: float | None = None
    unlike: str | None = None

    def rows_of(self, positions: Sequence[int]) -> Tensor:
        """The rows of the queries at these positions of the input: [n]."""
        row_of = {position: row for row, position in enumerate(self.positions.tolist())}
        for position in positions:
            if position not in row_of:
                raise ValueError(
                    f"a query must be at a token of row {self.row}, at {self.positions[0]} to {self.positions[-1]} "
                    f"without padding, got position {position}"
                )
        return torch.tensor([row_of[position] for position in positions], dtype=torch.long)

    def products(self, rows: Tensor) -> Tensor:
        """q_i·k_j for every key, before scaling: [G, n, N]."""
        return self.q[:, rows.to(self.q.device)] @ self.k.mT

    def visible(self, rows: Tensor) -> Tensor:
        """[n, N]: which keys each query sees."""
        query, key = rows[:, None], torch.arange(len(self.positions))
        visible_keys = key <= query
        if self.window is not None:
            visible_keys = visible_keys & (self.positions > self.positions[query] - self.window)
        return visible_keys.to(self.q.device)

    def scores(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Scores [G, n, N], and their derivative with respect to q_i·k_j: [G, n, N]."""
        if self.unlike is not None:
            raise ValueError(f"layer {self.layer} has no weights to show: {self.unlike}")
        scores = self.scale * self.products(rows)
        if self.softcap is None:
            return scores, torch.full_like(scores, self.scale)
        capped = torch.tanh(scores / self.softcap)
        return self.softcap * capped, self.scale * (1 - capped**2)

    def weights(self, rows: Tensor) -> Tensor:
        """A of these queries: [G, n, N]."""
        return self.scores(rows)[0].masked_fill(~self.visible(rows), -math.inf).softmax(-1)

    def effective(self, rows: Tensor) -> Tensor:
        """W = A P⁻¹ of these queries, or A if the layer does not precondition its values: [G, n, N]."""
        return self.joined(self.softmaxes(rows))

    def softmaxes(self, rows: Tensor) -> list[Tensor]:
        """A, and the second softmax of differential attention: [G, n, N] each."""
        return [self.weights(rows)]

    def joined(self, softmaxes: list[Tensor]) -> Tensor:
        """W from the result of `softmaxes`, or from means over its rows: [G, n, N]."""
        return self.through(softmaxes[0]) if self.preconditioned else softmaxes[0]

    def row_blocks(self, rows: Tensor, per_weight: int = 1) -> Iterator[Tensor]:
        """The rows in blocks of at most `ELEMENTS` weights, and at least one row."""
        per_row = self.q.shape[0] * len(self.positions) * per_weight
        yield from rows.split(max(1, ELEMENTS // per_row))

    def through(self, a: Tensor) -> Tensor:
        """a P⁻¹, for a: [.., N]; with step sizes a P⁻¹ diag(β)."""
        solved = self.P.solve_transposed(a.flatten(0, -2).mT).mT.reshape(a.shape)
        return solved if self.P.beta is None else solved * self.P.beta


@dataclass(frozen=True)
class PathHead(Head):
    """A head of PaTH: the Householder factors of later positions move a key. w: [N, D]; factor: β, [N]."""

    w: Tensor = field(default_factory=lambda: torch.empty(0))
    factor: Tensor = field(default_factory=lambda: torch.empty(0))

    def products(self, rows: Tensor) -> Tensor:
        out = self.q.new_zeros(self.q.shape[0], len(rows), len(self.positions))
        order = rows.argsort()
        at = 0
        while at < len(rows):
            start = int(rows[order[at]])
            members = order[at:][rows[order[at:]] < start + BLOCK]
            stop = int(rows[members[-1]]) + 1
            scores = scores_of_path(self.q[:, start:stop], self.k, self.w, self.factor, start, stop)
            out[:, members, :stop] = scores[:, rows[members] - start]
            at += len(members)
        return out


@dataclass(frozen=True)
class Difference(Head):
    """A head of differential attention: A = A₁, W = A₁ − λ A₂, and P of the keys of the first softmax."""

    second: Head | None = None
    lam: float = 0.0

    def softmaxes(self, rows: Tensor) -> list[Tensor]:
        assert self.second is not None
        return [self.weights(rows), self.second.weights(rows)]

    def joined(self, softmaxes: list[Tensor]) -> Tensor:
        return softmaxes[0] - self.lam * softmaxes[1]
