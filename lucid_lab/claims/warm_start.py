"""Warm start (not in the paper): can a trained softmax model be moved to LUCID?

LUCID has no weights of its own, so it takes those of a softmax model. But an abrupt P = I + L changes what every layer
reads; with P = I + s·L and a strength s that rises from 0 to 1 (`StrengthRamp`) the change is gradual.

A model is trained with softmax attention, then trained further in three ways: with softmax attention, with LUCID at
once, and with a ramp. All three get the same batches, the same learning rate and the same number of steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from lucid_attention.models.ramps import StrengthRamp
from lucid_attention.nn.attention import LucidAttention

from .engine.full_scale import LOSS, WORST
from .engine.jobs import Job, Record, Work
from .engine.result import Claim, Conclusion, Figure, Spread, Table, lines, series, spread, table
from .engine.scale import Scale
from .engine.steps import TOKENS, Step, evaluate, tokenized, train, tune
from .engine.study import Done
from .engine.verdict import Measured, PaperNumber, Place, Verdict
from .language_model.runs import extent as language_model
from .language_model.runs import finite_loss, training_job
from .small.model import SmallModel
from .small.training import SmallRun, load_small, score, train_steps

CLAIM = Claim(
    title="A trained softmax model moves to LUCID",
    section="not in the paper",
    says="Raised step by step, LUCID's strength moves a trained softmax model over without the jump in the loss that "
    "an abrupt switch costs, and the model ends level with one that is trained on as it was.",
    paper="none",
)


class Way(NamedTuple):
    """A way to train the model further. role: its colour."""

    title: str
    attention: str
    role: str
    dashed: bool = False


CONTINUED, ABRUPT, RAMP = "continued", "abrupt", "ramp"
WAYS = {
    CONTINUED: Way("softmax continued", "softmax", "softmax"),
    ABRUPT: Way("LUCID at once", "lucid", "lucid", dashed=True),
    RAMP: Way("LUCID with a ramp", "lucid", "lucid"),
}
# Limits for the ramp: its worst loss over that of the abrupt switch, and nats above softmax at the end, which is about
# the difference between seeds.
SMOOTH, LEVEL = 0.25, 0.02
# Added to the seed, so that further training sees other batches than the first training.
FRESH = 1000
NATS = "loss on unseen text, nats a character"


@dataclass(frozen=True)
class Extent:
    """How much is run at a scale.

    models: by head size. steps: after the switch. ramp: steps until full strength. every: steps between tests.
    """

    models: Mapping[int, SmallRun]
    steps: int
    ramp: int
    every: int


def extent(scale: Scale) -> Extent:
    """The extent at a scale. The models are those of `language_model`, with good settings of its sweep."""
    size = language_model(scale)
    small = size.base.but(attention="softmax", steps=size.steps, rate=1e-2, embedding_std=0.3)
    models = {run.head_dim: run for run in (small, small.but(heads=1, head_dim=size.wide))}
    if scale.tiny:
        return Extent(models, steps=4, ramp=2, every=2)
    return Extent(models, steps=150, ramp=100, every=10)


def branch(scale: Scale, head: int, way: str, seed: int) -> Job:
    """The job that trains a trained model further, in one of WAYS. head: its head size."""
    size = extent(scale)
    start = size.models[head].but(seed=seed)
    arguments = {
        "start": asdict(start),
        "attention": WAYS[way].attention,
        "ramp": size.ramp if way == RAMP else 0,
        "steps": size.steps,
        "rate": 3e-3,
        "every": size.every,
    }
    seconds = size.steps * (0.04 if way == CONTINUED else 0.07) + 3
    label = f"warm start, heads of {head}, {WAYS[way].title}, seed {seed}"
    return Job("warm_start:go_on", arguments, label, seconds)


def go_on(work: Work, start: dict[str, Any], attention: str, ramp: int, steps: int, rate: float, every: int) -> Record:
    """The job: train the model of a finished run further, and test it before the first step and every few steps.

    attention: "softmax" or "lucid". ramp: steps until LUCID has its full strength, 0 for an abrupt switch.
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
            curve["loss"].append(finite_loss(score(model, test)["loss"]))
            curve["strength"].append(strength)
        if step < steps:
            next(training)
    return curve


