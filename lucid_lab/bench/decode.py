"""The case `decode`: one new token against a cache, LUCID next to three standard decoders."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lucid_attention.ops.lucid.decode import inverse_key_norms, lucid_decode
from lucid_attention.ops.softmax.attention import softmax_attention

from . import harness
from .harness import Run, Shape, Spread, race, ratios
from .records import Case, Point, Result, Settings
from .solve import LUCID, SDPA, SHAPES

PRODUCTS, SOFTMAX_STEP = "two products", "softmax step"
# Standard decoders: torch's, and our own compiled step without the row of P.
TORCH, STANDARD = (SDPA, PRODUCTS), (SDPA, PRODUCTS, SOFTMAX_STEP)
TO_TORCH, TO_STEP, TO_SDPA = f"{LUCID} / best of torch", f"{LUCID} / {SOFTMAX_STEP}", f"{LUCID} / {SDPA}"
CONTEXTS, QUICK_CONTEXTS = (4096, 32768), (512, 2048)
# By context, against the best of torch; against the softmax step at any context.
LIMITS, STEP_LIMIT = {4096: 1.15, 32768: 1.05}, 1.35
GATE_CONTEXT = 150


@dataclass
class Cache:
    """A cache of `length` tokens with room for more, and one new token, which goes to position `length`.

    k, values: [1, H, room, D]; inverse_norms: [1, H, room]; new_*: [1, *, 1, D]. `values` holds v or y.
    """

    k: Tensor
    values: Tensor
    inverse_norms: Tensor
    length: int
    new_q: Tensor
    new_k: Tensor
    new_v: Tensor

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, values: Tensor, spare: int = 64) -> "Cache":
        """The last token of q, k, v is the new one. values: [1, H, T − 1, D], v or y of the earlier tokens.

        spare: the least room after the new token.
        """
        H, T, D = k.shape[1:]
        room = T + max(spare, T // 8)
        keys, stored, inverse_norms = k.new_zeros(1, H, room, D), k.new_zeros(1, H, room, D), k.new_zeros(1, H, room)
        keys[:, :, : T - 1], stored[:, :, : T - 1] = k[:, :, :-1], values
        inverse_norms[:, :, : T - 1] = inverse_key_norms(k[:, :, :-1])
        return cls(keys, stored, inverse_norms, T - 1, *(x[:, :, -1:].clone() for x in (q, k, v)))

    def append_key(self) -> Tensor:
        self.k[:, :, self.length] = self.new_k[:, :, 0]
        return self.k[:, :, : self.length + 1]

    def append_value(self, value: Tensor) -> Tensor:
        self.values[:, :, self.length] = value[:, :, 0]
        return self.values[:, :, : self.length + 1]


# The output of the new token, and its stored value, v or y.
Decoded = tuple[Tensor, Tensor]


def by_sdpa(cache: Cache) -> Decoded:
    k, v = cache.append_key(), cache.append_value(cache.new_v)
    return F.scaled_dot_product_attention(cache.new_q, k, v, enable_gqa=True), cache.new_v


def by_products(cache: Cache) -> Decoded:
    """Softmax attention as two matrix products."""
    k, v = cache.append_key(), cache.append_value(cache.new_v)
    H, D = k.shape[1], k.shape[3]
    scores = torch.bmm(cache.new_q.view(H, -1, D), k[0].mT).mul_(D**-0.5)
    return torch.bmm(torch.softmax(scores, -1), v[0]).view(1, -1, 1, D), cache.new_v


def by_softmax_step(cache: Cache) -> Decoded:
    """Our own step of softmax attention, compiled if Numba is installed."""
    return softmax_attention(cache.new_q, cache.append_key(), cache.append_value(cache.new_v)), cache.new_v


def by_lucid(cache: Cache) -> Decoded:
    k = cache.append_key()
    past, norms = cache.values[:, :, : cache.length], cache.inverse_norms[:, :, : cache.length + 1]
    step = lucid_decode(cache.new_q, k, cache.new_v, past, norms, norm_known=False)
    cache.append_value(step.y)
    return step.o, step.y


DECODERS: dict[str, Callable[[Cache], Decoded]] = {
    SDPA: by_sdpa,
    PRODUCTS: by_products,
    SOFTMAX_STEP: by_softmax_step,
    LUCID: by_lucid,
}


@cache
def check_truth(shape: Shape) -> None:
    """Compare every decoder with the definition over the whole sequence, in float64."""
    q, k, v, _ = harness.inputs(*shape, GATE_CONTEXT + 1)
    y, where = harness.true_values(k, v), f"decode, {shape}, context {GATE_CONTEXT}"
    truths = [
        (harness.true_attention(q, k, v, solves)[:, :, -1:], (v, y)[solves][:, :, -1:]) for solves in (False, True)
    ]
    harness.check_sharp(where, truths[1][0], truths[0][0])
    for name, run in DECODERS.items():
        solves = name == LUCID
        cache = Cache.of(q, k, v, (v, y.float())[solves][:, :, :-1])
        harness.check(where, name, run(cache), truths[solves], harness.DECODER_PARTS)


@torch.no_grad()
def measure(shape: Shape, context: int, settings: Settings) -> Result:
    """Race one step of all decoders after the gate; see `fastest_standard` for the decisive ratio."""
    check_truth(shape)
    q, k, v, _ = harness.inputs(*shape, context + 1)
    # v stands for y in the cache: the time of a step does not depend on the values, and a real solve would take longer
    # than the benchmark.
    filled = Cache.of(q, k, v, v[:, :, :-1])
    del q, k, v
    expected = by_sdpa(filled)
    for name in (PRODUCTS, SOFTMAX_STEP):
        where = f"decode, {shape}, context {context}"
        harness.check(where, name, DECODERS[name](filled), expected, harness.DECODER_PARTS, repr(SDPA))
    runs: dict[str, Run] = {name: partial(run, filled) for name, run in DECODERS.items()}
    times = race(runs, budget=settings.budget, seed=f"{shape} {context}", least=settings.least)
    seconds = {name: Spread.of(times[name]) for name in times}
    best = min(TORCH, key=lambda name: seconds[name].median)
    peers = {TO_TORCH: best, TO_STEP: SOFTMAX_STEP, TO_SDPA: SDPA}
    measured = {name: ratios(times[LUCID], times[peer]) for name, peer in peers.items()}
    # LUCID reads K and Y as softmax reads K and V, and one scalar per key.
    counted = 1 + 1 / (2 * shape.D)
    limits = {TO_STEP: STEP_LIMIT, **({TO_TORCH: LIMITS[context]} if context in LIMITS else {})}
    if shape.heads > shape.kv_heads:
        limits[TO_SDPA] = 1.0
    return Result(seconds, measured, dict.fromkeys(peers, counted), limits)


def fastest_standard(result: Result) -> tuple[str, Spread]:
    """The fastest standard decoder of a result of `measure`, and the ratio of LUCID's step to it."""
    name = min(STANDARD, key=lambda name: result.seconds[name].median)
    return name, result.ratios[TO_STEP if name == SOFTMAX_STEP else TO_TORCH]


def _points(settings: Settings) -> list[Point]:
    return [
        Point(
            {"threads": threads, "D": shape.D, "heads": shape.label, "context": context},
            partial(measure, shape, context, settings),
        )
        for threads in settings.threads
        for shape in SHAPES
        for context in (QUICK_CONTEXTS if settings.quick else CONTEXTS)
    ]


CASE = Case(
    "decode",
    "One step of decoding in float32, batch 1: append the new token to a preallocated cache and read it. Best of "
    "torch: the faster of SDPA and two matrix products around a softmax. Softmax step: our own step for plain softmax "
    "attention, which shares the code of LUCID's; the fastest standard decoder is the fastest of the three. Counted: "
    f"elements read. Limits: {LIMITS[4096]} at 4096 and {LIMITS[32768]} at 32768 tokens against torch, {STEP_LIMIT} "
    "against our softmax step, the time of SDPA for grouped heads.",
    _points,
)
