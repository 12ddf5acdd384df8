"""The contestants. Shapes as in the library: q [B, H·G, T, D], k and v [B, H, T, D]; D = E throughout.

A peer is the code that a reader of the paper who knows torch would write.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lucid_attention.ops.lucid.api import lucid_attention
from lucid_attention.ops.lucid.decode import inverse_key_norms, lucid_decode

BLOCK = 128

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Peer(NamedTuple):
    run: Callable[..., Any]
    solves: bool
    """Whether the peer computes LUCID. Otherwise it computes softmax attention."""


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Torch's causal softmax attention, which LUCID replaces."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return lucid_attention(q, k, v)


def dense_solve(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The defining equation: the whole matrix P, one triangular solve, then attention."""
    k_rn = _normalized(k)
    root = math.sqrt(k.shape[-1])
    P = (k_rn @ k_rn.mT / root - root).exp()
    y = torch.linalg.solve_triangular(P, v, upper=False, unitriangular=True)
    # The solution is column-major, which makes torch's attention slow.
    return sdpa(q, k, y.contiguous())


def paper_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The paper's block-wise algorithms 2 to 4, written plainly, then attention."""
    return sdpa(q, k, _PaperBlocks.apply(_normalized(k), v))


def _normalized(k: Tensor) -> Tensor:
    return math.sqrt(k.shape[-1]) * F.normalize(k, dim=-1)


def _blocks(length: int) -> list[slice]:
    return [slice(i, min(i + BLOCK, length)) for i in range(0, length, BLOCK)]


def _tile(k_rn: Tensor, rows: slice, cols: slice) -> Tensor:
    root = math.sqrt(k_rn.shape[-1])
    return torch.exp(k_rn[:, :, rows] @ k_rn[:, :, cols].mT / root - root)


