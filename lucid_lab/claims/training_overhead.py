"""Training overhead (section 2.3): the time that LUCID adds to a training step.

The paper: "LUCID adds approximately 0-5.5% overhead during training": Gemma 3-1B ~0 %, Gemma 3-4B +3.5 %, Qwen 2.5-1.5B
+5.5 % (its table of training overhead, which gives no lengths and batches).

Two measurements: whole models in their true widths (the benchmark `model_training` at 2048 tokens), and the operator
alone by length, next to torch's attention and the dense triangular solve of the paper's text. The cost depends on the
length and on the number of query heads that share a key/value head, so no single percentage describes it.
"""

from collections.abc import Mapping, Sequence

from ..bench.solve import LUCID
from .engine.jobs import Job, Record
from .engine.result import Claim, Conclusion, Figure, Spread, Table, bar, bars, table
from .engine.scale import Scale
from .engine.steps import Step, tokenized, train
from .engine.study import Done
from .engine.timing import Percents, case_job, cost_figure, cost_job, percent, prediction_job, shown
from .engine.verdict import Cost, Measured, PaperNumber, Place, Verdict, judge_costs

CLAIM = Claim(
    title="LUCID adds little to a training step",
    section="2.3",
    says="LUCID adds approximately 0–5.5 % overhead during training; fewer key/value heads reduce it further.",
    paper="Gemma 3-1B ~0 %, Gemma 3-4B +3.5 %, Qwen 2.5-1.5B +5.5 %",
)
# Percent, by the names of the models in the benchmarks.
PAPER = {"Gemma-3-1B": 0.0, "Gemma-3-4B": 3.5, "Qwen-2.5-1.5B": 5.5}
PRESETS = {"Gemma-3-1B": "gemma3_1b", "Gemma-3-4B": "gemma3_4b", "Qwen-2.5-1.5B": "qwen2_5_1_5b"}
# A model may be this many points above the paper: the machine and precision differ, and quartiles are a point apart.
SLACK = 3.0
MODEL = "LUCID, whole model"
PREDICTED = (2048, 8192, 32_768, 65_536)
HEADS = ((8, 8), (32, 4))
# About the duration of a case on one core.
RATIOS = {
    name: PaperNumber(
        "Table 1",
        f"{name}, LUCID over standard, a step of 2048 tokens",
        1 + added / 100,
        Place("training_overhead", f"{LUCID}, ratio", f"{name} 2048"),
    )
    for name, added in PAPER.items()
}
PAPER_NUMBERS = tuple(RATIOS.values())
SECONDS = {"Gemma-3-1B": 105.0, "Gemma-3-4B": 140.0, "Qwen-2.5-1.5B": 115.0}


def tokens(scale: Scale) -> int:
    """Tokens of a training step."""
    return 64 if scale.tiny else 2048


def training_jobs(scale: Scale) -> dict[str, Job]:
    """Training steps of whole models, by the names of the models."""
    quick, length = scale.tiny, tokens(scale)
    names = ["Qwen-2.5-1.5B"] if quick else list(PAPER)
    return {
        name: case_job(
            "model_training",
            f"model_training 1 {name} {length}",
            f"training step of {name}",
            SECONDS[name],
            quick=quick,
        )
        for name in names
    }


def cost_jobs(scale: Scale) -> dict[tuple[int, int, bool], Job]:
    """The operator, by query heads, key/value heads, and whether backward is included."""
    if scale.tiny:
        return {(4, 2, True): cost_job((64, 128), 4, 2, 16, True, quick=True)}
    return {
        (*heads, backward): cost_job((512, 1024, 2048, 4096), *heads, 64, backward)
        for heads in HEADS
        for backward in (False, True)
    }


def plan(scale: Scale, done: Done) -> list[Job]:
    """All jobs: none depends on another."""
    return [prediction_job(list(PREDICTED)), *training_jobs(scale).values(), *cost_jobs(scale).values()]


def conclude(scale: Scale, done: Done) -> Conclusion:
    """The claim holds if every model stays within SLACK points of the paper's percentage."""
    records = {name: done[job] for name, job in training_jobs(scale).items()}
    measured = {name: percent(record, MODEL) for name, record in records.items()}
    predicted = done[prediction_job(list(PREDICTED))]
    costs = {key: done[job] for key, job in cost_jobs(scale).items()}
    verdict, because = judged({name: values[0] for name, values in measured.items()}, predicted)
    if scale.tiny:
        verdict, because = "too small to judge", "Models of this size only prove that it runs."
    rounds = [record["entries"][MODEL]["ratio"]["rounds"] for record in records.values()]
    return Conclusion(
        ours=", ".join(f"{name} {shown(values)}" for name, values in measured.items()),
        verdict=verdict,
        because=because,
        seeds=min(rounds),
        figures=[overhead_figure(measured, predicted, tokens(scale)), *cost_figures(costs)],
        tables=[overhead_table(measured, predicted, tokens(scale)), cost_table(costs)],
    )


