"""A language model of ten million weights on Python sources, at equal time; then needles and overwrites in text.

Not in the paper. Bytes of the standard library, six layers of width 384, heads of 64, one rate, one seed: two cores
cannot show how a difference grows with the model, nor tell one below 0.01 nats from chance. All arms get the time of
the slowest one, by steps in turn; a training is cut into pieces, so that a stopped run resumes. 50 minutes of a
core: softmax attention alone, given half of its rows as logs of assignments, named the latest digit by chance after 150
steps, so overwrites may show nothing.

Predicted before the run: on text LUCID is within 0.02 nats of softmax attention and FoX ahead; LUCID is ahead on
overwrites.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import torch

from ..toys.arms import arm
from ..toys.lab import Lab, Record
from ..toys.neighbours import CENTRED
from ..toys.results import Claim, Conclusion, lines, series, table
from ..toys.tasks import characters
from ..toys.training import (
    CHARACTER_MODEL,
    Toy,
    cosine_rate,
    loss_of,
    score,
    time_in_turn,
    train_steps,
    training_loop,
)

CLAIM = Claim(
    title="Ten million weights: text, needles, overwrites at equal time",
    section="not in the paper",
    says="With the same time, a language model with LUCID has no higher loss than with softmax attention, and names "
    "the latest of several assignments to a variable more often.",
    paper="no number given",
)
TOY = CHARACTER_MODEL.but(
    length=512,
    layers=6,
    width=384,
    heads=6,
    head_dim=64,
    mlp=4.0,
    embedding_std=0.3,
    rate=1e-3,
    steps=300,
    batch=4,
    test_lengths=(512,),
)
ARMS = (("softmax", None), ("lucid", None), ("lucid", CENTRED), ("forgetting", None))
# Steps of a piece. A prompt assigns digits to variables among lines of held-out text: (assignments of each, bytes).
PIECE, PROBES, PROMPTS = 50, ((1, 512), (4, 512), (4, 2048)), 64
LEVEL, STATE = 0.02, "state.pt"


def time_arms(folder: Path, toys: list[Toy]) -> Record:
    """For `lab.map(..., alone=True)`: {"milliseconds"} of a step of each, medians of 12 steps in turn."""
    return time_in_turn([train_steps(toy.but(steps=14), toy.make_model()) for toy in toys], warm_up=2)


@dataclass(frozen=True)
class Piece:
    """Steps first to last of a training. before: "folder" of the piece before, or ""."""

    toy: Toy
    first: int
    last: int
    before: str = ""


def train_piece(folder: Path, piece: Piece) -> Record:
    """For `lab.map`: {"loss"}, the mean over the piece. Keeps weights and optimiser."""
    toy, model, task = piece.toy, piece.toy.make_model(), piece.toy.make_task()
    optimizer = torch.optim.AdamW(model.parameters(), lr=toy.rate, betas=(0.9, 0.99), weight_decay=0.01, fused=True)
    older = folder.parent / piece.before / STATE
    if piece.before:
        saved = torch.load(older, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        # The schedule of this piece multiplies the rate of the training.
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] = toy.rate
    steps = training_loop(
        piece.last - piece.first,
        lambda step: loss_of(model, task.batch(toy.batch, toy.seed, piece.first + step)),
        optimizer,
        rate=lambda step: cosine_rate(piece.first + step, toy.steps),
        clip=model.parameters(),
    )
    loss = fmean(float(loss) for loss in steps)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / STATE)
    return {"loss": loss}


def probe(random: Random, writes: int, size: int) -> tuple[bytes, int, list[int]]:
    """A prompt that ends in an assertion about a variable; its latest digit; and its overwritten digits, as bytes."""
    text = bytes(characters()[1])
    names = random.sample(["alpha", "beta", "gamma", "delta"], 4)
    order = names * writes
    random.shuffle(order)
    held: dict[str, list[int]] = {name: [] for name in names}
    parts, gap = [], max(1, (size - 16 * len(order)) // len(order))
    for name in order:
        start = random.randrange(len(text) - gap)
        held[name].append(random.choice([digit for digit in range(48, 58) if digit not in held[name]]))
        parts.append(text[start : start + gap] + f"\n{name} = {chr(held[name][-1])}\n".encode())
    return b"".join(parts) + f"assert {names[0]} == ".encode(), held[names[0]][-1], held[names[0]][:-1]


@torch.no_grad()
def examine(folder: Path, settings: dict[str, Any]) -> Record:
    """For `lab.map`: {"loss"} on held-out text; {"latest", "stale"}, percent of prompts by kind of PROBES.

    settings: toy; last, "folder" of its last piece; prompts.
    """
    toy: Toy = settings["toy"]
    model = toy.make_model()
    model.load_state_dict(torch.load(folder.parent / settings["last"] / STATE, weights_only=True)["model"])
    found: Record = {"loss": score(model, toy.make_task().test(toy.test_batch, 0, toy.test_lengths[0]))["loss"]}
    found |= {"latest": [], "stale": []}
    for writes, size in PROBES:
        random, latest, stale = Random(f"{writes}/{size}"), 0, 0
        for _ in range(settings["prompts"]):
            prompt, digit, old = probe(random, writes, size)
            logits = model(torch.tensor([list(prompt)]))[0, -1]
            answer = 48 + int(logits[48:58].argmax())
            latest, stale = latest + (answer == digit), stale + (answer in old)
        found["latest"].append(100 * latest / settings["prompts"])
        found["stale"].append(100 * stale / settings["prompts"])
    return found


def judge(text: tuple[float, float], overwrites: tuple[float, float]) -> str:
    """The verdict from (LUCID, softmax attention): loss on text in nats, and percent of overwrites, mean of two kinds.

    "holds": the loss is at most 0.02 nats higher, and LUCID names the latest digit 10 points more often. "partly": one
    of these. Otherwise "does not hold".
    """
    return ("does not hold", "partly", "holds")[(text[0] <= text[1] + LEVEL) + (overwrites[0] >= overwrites[1] + 10)]


def pieces(lab: Lab, toys: Sequence[Toy]) -> list[tuple[list[int], list[float], str]]:
    """Steps, losses and the last folder of every training. Trainings go on side by side, piece by piece."""
    done: list[tuple[list[int], list[float], str]] = [([], [], "") for _ in toys]
    while any(not steps or steps[-1] < toy.steps for toy, (steps, _, _) in zip(toys, done, strict=True)):
        open_ = [i for i, toy in enumerate(toys) if not done[i][0] or done[i][0][-1] < toy.steps]
        firsts = [done[i][0][-1] if done[i][0] else 0 for i in open_]
        settings = [
            Piece(toys[i], first, min(first + PIECE, toys[i].steps), done[i][2])
            for i, first in zip(open_, firsts, strict=True)
        ]
        for i, piece, record in zip(open_, settings, lab.map(train_piece, settings, title="training"), strict=True):
            done[i][0].append(piece.last)
            done[i][1].append(record["loss"])
            done[i] = (*done[i][:2], record["folder"])
    return done


def run(lab: Lab) -> Conclusion:
    """Every arm for as long as LUCID with a centre takes for TOY.steps; then the probes."""
    base = (
        TOY.but(length=64, layers=1, width=16, heads=2, head_dim=8, steps=2, batch=2, test_batch=2, test_lengths=(64,))
        if lab.tiny
        else TOY
    )
    arms = {one.key: one for one in (arm(base.but(attention=name), change) for name, change in ARMS)}
    times = [1.0] * len(arms)
    if not lab.tiny:
        (timed,) = lab.map(time_arms, [[one.toy for one in arms.values()]], title="times", alone=True)
        times = timed["milliseconds"]
    slowest = times[list(arms).index("lucid+centred")]
    toys = {
        key: one.toy.but(steps=round(one.toy.steps * slowest / mine))
        for (key, one), mine in zip(arms.items(), times, strict=True)
    }
    curves = dict(zip(arms, pieces(lab, list(toys.values())), strict=True))
    settings = [
        {"toy": toy, "last": curves[key][2], "prompts": 2 if lab.tiny else PROMPTS} for key, toy in toys.items()
    ]
    tests = dict(zip(arms, lab.map(examine, settings, title="tests"), strict=True))
    overwrites = {key: fmean(test["latest"][1:]) for key, test in tests.items()}
    told = "; ".join(
        f"{arms[key].label} {test['loss']:.3f} nats, overwrites {overwrites[key]:.0f} %" for key, test in tests.items()
    )
    tokens = [[step * base.batch * base.length for step in curves[key][0]] for key in arms]
    drawn = [
        series(one.label, one.role, x, curves[key][1], dashed=bool(one.change))
        for (key, one), x in zip(arms.items(), tokens, strict=True)
    ]
    kinds = [f"{writes} × 4 assignments, {size} bytes" for writes, size in PROBES]
    rows = [
        [one.label, toys[key].steps, round(tests[key]["loss"], 3), *tests[key]["latest"], *tests[key]["stale"]]
        for key, one in arms.items()
    ]
    return Conclusion(
        ours=told,
        verdict=judge(
            *((tests["lucid"]["loss"], tests["softmax"]["loss"]), (overwrites["lucid"], overwrites["softmax"]))
        ),
        because=f"At the time that LUCID with a centre takes for {base.steps} steps: {told}.",
        seeds=1,
        figures=[lines("Training loss", "bytes", "nats a byte", drawn)],
        tables=[
            table(
                "Tests",
                [
                    "",
                    "steps",
                    "text, nats",
                    *(f"latest: {kind}, %" for kind in kinds),
                    *(f"stale: {kind}, %" for kind in kinds),
                ],
                rows,
            )
        ],
    )
