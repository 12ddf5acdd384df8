"""The case `path`: PaTH and LUCID-PaTH over whole sequences and token by token, next to softmax attention.

q: [1, H·G, N, D]; k, v, w: [1, H, N, D]; beta: [1, H, N].
"""

import functools
import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lucid_attention.ops.lucid.decode import inverse_key_norms
from lucid_attention.ops.path.api import lucid_path_attention, path_attention
from lucid_attention.ops.path.decode import APPLY_EVERY, apply_factors, identity_factors, path_decode

from . import harness
from .decode import DECODERS, TORCH, Cache
from .harness import Run, Shape, Spread, race, ratios
from .records import Case, Point, Result, Settings, Sizes
from .solve import PASSES, SDPA, sdpa

PATH, LUCID_PATH = "PaTH", "LUCID-PaTH"
SHAPES = (Shape(64, 4, 4), Shape(64, 8, 2))
LENGTHS, QUICK_LENGTHS = (1024, 2048, 4096, 8192), (300,)
CONTEXTS, QUICK_CONTEXTS = (4096, 32768), (512,)
# Several leaves of the tree and a part of one.
GATE_LENGTH = 300
# Up to this length one head is checked at the length of the point.
DENSE_LENGTH = 2048
PARTS = (*harness.ATTENTION_PARTS, "the gradient of w", "the gradient of β")
LEAF = 64
# The limit of a pass is this multiple of the counted ratio. The limits of decoding are for the longest context.
SLACK, DECODE_LIMITS = 1.4, {PATH: 1.15, LUCID_PATH: 1.25}
DECODING, MOVE = "one token", "move of all keys"
# Live keys of an average step.
LIVE = APPLY_EVERY // 2

ATTENTIONS: dict[str, Callable[..., Tensor]] = {PATH: path_attention, LUCID_PATH: lucid_path_attention}
REFERENCES: dict[str, Callable[..., Tensor]] = {
    PATH: partial(path_attention, impl="reference"),
    LUCID_PATH: partial(lucid_path_attention, impl="reference"),
}


def inputs(shape: Shape, N: int, far: bool = False) -> list[Tensor]:
    """q, k, v, w, beta and the gradient of the output. Keys are correlated, β is uniform in [0, 2].

    Uniform β forgets a key, and an error in it, after some hundred tokens. With `far`, the heads 0, 2, 4, … forget
    nothing: their β is either 2 (a reflection) or near 0.
    """
    q, k, v, do = harness.inputs(*shape, N)
    random = torch.Generator().manual_seed(N + 1)
    w = F.normalize(torch.randn(k.shape, generator=random), dim=-1)
    beta = 2 * torch.rand(k.shape[:3], generator=random)
    if far:
        reflects = torch.rand(k.shape[:3], generator=random) < 0.5
        beta[:, ::2] = torch.where(reflects, 2.0, 0.01 * beta)[:, ::2]
    return [q, k, v, w, beta, do]


def evaluate(name: str, tensors: Sequence[Tensor], backward: bool) -> tuple[Tensor, ...]:
    """The output and, if `backward`, the gradients of q, k, v, w, β; of q, k, v for torch's attention."""
    if name == SDPA:
        return harness.evaluate(sdpa, [*tensors[:3], tensors[-1]], backward)
    return harness.evaluate(ATTENTIONS[name], tensors, backward)


@functools.cache
def check_truth(shape: Shape, N: int, backward: bool) -> None:
    """Compare both operators and torch's attention with the dense formulas in float64."""
    tensors, where = inputs(shape, N, far=True), f"path, {shape}, N={N}"
    wide = [x.double() for x in tensors]
    truths = {SDPA: harness.evaluate(partial(harness.true_attention, solves=False), [*wide[:3], wide[-1]], backward)}
    truths |= {name: harness.evaluate(reference, wide, backward) for name, reference in REFERENCES.items()}
    harness.check_sharp(where, truths[PATH][0], truths[SDPA][0])
    harness.check_sharp(where, truths[LUCID_PATH][0], truths[PATH][0])
    for name, truth in truths.items():
        harness.check(where, name, evaluate(name, tensors, backward), truth, PARTS)


def flop_ratio(name: str, shape: Shape, N: int, backward: bool) -> float:
    """The cost over that of torch's attention, by the count of operations.

    For a key/value head with G query heads, torch's attention takes 2 G, with its backward 7 G. A tree of L levels over
    leaves of D tokens moves G + 1 sets of rows per level. A share r = D/N of the triangle lies in the leaves.
    """
    G, r, levels = shape.heads / shape.kv_heads, shape.D / N, math.log2(N / LEAF) - 1
    if backward:
        attention, path = 7 * G, 7 * G * (1 - r) + (38 * G + 50 + 4 * (G + 1) * levels) * r
        solve = 7 * (1 - r) + (32 + 4 * levels) * r
    else:
        attention, path = 2 * G, 2 * G * (1 - r) + (10 * G + 12 + (G + 1) * levels) * r
        solve = 2 * (1 - r) + (7 + levels) * r
    return (path + solve if name == LUCID_PATH else path) / attention


