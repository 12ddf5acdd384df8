"""Timings as jobs: cases of `lucid bench`, and the operator by length. Nothing runs beside them."""

from collections.abc import Sequence

from ...bench import decode, models, solve
from ...bench.gate import Shape
from ...bench.harness import Spread, threads
from ...bench.records import Result, Settings
from ...bench.solve import DENSE, LUCID, SDPA
from .jobs import Job, Record, Work
from .result import Figure, lines, series

BENCHMARKS = {case.name: case for case in (decode.CASE, models.DECODING, models.TRAINING)}
# Median and quartiles.
Percents = tuple[float, float, float]
LENGTHS = (512, 1024, 2048, 4096)
# The names of contestants in records, in the benchmarks, in figures, and their roles there.
CONTESTANTS = {
    "sdpa": (SDPA, "softmax attention (SDPA)", "softmax"),
    "lucid": (LUCID, "LUCID", "lucid"),
    "dense": (DENSE, "LUCID, dense solve", "control"),
}
# The largest dense matrices that take part. Their gradients need several times this memory.
DENSE_BYTES = 300e6
# Operations per second of one core, for estimates of duration.
SPEED = 30e9


def case_job(benchmark: str, case: str, label: str, seconds: float, *, quick: bool = False) -> Job:
    """`run_case` as a job, on one thread. case: the key of the case."""
    arguments = {"benchmark": benchmark, "case": case, "quick": quick}
    return Job("engine.timing:run_case", arguments, label, 2.0 if quick else seconds, alone=True)


def run_case(work: Work, benchmark: str, case: str, quick: bool) -> Record:
    """The job: the record of one case of a benchmark. quick: in sizes that only prove that it runs."""
    points = BENCHMARKS[benchmark].points(Settings(threads=(1,), quick=quick))
    cases = {f"{benchmark} {' '.join(map(str, sizes.values()))}": run for sizes, run in points}
    if case not in cases:
        raise ValueError(f"case must be one of {', '.join(cases)}, got {case!r}")
    with threads(1):
        return _record(benchmark, cases[case]())


def _record(benchmark: str, result: Result) -> Record:
    """Seconds of every contestant, and the ratio of LUCID to its peer."""
    fastest, ratio = SDPA, result.ratios.get(models.RATIO)
    if benchmark == decode.CASE.name:
        fastest, ratio = decode.fastest_standard(result)
    lucid = "lucid_decode" if benchmark == decode.CASE.name else "LUCID, whole model"
    names = {LUCID: lucid}
    entries: Record = {
        names.get(name, name): {"seconds": spread._asdict(), "ratio": Spread(1.0, 1.0, 1.0, spread.rounds)._asdict()}
        for name, spread in result.seconds.items()
    }
    assert ratio is not None
    entries[lucid]["ratio"] = ratio._asdict()
    return {"entries": entries, "facts": {"fastest": fastest}}


def percent(record: Record, name: str) -> Percents:
    """The percentage that a contestant is slower than its peer: median and quartiles."""
    ratio = record["entries"][name]["ratio"]
    return 100 * (ratio["median"] - 1), 100 * (ratio["low"] - 1), 100 * (ratio["high"] - 1)


def shown(values: Percents) -> str:
    """`+1.3 % (+0.8 to +2.0)`."""
    return f"{values[0]:+.1f} % ({values[1]:+.1f} to {values[2]:+.1f})"


def prediction_job(lengths: list[int]) -> Job:
    """`predicted_overheads` as a job."""
    return Job("engine.timing:predicted_overheads", {"lengths": lengths}, "count of operations", 1.0)


def predicted_overheads(work: Work, lengths: list[int]) -> Record:
    """The job: the percentage that LUCID adds to a training step by the count of operations, by model and length."""
    shapes = models.TRAINING_SHAPES
    return {shape.name: [100 * (shape.counted(length) - 1) for length in lengths] for shape in shapes}


def cost_job(
    lengths: Sequence[int] = LENGTHS,
    heads: int = 8,
    kv_heads: int = 8,
    head_dim: int = 64,
    backward: bool = False,
    label: str = "",
    *,
    quick: bool = False,
) -> Job:
    """`operator_cost` as a job. quick: few rounds."""
    arguments = {
        "lengths": list(lengths),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "backward": backward,
        "quick": quick,
    }
    work = sum(2.0 * length**2 * head_dim * (heads + 7 * kv_heads) for length in lengths)
    seconds = 1 + 4 * len(lengths) + 5 * work * (3.5 if backward else 1) / SPEED
    default = f"cost {heads}/{kv_heads} heads, {'forward+backward' if backward else 'forward'}"
    return Job("engine.timing:operator_cost", arguments, label or default, seconds, alone=True)


def operator_cost(
    work: Work, lengths: Sequence[int], heads: int, kv_heads: int, head_dim: int, backward: bool, quick: bool
) -> Record:
    """The job: milliseconds by length of SDPA, LUCID and the dense solve, and LUCID over SDPA round by round.

    float32, batch 1, one thread; the benchmark `solve` at these lengths, with its check of all results.
    """
    shape = Shape(head_dim, heads, kv_heads)
    record: Record = {
        "lengths": list(lengths),
        "flop_ratio": shape.flop_ratio,
        "milliseconds": {name: [] for name in CONTESTANTS},
    }
    record |= {"ratio": [], "ratio_low": [], "ratio_high": [], "rounds": []}
    for length in lengths:
        with threads(1):
            dense_fits = shape.kv_heads * length**2 * 4 <= DENSE_BYTES
            result = solve.measure(
                shape,
                length,
                backward=backward,
                settings=Settings(threads=(1,), quick=quick),
                names=(SDPA, LUCID, DENSE) if dense_fits else (SDPA, LUCID),
            )
        for name, (contestant, *_) in CONTESTANTS.items():
            seconds = result.seconds.get(contestant)
            record["milliseconds"][name].append(1000 * seconds.median if seconds else None)
        ratio = result.ratios[models.RATIO]
        record["ratio"].append(ratio.median)
        record["ratio_low"].append(ratio.low)
        record["ratio_high"].append(ratio.high)
        record["rounds"].append(ratio.rounds)
    return record


def cost_figure(record: Record, title: str, note: str = "") -> Figure:
    """Milliseconds against length, on logarithmic axes."""
    curves = []
    for name, (_, contestant_title, role) in CONTESTANTS.items():
        points = [(x, y) for x, y in zip(record["lengths"], record["milliseconds"][name], strict=True) if y is not None]
        if points:
            curves.append(series(contestant_title, role, *zip(*points, strict=True), dashed=name == "dense"))
    return lines(title, "tokens", "milliseconds", curves, log="xy", note=note)
