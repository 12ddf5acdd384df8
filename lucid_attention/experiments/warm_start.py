"""Warm start (not in the paper): can a trained softmax model be moved to LUCID?

LUCID has no weights of its own, so a softmax model's fit. But P = I + L all at once changes what every layer reads;
with P = I + s·L and a strength s that rises from 0 to 1 (`StrengthRamp`) it changes step by step.

A model is trained with softmax attention, and goes on in three ways: as it is, with LUCID at once, and with a ramp. All
three get the same batches, the same learning rate and the same number of steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..models.ramps import StrengthRamp
from ..nn.attention import LucidAttention
from .engine.jobs import Job, Record, Work
from .engine.result import Claim, Conclusion, Figure, Spread, Table, lines, series, spread, table
from .engine.steps import Step, evaluate, train, tune
from .engine.study import Done
from .language_model.runs import extent as language_model
from .language_model.runs import known, training_job
from .small.model import SmallModel
from .small.training import SmallRun, load_small, score, train_steps

CLAIM = Claim(
    title="A trained softmax model moves to LUCID",
    section="not in the paper",
    says="Raised step by step, LUCID's strength moves a trained softmax model over without the jump in the loss that "
    "an abrupt switch costs, and the model ends level with one that goes on as it was.",
    paper="none",
)
CONTINUED, ABRUPT, RAMP = "softmax goes on", "LUCID at once", "LUCID with a ramp"
# The ramp's worst moment over the jump of the abrupt switch; nats above softmax at the end, about what seeds differ by.
SMOOTH, LEVEL = 0.25, 0.02
# So far apart are the batches of training from those after it.
FRESH = 1000
NATS = "loss on unseen text, nats a character"


@dataclass(frozen=True)
class Extent:
    """How much is run at a scale. models: by head size. steps, ramp: after the switch. every: a test after so many."""

    models: Mapping[int, SmallRun]
    seeds: Sequence[int]
    steps: int
    ramp: int
    every: int


def extent(scale: str) -> Extent:
    """Of "smoke" or "small". The models are those of `language_model`, with good settings of its sweep."""
    size = language_model(scale)
    small = size.base.but(attention="softmax", steps=size.steps, rate=1e-2, embedding_std=0.3)
    models = {run.head_dim: run for run in (small, small.but(heads=1, head_dim=size.wide))}
    return Extent(models, (0,), 4, 2, 2) if scale == "smoke" else Extent(models, (0, 1, 2), 150, 100, 10)


def branch(scale: str, head: int, name: str, seed: int) -> Job:
    """A trained model going on in one of the ways."""
    size = extent(scale)
    start = size.models[head].but(seed=seed)
    arguments = {
        "start": asdict(start),
        "attention": "softmax" if name == CONTINUED else "lucid",
        "ramp": size.ramp if name == RAMP else 0,
        "steps": size.steps,
        "rate": 3e-3,
        "every": size.every,
    }
    seconds = size.steps * (0.04 if name == CONTINUED else 0.07) + 3
    return Job("warm_start:go_on", arguments, f"warm start, heads of {head}, {name}, seed {seed}", seconds)


def go_on(work: Work, start: dict[str, Any], attention: str, ramp: int, steps: int, rate: float, every: int) -> Record:
    """The job: train the model of a finished run further, and test it before the first step and on the way.

    attention: "softmax" or "lucid". ramp: after so many steps LUCID has its full strength; 0 for at once.
    """
    trained = SmallRun(**start)
    run = trained.but(attention=attention, steps=steps, rate=rate, seed=FRESH + trained.seed)
    model = run.make_model()
    model.load_state_dict(load_small(work, trained).state_dict())
    test = run.make_task().test(max(1, run.test_batch // 2), 0, run.length)
    schedule = StrengthRamp(ramp) if ramp else None
    curve: dict[str, list[float]] = {"step": [], "loss": [], "strength": []}
    training = train_steps(run, model)
    for step in range(steps + 1):
        strength = set_strength(model, 1.0 if schedule is None else schedule.strength(step, steps))
        if step % every == 0 or step == steps:
            curve["step"].append(step)
            curve["loss"].append(known(score(model, test)["loss"]))
            curve["strength"].append(strength)
        if step < steps:
            next(training)
    return curve


def set_strength(model: SmallModel, strength: float) -> float:
    """Of every LUCID layer. Gives what it is: 0 for a model without any."""
    found = [module for module in model.modules() if isinstance(module, LucidAttention)]
    for module in found:
        module.strength = strength
    return strength if found else 0.0


def plan(scale: str, done: Done) -> list[Job]:
    """Training with softmax attention; then the three ways on."""
    size = extent(scale)
    first = [training_job(run.but(seed=seed), "warm start") for run in size.models.values() for seed in size.seeds]
    if not all(job in done for job in first):
        return first
    names = (CONTINUED, ABRUPT, RAMP)
    return first + [branch(scale, head, name, seed) for head in size.models for name in names for seed in size.seeds]


@dataclass(frozen=True)
class Move:
    """Of one way to LUCID, in nats above the model that goes on with softmax attention, over seeds.

    jump: before the first step. worst: at the worst moment. end: after the last step.
    """

    jump: Spread
    worst: Spread
    end: Spread


def move(scale: str, head: int, name: str, done: Done) -> Move:
    """From the records, seed by seed."""
    above = []
    for seed in extent(scale).seeds:
        ours, theirs = (done[branch(scale, head, each, seed)]["loss"] for each in (name, CONTINUED))
        above.append([a - b for a, b in zip(ours, theirs, strict=True)])
    found = [[row[0] for row in above], [max(row) for row in above], [row[-1] for row in above]]
    return Move(*(spread(values, digits=3) for values in found))


def conclude(scale: str, done: Done) -> Conclusion:
    """With the ramp there must be no jump on the way, and nothing lost at the end, whatever the head size."""
    heads = list(extent(scale).models)
    ramps = {head: move(scale, head, RAMP, done) for head in heads}
    jumps = {head: move(scale, head, ABRUPT, done) for head in heads}
    verdict, because = judged(ramps, jumps)
    smoke = scale == "smoke"
    return Conclusion(
        ours="; ".join(
            f"heads of {head}: switch {signed(jumps[head].jump)}, ramp {signed(ramps[head].worst)} at worst, "
            f"{signed(ramps[head].end)} at the end"
            for head in heads
        )
        + " (nats)",
        verdict="too small to judge" if smoke else verdict,
        because="It only shows that it runs." if smoke else because,
        seeds=len(extent(scale).seeds),
        figures=[figure(scale, head, done) for head in heads],
        tables=[moves_table(scale, done)],
    )


def judged(ramps: Mapping[int, Move], jumps: Mapping[int, Move]) -> tuple[str, str]:
    """The verdict, and why. By head size: what the ramp costs, and what the abrupt switch costs."""
    smooth = [head for head in ramps if ramps[head].worst.mean <= SMOOTH * jumps[head].worst.mean]
    level = [head for head in ramps if ramps[head].end.mean <= LEVEL]
    good = [head for head in smooth if head in level]
    verdict = "holds" if len(good) == len(ramps) else "partly" if smooth or level else "does not hold"
    because = (
        f"With the ramp the loss stays within a quarter of the abrupt jump {_where(smooth, ramps)}, "
        f"and ends at most {LEVEL} nats above softmax going on {_where(level, ramps)}."
    )
    return verdict, because


def _where(heads: Sequence[int], among: Mapping[int, Move]) -> str:
    if not heads:
        return "with no head size"
    return "with every head size" if len(heads) == len(among) else f"with heads of {', '.join(map(str, heads))} only"


def signed(value: Spread) -> str:
    """As in "+0.021 ± 0.003"."""
    return f"{'+' if value.mean >= 0 else ''}{value}"


def figure(scale: str, head: int, done: Done) -> Figure:
    """The loss after the switch."""
    size = extent(scale)
    drawn = []
    for name, role, dashed in ((CONTINUED, "softmax", False), (ABRUPT, "lucid", True), (RAMP, "lucid", False)):
        records = [done[branch(scale, head, name, seed)] for seed in size.seeds]
        found = [spread(values) for values in zip(*(each["loss"] for each in records), strict=True)]
        y, deviations = [each.mean for each in found], [each.std for each in found]
        drawn.append(series(name, role, records[0]["step"], y, spread=deviations, dashed=dashed))
    return lines(
        f"After the switch: heads of {head}",
        "steps after the switch",
        NATS,
        drawn,
        marks=[(size.ramp, "full strength")],
        note="Point 0 is before any training: what the switch itself does.",
    )


def moves_table(scale: str, done: Done) -> Table:
    """Both ways to LUCID, for every head size."""
    rows = []
    for head in extent(scale).models:
        ends = [done[branch(scale, head, CONTINUED, seed)]["loss"][-1] for seed in extent(scale).seeds]
        rows.append([f"heads of {head}", CONTINUED, None, None, str(spread(ends, digits=3))])
        for name in (ABRUPT, RAMP):
            found = move(scale, head, name, done)
            rows.append([f"heads of {head}", name, *map(signed, (found.jump, found.worst, found.end))])
    return table(
        "What the move costs",
        ["model", "way", "at the switch", "worst on the way", "at the end"],
        rows,
        note="Nats a character above softmax attention that goes on, taken seed by seed; its own row is its loss.",
    )


def paper() -> list[Step]:
    """The paper's pretraining with softmax attention, then a tenth of its steps at a tenth of its rate, in three ways.

    LUCID of strength 0 is softmax attention, without a solve, so one checkpoint serves all three.
    """
    start = "runs/paper/warm_start"
    ways = {"continued": 0.0, "abrupt": 1, "ramp": 0.5}
    steps = [train("pretrain_2k", "lucid", "--set", "attention_options.strength=0", out=start)]
    for name, ramp in ways.items():
        out = f"{start}-{name}"
        changes = ("steps=1100", "learning_rate=5e-5", "evaluate_every=20", f"strength_steps={ramp:g}")
        words = [word for change in changes for word in ("--set", change)]
        steps.append(tune("pretrain_2k", f"{start}/model", out, *words))
        told = ("--text", "data/dolma", "--lengths", "2048", "--samples", "500")
        steps.append(evaluate(f"{out}/model", "perplexity", f"{out}-perplexity", *told))
    return steps