def judged(measured: dict[str, float], predicted: Record) -> tuple[str, str]:
    """The verdict, and why. measured: percent by model."""
    models_above = [name for name, value in measured.items() if value > PAPER[name] + SLACK]
    verdict = "holds" if not models_above else "partly" if len(models_above) < len(measured) else "does not hold"
    first = (
        f"At 2048 tokens every model is at most {SLACK:g} points above the paper's percentage."
        if not models_above
        else f"At 2048 tokens more than {SLACK:g} points above the paper's percentage: {', '.join(models_above)}."
    )
    longest, costliest = PREDICTED[-1], max(predicted, key=lambda name: predicted[name][-1])
    return verdict, (
        f"{first} The overhead grows with the length, which the paper does not give: by the count of operations "
        f"{costliest} pays {predicted[costliest][-1]:+.0f} % at {longest} tokens."
    )


def overhead_figure(measured: Mapping[str, Percents], predicted: Record, length: int) -> Figure:
    """Bars of the models, measured and counted, with the paper's percentages across."""
    groups = {
        name: [
            bar("LUCID, measured", "lucid", Spread(middle, (high - low) / 2, 2)),
            bar("by the count of operations", "control", predicted[name][0]),
        ]
        for name, (middle, low, high) in measured.items()
    }
    references = {f"paper, {name}": PAPER[name] for name in measured}
    note = (
        f"Forward and backward of whole models at {length} tokens, batch 1, float32, one thread, without optimiser. "
        "Whiskers: half the distance between the quartiles over rounds."
    )
    return bars("What LUCID adds to a training step", "percent", groups, references=references, note=note)


def overhead_table(measured: Mapping[str, Percents], predicted: Record, length: int) -> Table:
    """Measured at one length; counted for longer ones."""
    columns = ["model", f"measured, {length} tokens", *(f"counted, {length}" for length in PREDICTED), "paper"]
    rows = []
    for name, values in measured.items():
        paper = f"+{PAPER[name]:g} %" if PAPER[name] else "~0 %"
        rows.append([name, shown(values), *(f"{value:+.1f} %" for value in predicted[name]), paper])
    note = "Counted: operations of the whole model; the solve is one more attention per key/value head."
    return table("What LUCID adds to a training step (median, quartiles)", columns, rows, note=note)


def cost_figures(costs: dict[tuple[int, int, bool], Record]) -> list[Figure]:
    """Forward and backward, a figure for each number of heads."""
    return [
        cost_figure(
            record,
            f"Forward and backward of attention alone, {heads}/{kv_heads} heads",
            f"float32, one thread, batch 1. The FLOP ratio, LUCID over SDPA, is {record['flop_ratio']:.3g}.",
        )
        for (heads, kv_heads, backward), record in costs.items()
        if backward
    ]


def cost_table(costs: dict[tuple[int, int, bool], Record]) -> Table:
    """The time of LUCID over that of torch's attention."""
    lengths: Sequence[int] = next(iter(costs.values()))["lengths"]
    rows = [
        [
            f"{heads}/{kv_heads}",
            "forward + backward" if backward else "forward",
            round(record["flop_ratio"], 3),
            *(round(value, 3) for value in record["ratio"]),
        ]
        for (heads, kv_heads, backward), record in costs.items()
    ]
    columns = ["query/kv heads", "", "FLOP ratio", *(f"N = {length}" for length in lengths)]
    return table("Time of the operator over SDPA", columns, rows, note="Medians of ratios round by round.")


def paper() -> list[Step]:
    """A training step of whole models on one GPU; then the first steps of pretraining with each, on all of them."""
    measured = Step(("bench", "on_device", "--resume", "--out", "results/paper/training_overhead"))
    return [measured, tokenized()] + [
        train(
            "pretrain_2k",
            attention,
            *("--set", f"preset={preset}", "--set", "steps=100"),
            out=f"runs/paper/overhead-{preset}-{attention}",
        )
        for preset in PRESETS.values()
        for attention in ("softmax", "lucid")
    ]


def judge_paper(measured: Measured) -> Verdict:
    """A step of every whole model is at most SLACK points dearer than in the paper."""
    costs = [Cost(name, PAPER[name], 100 * (measured[ratio.place].value - 1)) for name, ratio in RATIOS.items()]
    return judge_costs(costs, SLACK)