def measure(shape: Shape, N: int, *, backward: bool, settings: Settings) -> Result:
    """Race a pass over N tokens."""
    check_truth(shape, GATE_LENGTH, backward)
    check_truth(Shape(shape.D, 1, 1), min(N, DENSE_LENGTH), backward)
    tensors = inputs(shape, N)
    runs: dict[str, Run] = {name: partial(evaluate, name, tensors, backward) for name in (SDPA, *ATTENTIONS)}
    times = race(runs, budget=settings.budget, seed=f"{shape} {N}", least=settings.least)
    counted = {name: flop_ratio(name, shape, N, backward) for name in ATTENTIONS}
    return Result(
        {name: Spread.of(times[name]) for name in runs},
        {f"{name} / {SDPA}": ratios(times[name], times[SDPA]) for name in ATTENTIONS},
        {f"{name} / {SDPA}": ratio for name, ratio in counted.items()},
        {f"{name} / {SDPA}": SLACK * ratio for name, ratio in counted.items()},
    )


def path_step(cache: Cache, w: Tensor, beta: Tensor, product: Tensor, lucid: bool) -> Tensor:
    """One token after LIVE keys that every token moves, with all writes into the cache. Returns its output."""
    n, pending = cache.length, cache.length - LIVE
    k, norms = cache.append_key(), None
    if lucid:
        cache.inverse_norms[:, :, n] = inverse_key_norms(cache.new_k)[:, :, 0]
        norms = cache.inverse_norms[:, :, : n + 1]
    past = cache.values[:, :, :n]
    step = path_decode(cache.new_q, k, cache.new_v, w, beta, past, product, pending, inverse_norms=norms)
    cache.k[:, :, pending : n + 1] = step.live
    cache.append_value(step.y)
    return step.o


def check_step(shape: Shape, context: int, cache: Cache, w: Tensor, beta: Tensor) -> None:
    """Compare one step with the dense formula in float64, which gets the cache as its past."""
    new = [x.double() for x in (cache.new_q, cache.new_k, cache.new_v, w, beta)]
    keys, values, norms = (x[:, :, :context].clone() for x in (cache.k, cache.values, cache.inverse_norms))
    pasts = {PATH: (keys.double(), values.double()), LUCID_PATH: (keys.double(), values.double(), norms.double())}
    for name, reference in REFERENCES.items():
        expected = reference(*new, past=pasts[name])
        o = path_step(cache, w, beta, identity_factors(cache.k), name == LUCID_PATH)
        cache.k[:, :, :context] = keys
        harness.check(f"path, {shape}, context {context}", name, (o,), (expected,))


@torch.no_grad()
def measure_decoding(shape: Shape, context: int, settings: Settings) -> Result:
    """Race one token after `context` tokens. A token's time includes its share of the move of all cached keys."""
    q, k, v, w, beta, _ = inputs(shape, context + 1)
    cache = Cache.of(q, k, v, v[:, :, :-1])
    # A reflection keeps the live keys from shrinking to zero.
    w, beta, product = w[:, :, -1:].clone(), torch.full_like(beta[:, :, -1:], 2.0), identity_factors(cache.k)
    del q, k, v
    check_step(shape, context, cache, w, beta)
    old_keys = cache.k[:, :, :context]
    runs: dict[str, Run] = {name: partial(DECODERS[name], cache) for name in TORCH}
    runs |= {name: partial(path_step, cache, w, beta, product, name == LUCID_PATH) for name in ATTENTIONS}
    runs[MOVE] = lambda: apply_factors(old_keys, product, out=old_keys)
    times = race(runs, budget=settings.budget, seed=f"{shape} {context}", least=settings.least)
    for name in ATTENTIONS:
        times[name] = [step + move / APPLY_EVERY for step, move in zip(times[name], times[MOVE], strict=True)]
    seconds = {name: Spread.of(times[name]) for name in times}
    best = min(TORCH, key=lambda name: seconds[name].median)
    label = "{} / best of torch".format
    limits = {label(name): limit for name, limit in DECODE_LIMITS.items()} if context == CONTEXTS[-1] else {}
    return Result(seconds, {label(name): ratios(times[name], times[best]) for name in ATTENTIONS}, limits=limits)


def _points(settings: Settings) -> list[Point]:
    points = []
    for threads in settings.threads:
        for shape in SHAPES:
            sizes: Sizes = {"threads": threads, "heads": shape.label}
            for backward, what in PASSES.items():
                for N in QUICK_LENGTHS if settings.quick else LENGTHS:
                    run = partial(measure, shape, N, backward=backward, settings=settings)
                    points.append(Point({**sizes, "pass": what, "N": N}, run))
            for context in QUICK_CONTEXTS if settings.quick else CONTEXTS:
                run = partial(measure_decoding, shape, context, settings)
                points.append(Point({**sizes, "pass": DECODING, "N": context}, run))
    return points


CASE = Case(
    "path",
    "PaTH and LUCID-PaTH in float32, D = 64, w of length 1 and β uniform in [0, 2], against SDPA. Counted: operations "
    "of the tree, its re-basing and leaves included. One token after a cache of N, with all writes and a share of the "
    f"move of all keys every {APPLY_EVERY} tokens, against the faster of SDPA and two matrix products. Limits: {SLACK} "
    f"× counted; {DECODE_LIMITS[PATH]} and {DECODE_LIMITS[LUCID_PATH]} for a token at {CONTEXTS[-1]}.",
    _points,
)
