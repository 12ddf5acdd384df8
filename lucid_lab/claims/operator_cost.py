"""Cost of the operator (§2.1, §2.3): LUCID stays in the cost class of softmax attention.

The solve of a key/value head costs the operations of one more head of attention: the FLOP ratio is 1 + H_kv/H.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..bench import solve
from ..bench.gate import Shape
from ..bench.models import RATIO
from ..bench.records import Result, Settings
from ..bench.solve import LUCID, SDPA
from ..toys.lab import QUICK, Lab, Record
from ..toys.results import Claim, Conclusion, Figure, lines, series, table

CLAIM = Claim(
    title="The cost class of softmax attention",
    section="A.4",
    says="LUCID retains O(N²d) complexity like standard softmax attention, and grouped key/value heads make its share "
    "small.",
    paper="O(N²d), no ratio given for the operator",
)
# The claim holds up to this multiple of the FLOP ratio.
ALLOWED = 1.15
SHAPES = (Shape(64, 8, 8), Shape(64, 32, 4))
LENGTHS = (512, 1024, 2048, 4096)


def time_attention(folder: Path, settings: Mapping[str, Any]) -> Record:
    """For `lab.map(..., alone=True)`: a `Result` of the benchmark `solve`, float32, batch 1, one thread.

    settings: shape, of `Shape`; length; backward, whether gradients are computed as well; quick, few rounds.
    """
    shape, length, backward, quick = (settings[name] for name in ("shape", "length", "backward", "quick"))
    return asdict(solve.measure(Shape(*shape), length, backward=backward, settings=Settings(quick=quick)))


def judge(measured: Mapping[str, tuple[float, float]]) -> str:
    """The verdict. measured: LUCID's time over that of SDPA at the longest length, and the FLOP ratio, by case.

    A case is within the claim up to 1.15 times its FLOP ratio. Holds: all are. Partly: some are.
    """
    within = [ratio <= ALLOWED * flop_ratio for ratio, flop_ratio in measured.values()]
    return "holds" if all(within) else "partly" if any(within) else "does not hold"


def run(lab: Lab) -> Conclusion:
    """Compare the ratios at the longest length with the FLOP ratio."""
    quick = lab.scale == QUICK
    lengths = (64, 128) if lab.tiny else LENGTHS[: 2 if quick else 3 if lab.scale.demo else None]
    passes = (False,) if lab.tiny or quick else (False, True)
    cases = {
        f"{shape.label} heads of {shape.D}, {'forward and backward' if backward else 'forward'}": (shape, backward)
        for shape in SHAPES
        for backward in passes
    }
    settings = [
        {"shape": shape, "backward": backward, "length": length, "quick": lab.tiny}
        for shape, backward in cases.values()
        for length in lengths
    ]
    records = iter(lab.map(time_attention, settings, title="timing", alone=True))
    results = {name: [Result.from_json(next(records)) for _ in lengths] for name in cases}
    ratios = {name: [result.ratios[RATIO].median for result in by_length] for name, by_length in results.items()}
    flop_ratios = {name: shape.flop_ratio for name, (shape, _) in cases.items()}
    ours = "; ".join(f"{name}: {values[-1]:.2f} ×" for name, values in ratios.items())
    rows = [
        [name, round(flop_ratios[name], 3), *(round(value, 2) for value in values)] for name, values in ratios.items()
    ]
    return Conclusion(
        ours=f"{ours} (N = {lengths[-1]}, over SDPA)",
        verdict=judge({name: (values[-1], flop_ratios[name]) for name, values in ratios.items()}),
        because=f"Time over that of torch's SDPA at N = {lengths[-1]}, in turn on one thread: {ours}. The count of "
        f"operations allows 1 + H_kv/H; up to {ALLOWED:.2f} times that counts as holding.",
        seeds=1,
        figures=[figure(name, lengths, by_length) for name, by_length in results.items()],
        tables=[table("Time over that of SDPA", ["", "FLOP ratio", *(f"N = {n}" for n in lengths)], rows)],
    )


def figure(title: str, lengths: tuple[int, ...], results: list[Result]) -> Figure:
    """Milliseconds against length."""
    curves = [
        series(name, role, lengths, [1000 * result.seconds[contestant].median for result in results])
        for contestant, name, role in ((SDPA, "softmax attention (SDPA)", "softmax"), (LUCID, "LUCID", "lucid"))
    ]
    return lines(title, "tokens", "milliseconds", curves, log="xy", note="float32, one thread, batch 1.")
