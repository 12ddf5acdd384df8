"""Warm start (not in the paper): can a trained softmax model be moved to LUCID?

LUCID has no weights of its own, so it takes those of a softmax model. But an abrupt P = I + L changes what every layer
reads; with P = I + s·L and a strength s that rises from 0 to 1 (`Ramp`) the change is gradual.

A model is trained with softmax attention, then trained further in three ways: with softmax attention, with LUCID at
once, and with a ramp. All three get the same batches, the same learning rate and the same number of steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lucid_attention.nn.attention import LucidAttention

from ..toys.lab import Lab, Record
from ..toys.results import Claim, Conclusion, Figure, Spread, Table, lines, series, spread, table
from ..toys.training import (
    CHARACTER_MODEL,
    TINY_CHARACTER_MODEL,
    ToyModel,
    load_model,
    score,
    train,
    train_steps,
    uniform_loss,
)

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
# Steps after the switch, steps until full strength, and steps between tests.
STEPS, RAMP_STEPS, EVERY = 150, 100, 10
TINY = (4, 2, 2)


def go_on(folder: Path, settings: Mapping[str, Any]) -> Record:
    """Train a trained model further, and test it before the first step and every few steps.

    settings: toy, of the training before; trained, the folder of its weights; attention, "softmax" or "lucid"; ramp,
    steps until LUCID has its full strength, 0 for an abrupt switch; steps; every, steps between tests.
    """
    before, ramp, steps = (settings[name] for name in ("toy", "ramp", "steps"))
    toy = before.but(attention=settings["attention"], steps=steps, rate=3e-3, seed=FRESH + before.seed)
    model = load_model(folder.parent / settings["trained"], toy)
    test = toy.make_task().test(max(1, toy.test_batch // 2), 0, toy.length)
    curve: dict[str, list[float]] = {"step": [], "loss": [], "strength": []}
    training = train_steps(toy, model)
    for step in range(steps + 1):
        strength = set_strength(model, min(1.0, step / ramp) if ramp else 1.0)
        if step % settings["every"] == 0 or step == steps:
            curve["step"].append(step)
            curve["loss"].append(uniform_loss(score(model, test)["loss"]))
            curve["strength"].append(strength)
        next(training, None)
    return curve


def set_strength(model: ToyModel, strength: float) -> float:
    """Set the strength of every LUCID layer. Returns the strength, or 0 for a model without LUCID layers."""
    layers = [module for module in model.modules() if isinstance(module, LucidAttention)]
    for layer in layers:
        layer.strength = strength
    return strength if layers else 0.0


@dataclass(frozen=True)
class Move:
    """The cost of a way to LUCID: nats above the model that keeps softmax attention, over seeds.

    jump: before the first step. worst: at the worst moment. end: after the last step.
    """

    jump: Spread
    worst: Spread
    end: Spread


def move(lucid: Sequence[Record], softmax: Sequence[Record]) -> Move:
    """The cost of a way, from its records and those of softmax attention continued, seed by seed."""
    differences = [
        [a - b for a, b in zip(one["loss"], other["loss"], strict=True)]
        for one, other in zip(lucid, softmax, strict=True)
    ]
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


def run(lab: Lab) -> Conclusion:
    """What the ramp and the abrupt switch cost, for every head size."""
    steps, ramp, every = TINY if lab.tiny else (STEPS, RAMP_STEPS, EVERY)
    base = TINY_CHARACTER_MODEL if lab.tiny else CHARACTER_MODEL
    # Good settings of the sweep of `language_model`.
    small = base.but(attention="softmax", rate=1e-2, embedding_std=0.3)
    toys = {toy.head_dim: toy for toy in (small, small.but(heads=1, head_dim=base.width))}
    heads = list(toys)
    first = {head: [toys[head].but(seed=seed) for seed in lab.seeds] for head in heads}
    trained = lab.map_groups(train, first, title="training")
    ways = {
        key: {"attention": way.attention, "ramp": ramp if key == RAMP else 0, "steps": steps, "every": every}
        for key, way in WAYS.items()
    }
    settings = {
        (key, head): [
            {"toy": toy, "trained": record["folder"], **ways[key]}
            for toy, record in zip(first[head], trained[head], strict=True)
        ]
        for key in WAYS
        for head in heads
    }
    records = lab.map_groups(go_on, settings, title="training further")
    ramps, jumps = (
        {head: move(records[way, head], records[CONTINUED, head]) for head in heads} for way in (RAMP, ABRUPT)
    )
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
        seeds=len(lab.seeds),
        figures=[figure({key: records[key, head] for key in WAYS}, head, ramp) for head in heads],
        tables=[moves_table({head: records[CONTINUED, head] for head in heads}, jumps, ramps)],
    )


def signed(value: Spread) -> str:
    """As in "+0.021 ± 0.003"."""
    return f"{'+' if value.mean >= 0 else ''}{value}"


def figure(records: Mapping[str, Sequence[Record]], head: int, ramp: int) -> Figure:
    """The loss after the switch, in all three ways."""
    curves = []
    for key, way in WAYS.items():
        losses = [spread(values) for values in zip(*(record["loss"] for record in records[key]), strict=True)]
        curves.append(series(way.title, way.role, records[key][0]["step"], losses, dashed=way.dashed))
    return lines(
        f"After the switch: heads of {head}",
        "steps after the switch",
        NATS,
        curves,
        marks=[(ramp, "full strength")],
        note="Point 0 is before any training: what the switch itself does.",
    )


def moves_table(
    continued: Mapping[int, Sequence[Record]], jumps: Mapping[int, Move], ramps: Mapping[int, Move]
) -> Table:
    """Both ways to LUCID, for every head size."""
    rows = []
    for head, records in continued.items():
        ends = spread((record["loss"][-1] for record in records), digits=3)
        rows.append([f"heads of {head}", WAYS[CONTINUED].title, None, None, str(ends)])
        for way, cost in ((ABRUPT, jumps[head]), (RAMP, ramps[head])):
            rows.append([f"heads of {head}", WAYS[way].title, *map(signed, (cost.jump, cost.worst, cost.end))])
    return table(
        "What the move costs",
        ["model", "way", "at the switch", "worst on the way", "at the end"],
        rows,
        note="Nats a character above softmax attention continued, taken seed by seed; its own row is its loss.",
    )