def set_strength(model: SmallModel, strength: float) -> float:
    """Set the strength of every LUCID layer. Returns the strength, or 0 for a model without LUCID layers."""
    layers = [module for module in model.modules() if isinstance(module, LucidAttention)]
    for layer in layers:
        layer.strength = strength
    return strength if layers else 0.0


def plan(scale: Scale, done: Done) -> list[Job]:
    """Training with softmax attention; then further training in three ways."""
    models, seeds = extent(scale).models, scale.seeds
    first = [training_job(run.but(seed=seed), "warm start") for run in models.values() for seed in seeds]
    if not all(job in done for job in first):
        return first
    return first + [branch(scale, head, way, seed) for head in models for way in WAYS for seed in seeds]


@dataclass(frozen=True)
class Move:
    """The cost of a way to LUCID: nats above the model that keeps softmax attention, over seeds.

    jump: before the first step. worst: at the worst moment. end: after the last step.
    """

    jump: Spread
    worst: Spread
    end: Spread


def move(scale: Scale, head: int, way: str, done: Done) -> Move:
    """The cost of a way, from the records, seed by seed."""
    differences = []
    for seed in scale.seeds:
        lucid, softmax = (done[branch(scale, head, key, seed)]["loss"] for key in (way, CONTINUED))
        differences.append([a - b for a, b in zip(lucid, softmax, strict=True)])
    return Move(
        jump=spread((losses[0] for losses in differences), digits=3),
        worst=spread((max(losses) for losses in differences), digits=3),
        end=spread((losses[-1] for losses in differences), digits=3),
    )


def judge(ramps: Mapping[int, Move], jumps: Mapping[int, Move]) -> tuple[str, str]:
    """The verdict and its reason. ramps, jumps: the cost of the ramp and of the abrupt switch, by head size.

    The ramp must be smooth on the way and level at the end, with every head size.
    """
    smooth = [head for head in ramps if ramps[head].worst.mean <= SMOOTH * jumps[head].worst.mean]
    level = [head for head in ramps if ramps[head].end.mean <= LEVEL]
    smooth_and_level = [head for head in smooth if head in level]
    verdict = "holds" if len(smooth_and_level) == len(ramps) else "partly" if smooth or level else "does not hold"
    because = (
        f"With the ramp the loss stays within a quarter of the abrupt jump {_where(smooth, ramps)}, "
        f"and ends at most {LEVEL} nats above softmax going on {_where(level, ramps)}."
    )
    return verdict, because


def _where(heads: Sequence[int], among: Mapping[int, Move]) -> str:
    if not heads:
        return "with no head size"
    return "with every head size" if len(heads) == len(among) else f"with heads of {', '.join(map(str, heads))} only"


def conclude(scale: Scale, done: Done) -> Conclusion:
    """What the ramp and the abrupt switch cost, for every head size."""
    heads = list(extent(scale).models)
    ramps = {head: move(scale, head, RAMP, done) for head in heads}
    jumps = {head: move(scale, head, ABRUPT, done) for head in heads}
    verdict, because = judge(ramps, jumps)
    ours = "; ".join(
        f"heads of {head}: switch {signed(jumps[head].jump)}, ramp {signed(ramps[head].worst)} at worst, "
        f"{signed(ramps[head].end)} at the end"
        for head in heads
    )
    return Conclusion(
        ours=f"{ours} (nats)",
        verdict=verdict,
        because=because,
        seeds=len(scale.seeds),
        figures=[figure(scale, head, done) for head in heads],
        tables=[moves_table(scale, done)],
    )


def signed(value: Spread) -> str:
    """As in "+0.021 ± 0.003"."""
    return f"{'+' if value.mean >= 0 else ''}{value}"