class _PaperBlocks(torch.autograd.Function):
    """Y = P⁻¹ V, all heads in one batch, with the errors of the listings corrected (`docs/paper_notes.md`)."""

    @staticmethod
    def forward(ctx: Any, k_rn: Tensor, v: Tensor) -> Tensor:
        """Algorithm 2."""
        y = torch.zeros_like(v)
        blocks = _blocks(v.shape[2])
        for n, i in enumerate(blocks):
            rhs = v[:, :, i]
            for j in blocks[:n]:
                rhs = rhs - _tile(k_rn, i, j) @ y[:, :, j]
            y[:, :, i] = torch.linalg.solve_triangular(_tile(k_rn, i, i), rhs, upper=False, unitriangular=True)
        ctx.save_for_backward(k_rn, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """Algorithms 3 and 4."""
        k_rn, y = ctx.saved_tensors
        dv = _PaperBlocks._values_gradient(k_rn, grads[0])
        return _PaperBlocks._keys_gradient(k_rn, y, dv), dv

    @staticmethod
    def _values_gradient(k_rn: Tensor, dy: Tensor) -> Tensor:
        dv = torch.zeros_like(dy)
        blocks = _blocks(dy.shape[2])
        for n, i in reversed(list(enumerate(blocks))):
            rhs = dy[:, :, i]
            for j in reversed(blocks[n + 1 :]):
                rhs = rhs - _tile(k_rn, j, i).mT @ dv[:, :, j]
            dv[:, :, i] = torch.linalg.solve_triangular(_tile(k_rn, i, i).mT, rhs, upper=True, unitriangular=True)
        return dv

    @staticmethod
    def _keys_gradient(k_rn: Tensor, y: Tensor, dv: Tensor) -> Tensor:
        dk = torch.zeros_like(k_rn)
        blocks = _blocks(dv.shape[2])
        for n, i in enumerate(blocks):
            tile = _tile(k_rn, i, i)
            lower = (dv[:, :, i] @ y[:, :, i].mT * tile).tril(-1) @ k_rn[:, :, i]
            upper = (y[:, :, i] @ dv[:, :, i].mT * tile.mT).triu(1) @ k_rn[:, :, i]
            for j in blocks[:n]:
                lower = lower + (dv[:, :, i] @ y[:, :, j].mT * _tile(k_rn, i, j)) @ k_rn[:, :, j]
            for j in blocks[n + 1 :]:
                upper = upper + (y[:, :, i] @ dv[:, :, j].mT * _tile(k_rn, j, i).mT) @ k_rn[:, :, j]
            dk[:, :, i] = lower + upper
        return -dk / math.sqrt(k_rn.shape[-1])


SDPA, OURS, DENSE, PAPER = "SDPA", "lucid_attention", "dense solve", "paper's blocks"
ATTENTIONS = {
    SDPA: Peer(sdpa, solves=False),
    OURS: Peer(ours, solves=True),
    DENSE: Peer(dense_solve, solves=True),
    PAPER: Peer(paper_blocks, solves=True),
}


@dataclass
class Cache:
    """A cache of `length` tokens with room for more, and one new token, which goes to position `length`.

    k, values, k_rn: [1, H, room, D]; inverse_norms: [1, H, room]; new_*: [1, *, 1, D]. `values` holds v or y.
    """

    k: Tensor
    values: Tensor
    inverse_norms: Tensor
    k_rn: Tensor
    length: int
    new_q: Tensor
    new_k: Tensor
    new_v: Tensor

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, values: Tensor, spare: int = 64) -> "Cache":
        """The last token of q, k, v is the new one. values: [1, H, T − 1, D], v or y of the earlier tokens.

        spare: the least room behind the new token.
        """
        H, T, D = k.shape[1:]
        room = T + max(spare, T // 8)
        keys, stored, k_rn = (k.new_zeros(1, H, room, D) for _ in range(3))
        inverse_norms = k.new_zeros(1, H, room)
        keys[:, :, : T - 1] = k[:, :, :-1]
        stored[:, :, : T - 1] = values
        k_rn[:, :, : T - 1] = _normalized(k[:, :, :-1])
        inverse_norms[:, :, : T - 1] = inverse_key_norms(k[:, :, :-1])
        new_token = (x[:, :, -1:].clone() for x in (q, k, v))
        return cls(keys, stored, inverse_norms, k_rn, T - 1, *new_token)

    def to(self, dtype: torch.dtype) -> "Cache":
        """A copy in which all but 1/‖k‖ has another dtype."""
        k, values, k_rn, *new = (
            x.to(dtype) for x in (self.k, self.values, self.k_rn, self.new_q, self.new_k, self.new_v)
        )
        return Cache(k, values, self.inverse_norms.clone(), k_rn, self.length, *new)

    def append_key(self) -> Tensor:
        self.k[:, :, self.length] = self.new_k[:, :, 0]
        return self.k[:, :, : self.length + 1]

    def append_value(self, value: Tensor) -> Tensor:
        self.values[:, :, self.length] = value[:, :, 0]
        return self.values[:, :, : self.length + 1]


# A decoder returns the output of the new token and its stored value, v or y.
Decoded = tuple[Tensor, Tensor]


def _products(cache: Cache, k: Tensor, values: Tensor) -> Tensor:
    H, D = k.shape[1], k.shape[3]
    scores = torch.bmm(cache.new_q.view(H, -1, D), k[0].mT).mul_(D**-0.5)
    return torch.bmm(torch.softmax(scores, -1), values[0]).view(1, -1, 1, D)


def decode_products(cache: Cache) -> Decoded:
    """Softmax attention as two matrix products: standard decoding at its fastest on a CPU."""
    k, v = cache.append_key(), cache.append_value(cache.new_v)
    return _products(cache, k, v), cache.new_v


def decode_sdpa(cache: Cache) -> Decoded:
    k, v = cache.append_key(), cache.append_value(cache.new_v)
    return F.scaled_dot_product_attention(cache.new_q, k, v, enable_gqa=True), cache.new_v


def decode_ours(cache: Cache) -> Decoded:
    k = cache.append_key()
    past, norms = cache.values[:, :, : cache.length], cache.inverse_norms[:, :, : cache.length + 1]
    step = lucid_decode(cache.new_q, k, cache.new_v, past, norms, norm_known=False)
    cache.append_value(step.y)
    return step.o, step.y


def decode_two_passes(cache: Cache) -> Decoded:
    """The paper's Algorithm 1: y of the new token, with normalised keys cached as it suggests; then attention."""
    root = math.sqrt(cache.new_k.shape[-1])
    k = cache.append_key()
    new_k_rn = _normalized(cache.new_k)
    row = torch.exp(torch.bmm(new_k_rn[0], cache.k_rn[0, :, : cache.length].mT) / root - root)
    y = cache.new_v - torch.bmm(row, cache.values[0, :, : cache.length])
    cache.k_rn[:, :, cache.length] = new_k_rn[:, :, 0]
    return _products(cache, k, cache.append_value(y)), y


PRODUCTS, DECODE_STEP, TWO_PASSES = "bmm, softmax, bmm", "lucid_decode", "paper's two passes"
DECODERS = {
    PRODUCTS: Peer(decode_products, solves=False),
    SDPA: Peer(decode_sdpa, solves=False),
    DECODE_STEP: Peer(decode_ours, solves=True),
    TWO_PASSES: Peer(decode_two_passes, solves=True),
}
