"""The case `blocks`: tokens that see each other. Whole sequences next to torch's bidirectional attention; blocks of 32
tokens next to causal LUCID. `python -m lucid_lab.bench.blocks [CHECKPOINT TEXT]` prints the steps of conjugate
gradients for made-up keys, or for those of a checkpoint that reads a file."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median_low
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from lucid_attention.ops import blocks
from lucid_attention.ops.lucid.api import lucid_attention, precondition

from . import gate
from .gate import Shape
from .harness import Run, Spread, race, ratios
from .records import Case, Point, Result, Settings, Sizes

_PRODUCT = blocks.DiagonalBlocks._product
SDPA, CHOLESKY, CG, CAUSAL, OF_32 = "SDPA", "LUCID, Cholesky", "LUCID, CG", "causal LUCID", "LUCID, blocks of 32"
EIGHT, ONE = Shape(64, 8, 8), Shape(64, 1, 1)
# Lengths of one block by the heads; conjugate gradients take part where a step is not too short, or nothing else can.
LENGTHS = {EIGHT: (256, 512, 1024), ONE: (2048, 4096, 8192, 16384)}
LIMITS = {False: 2.2, True: 2.5}
PASSES = {False: "forward", True: "forward+backward"}


@contextmanager
def by_gradients() -> Iterator[None]:
    """Solve every block beyond a tile by conjugate gradients."""
    with patch.object(blocks, "LONGEST_FACTOR", blocks.SMALL):
        yield


def bidirectional(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Torch's attention without a mask."""
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def one_block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """LUCID of an encoder."""
    return lucid_attention(q, k, v, block=None)


def one_block_by_gradients(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same, by conjugate gradients."""
    with by_gradients():
        return lucid_attention(q, k, v, block=None)


def measure(shape: Shape, N: int, backward: bool, settings: Settings) -> Result:
    """One block of N tokens, after a comparison with the definition in float64."""
    contestants = {SDPA: bidirectional, CHOLESKY: one_block, CG: one_block_by_gradients}
    if blocks.LONGEST_FACTOR < N:
        del contestants[CHOLESKY]
    small = gate.inputs(*shape, min(N, 512))
    truth = gate.evaluate(partial(lucid_attention, block=None, impl="reference"), [x.double() for x in small], True)
    for name, run in contestants.items():
        if name != SDPA:
            gate.check(f"{shape}, N={N}", name, gate.evaluate(run, small, True), truth)
    limits = {f"{CHOLESKY} / {SDPA}": LIMITS[backward]} if (shape, N) == (EIGHT, 512) else {}
    return _race(contestants, shape, N, backward, settings, limits)


def measure_small(N: int, backward: bool, settings: Settings) -> Result:
    """Blocks of 32 tokens against causal LUCID."""
    contestants = {CAUSAL: lucid_attention, OF_32: partial(lucid_attention, block=32)}
    return _race(contestants, EIGHT, N, backward, settings, {f"{OF_32} / {CAUSAL}": 1.1})


def _race(
    contestants: dict[str, Any], shape: Shape, N: int, backward: bool, settings: Settings, limits: dict[str, float]
) -> Result:
    """The first contestant is the peer of all others."""
    tensors = gate.inputs(*shape, N)
    runs: dict[str, Run] = {name: partial(gate.evaluate, run, tensors, backward) for name, run in contestants.items()}
    times = race(runs, budget=settings.budget, seed=f"{shape} {N}", brief={CG}, least=settings.least)
    peer, *others = times
    return Result(
        seconds={name: Spread.of(seconds) for name, seconds in times.items()},
        ratios={f"{name} / {peer}": ratios(times[name], times[peer]) for name in others},
        limits=limits,
    )


def _points(settings: Settings) -> list[Point]:
    points = []
    for threads, backward in product(settings.threads, PASSES):
        for shape, lengths in LENGTHS.items():
            for N in lengths[:1] if settings.quick else lengths:
                if not (backward and N > 1024):
                    sizes: Sizes = {"threads": threads, "block": "all", "heads": shape.label}
                    sizes |= {"pass": PASSES[backward], "N": N}
                    points.append(Point(sizes, partial(measure, shape, N, backward, settings)))
        for N in (300,) if settings.quick else (1024, 4096):
            sizes = {"threads": threads, "block": "32", "heads": EIGHT.label, "pass": PASSES[backward], "N": N}
            points.append(Point(sizes, partial(measure_small, N, backward, settings)))
    return points


def steps(k: Tensor, v: Tensor, c: float) -> int:
    """Products with P that conjugate gradients need at sharpness c. k, v: [N, D], of one head."""
    with (
        by_gradients(),
        patch.object(blocks.DiagonalBlocks, "_product", autospec=True, side_effect=_PRODUCT) as counted,
    ):
        precondition(k[None, None], v[None, None], sharpness=c, block=None)
    return counted.call_count


@torch.no_grad()
def real_heads(folder: str, text: str, N: int) -> list[tuple[Tensor, Tensor]]:
    """Keys and values, [N, D], as the attention of a checkpoint sees them: the first head of about six layers."""
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModel, AutoTokenizer
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    found = []

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
        found.append((key[0, 0], value[0, 0]))
        return sdpa_attention_forward(module, query, key, value, *args, **options)

    AttentionInterface.register("keeps_keys", attend)
    AttentionMaskInterface.register("keeps_keys", sdpa_mask)
    model = AutoModel.from_pretrained(folder, attn_implementation="keeps_keys", trust_remote_code=False).float().eval()
    length = min(N, model.config.max_position_embeddings)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model(tokenizer(text, return_tensors="pt", truncation=True, max_length=length).input_ids)
    return found[:: max(1, len(found) // 6)]


def print_steps(folder: str = "", text: str = "") -> None:
    """Products until convergence by length and sharpness, median and largest; of made-up keys, or of a checkpoint's."""
    words = Path(text).read_text() if folder else ""
    print("N", *(sharpnesses := (1.0, 2.0, 4.0, 8.0, 16.0)), sep="\t")
    for N in (512, 2048, 8192):
        _, k, v, _ = gate.inputs(*ONE, N)
        heads = real_heads(folder, words, N) if folder else [(k[0, 0], v[0, 0])]
        if len(heads[0][0]) < N:
            break
        counts = [[steps(*head, c) for head in heads] for c in sharpnesses]
        print(N, *(f"{median_low(found)} ({max(found)})" for found in counts), sep="\t", flush=True)


CASE = Case(
    "blocks",
    "Tokens that see each other, D = 64, batch 1. One block of N tokens against torch's bidirectional attention "
    "(ratio 1): by Cholesky's factor, up to 4096 tokens, and by conjugate gradients; blocks of 32 tokens against "
    "causal LUCID (ratio 1). Limits: 2.2 forward and 2.5 forward+backward at N = 512; 1.1 for blocks of 32.",
    _points,
)

if __name__ == "__main__":
    print_steps(*sys.argv[1:])