def figure(scale: Scale, head: int, done: Done) -> Figure:
    """The loss after the switch, in all three ways."""
    curves = []
    for key, way in WAYS.items():
        records = [done[branch(scale, head, key, seed)] for seed in scale.seeds]
        losses = [spread(values) for values in zip(*(record["loss"] for record in records), strict=True)]
        y, deviations = [loss.mean for loss in losses], [loss.std for loss in losses]
        curves.append(series(way.title, way.role, records[0]["step"], y, spread=deviations, dashed=way.dashed))
    return lines(
        f"After the switch: heads of {head}",
        "steps after the switch",
        NATS,
        curves,
        marks=[(extent(scale).ramp, "full strength")],
        note="Point 0 is before any training: what the switch itself does.",
    )


def moves_table(scale: Scale, done: Done) -> Table:
    """Both ways to LUCID, for every head size."""
    rows = []
    for head in extent(scale).models:
        ends = [done[branch(scale, head, CONTINUED, seed)]["loss"][-1] for seed in scale.seeds]
        rows.append([f"heads of {head}", WAYS[CONTINUED].title, None, None, str(spread(ends, digits=3))])
        for way in (ABRUPT, RAMP):
            cost = move(scale, head, way, done)
            rows.append([f"heads of {head}", WAYS[way].title, *map(signed, (cost.jump, cost.worst, cost.end))])
    return table(
        "What the move costs",
        ["model", "way", "at the switch", "worst on the way", "at the end"],
        rows,
        note="Nats a character above softmax attention continued, taken seed by seed; its own row is its loss.",
    )


def paper() -> list[Step]:
    """The paper's pretraining with softmax attention, then a tenth of its steps at a tenth of its rate, in three ways.

    LUCID of strength 0 is softmax attention, without a solve, so one checkpoint serves all three.
    """
    start = "runs/paper/warm_start"
    ways = {"continued": 0.0, "abrupt": 1, "ramp": 0.5}
    steps = [tokenized(), train("pretrain_2k", "lucid", "--set", "attention_options.strength=0", out=start)]
    for name, ramp in ways.items():
        out = f"{start}-{name}"
        changes = ("steps=1100", "learning_rate=5e-5", "evaluate_every=20", f"strength_steps={ramp:g}")
        words = [word for change in changes for word in ("--set", change)]
        steps.append(tune("pretrain_2k", f"{start}/model", out, *words))
        text = ("--text", TOKENS, "--lengths", "2048", "--samples", "500")
        steps.append(evaluate(f"{out}/model", "perplexity", f"{out}-perplexity", *text))
    return steps


# Not in the paper: nothing to compare with.
ENDS = {
    way: PaperNumber("none", f"loss at the end, {WAYS[way].title}", None, Place(f"warm_start-{way}", LOSS))
    for way in WAYS
}
PEAKS = {
    way: PaperNumber("none", f"worst loss on the way, {WAYS[way].title}", None, Place(f"warm_start-{way}", WORST))
    for way in WAYS
}
PAPER_NUMBERS = (*ENDS.values(), *PEAKS.values())


def judge_paper(measured: Measured) -> Verdict:
    """As at the small scale, smooth on the way and level at the end: losses above those of softmax going on."""
    ends, peaks = ({way: measured[n.place].value for way, n in numbers.items()} for numbers in (ENDS, PEAKS))
    moves = {}
    for way in (RAMP, ABRUPT):
        worst, end = (spread([losses[way] - losses[CONTINUED]], 3) for losses in (peaks, ends))
        # The size of the heads of `paper_1b`. Nothing is measured before the first step: the worst loss is the jump.
        moves[way] = {68: Move(jump=worst, worst=worst, end=end)}
    verdict, because = judge(moves[RAMP], moves[ABRUPT])
    losses = ", ".join(f"{WAYS[way].title} {loss:.3f}" for way, loss in ends.items())
    return Verdict(verdict, f"loss at the end: {losses}", f"{because} Loss at the end: {losses}.")
