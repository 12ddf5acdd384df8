"""Language modelling (A.5): LUCID's loss is lower, and more so with long contexts, small heads and no positions.

The paper: "At 4096 context length, LUCID improves training loss by 0.012 over the Transformer baseline after 80B
tokens. At 32,768 context length, the gain increases to 0.048"; "LUCID attention achieves a 0.1 improvement in
validation loss … for headsize 16"; "the loss difference between LUCID (2.42) and standard attention (2.54) increases to
0.12 when the RoPE is removed in sequence length 32k setting".

Here: the next character of the Python standard library. The learning rate and the size of the embeddings are chosen for
each side by its own sweep, because an untuned baseline can lose by its tuning alone. Softmax attention also gets the
time that LUCID takes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lucid_attention.nn.attention import ATTENTIONS

from ..toys.arms import Group, Trained, arm, time_ratios, train_arms
from ..toys.lab import Lab, Record
from ..toys.results import Claim, Conclusion, Figure, Spread, Table, lead, lines, outcome, series, spread, table
from ..toys.training import CHARACTER_MODEL, TINY_CHARACTER_MODEL, Toy, train, uniform_loss

CLAIM = Claim(
    title="A lower loss of language models",
    section="A.5",
    says="At the same number of steps LUCID reaches a lower loss than softmax attention; the gain grows with the "
    "context length, with heads of 16 instead of 64, and without RoPE.",
    paper="lower by 0.012 at 4096 tokens, 0.048 at 32 768, 0.1 with heads of 16 (4096), 0.12 without RoPE (32 768)",
)
SIDES = ("softmax", "lucid")
TITLES = {side: ATTENTIONS[side].title for side in SIDES}
VARIATIONS = {
    "no_positions": "without RoPE",
    "one_wide_head": "with one wide head",
    "long_context": "with the longer context",
}
# The sweep has its own seed, so that nothing is tuned on the runs that are compared.
SWEEP_SEED = 9
UNTUNED = {"rate": 3e-3, "embedding_std": 0.02}
NATS = "loss, nats a character"

Point = tuple[float, float]


@dataclass(frozen=True)
class Size:
    """How much is run.

    toy: the model of every run, with its steps. sweep_steps: of the runs of the sweep.
    rates, stds: learning rates and sizes of embeddings in the sweep.
    long: the longer context, with the same number of tokens in a step. wide: the head size of the run with one head.
    """

    toy: Toy
    sweep_steps: int
    rates: Sequence[float]
    stds: Sequence[float]
    long: int
    wide: int


FULL = Size(CHARACTER_MODEL, 250, rates=(3e-3, 1e-2, 3e-2), stds=(0.02, 0.3, 1.0), long=1024, wide=64)
TINY = Size(TINY_CHARACTER_MODEL, 2, rates=(1e-2,), stds=(0.02, 1.0), long=32, wide=16)


def judge(gaps: Mapping[str, Spread]) -> tuple[str, str]:
    """The verdict and its reason. gaps: softmax loss minus LUCID's loss, by setting.

    Against the tuned baseline LUCID must be ahead by more than the spread over seeds, at equal steps and at equal time;
    ahead at equal steps and level at equal time, or ahead in one of VARIATIONS only, it is "partly".
    """
    better_variations = [words for name, words in VARIATIONS.items() if is_clear(gaps[name])]
    steps, late = (outcome(gaps[name], Spread(0.0, 0.0, gaps[name].count)) for name in ("tuned", "equal_time"))
    verdict = lead(steps, late)
    if verdict != "does not hold":
        time = "at equal time" if verdict == "holds" else "level at equal time"
        return verdict, f"Against a tuned baseline LUCID's loss is lower at equal steps and {time}."
    if steps == "ahead" and not better_variations:
        return verdict, "Against a tuned baseline LUCID's loss is lower at equal steps, and higher at equal time."
    if better_variations:
        variations = f"It is {', '.join(better_variations)}, at equal steps."
        return "partly", f"Against a tuned baseline LUCID's loss is not lower by more than the spread. {variations}"
    untuned = " With untuned embeddings it is: LUCID is less sensitive to them." if is_clear(gaps["untuned"]) else ""
    return "does not hold", f"Against a tuned baseline LUCID's loss is lower in no setting.{untuned}"


def is_clear(gap: Spread) -> bool:
    """Whether LUCID is ahead by more than the spread over seeds."""
    return gap.mean > gap.std


def sweep(lab: Lab, size: Size) -> dict[str, dict[Point, float]]:
    """For each side, (learning rate, embedding std) → loss on unseen text."""
    points = [(rate, std) for rate in size.rates for std in size.stds]
    base = size.toy.but(steps=size.sweep_steps, seed=SWEEP_SEED)
    toys = {side: [base.but(attention=side, rate=rate, embedding_std=std) for rate, std in points] for side in SIDES}
    records = lab.map_groups(train, toys, title="sweep")
    return {side: dict(zip(points, map(final_loss, records[side]), strict=True)) for side in SIDES}


def settings(size: Size, side: str, tuned: Mapping[str, float], late: int) -> dict[str, Toy]:
    """The toys of a side, by setting. tuned: its best point of the sweep. late: softmax's steps at equal time."""
    plain = size.toy.but(attention=side)
    toy = plain.but(**tuned)
    # Fewer sequences, so that a step has the same number of tokens.
    batch = max(1, toy.batch * toy.length // size.long)
    return {
        "tuned": toy,
        "equal_time": toy.but(steps=late) if side == "softmax" else toy,
        "untuned": plain.but(**UNTUNED),
        "no_positions": toy.but(rope=False),
        "one_wide_head": toy.but(heads=1, head_dim=size.wide),
        "long_context": toy.but(
            length=size.long, batch=batch, test_lengths=(size.long,), test_batch=toy.test_batch // 4
        ),
    }


def run(lab: Lab) -> Conclusion:
    """LUCID's lead in every setting, and where it grows."""
    size = TINY if lab.tiny else FULL
    timing = time_ratios(lab, {"": (size.toy.but(attention="lucid"), size.toy.but(attention="softmax"))})[""]
    swept = sweep(lab, size)
    tuned = {}
    for side, by_point in swept.items():
        rate, std = min(by_point, key=by_point.__getitem__)
        tuned[side] = {"rate": rate, "embedding_std": std}
    late = max(1, round(size.toy.steps * timing["ratio"]))
    toys = {side: settings(size, side, tuned[side], late) for side in SIDES}
    groups = train_arms(lab, {name: [arm(toys[side][name]) for side in SIDES] for name in toys["lucid"]})
    gaps = {name: gap(group) for name, group in groups.items()}
    verdict, reason = judge(gaps)
    words = {side: f"rate {point['rate']:g}, embeddings {point['embedding_std']:g}" for side, point in tuned.items()}
    chosen = "; ".join(f"{TITLES[side]} {point}" for side, point in words.items())
    return Conclusion(
        ours=f"LUCID minus softmax, both tuned: {minus(gaps['tuned'])} at equal steps, {minus(gaps['equal_time'])} at "
        f"equal time; without RoPE {minus(gaps['no_positions'])} (nats)",
        verdict=verdict,
        because=f"{reason} {trends(gaps)} Tuned: {chosen}. A step of LUCID takes {timing['ratio']:.2f} times as long.",
        seeds=len(lab.seeds),
        figures=[curve_figure(groups)],
        tables=[
            loss_table(size, groups, gaps, chosen),
            table(
                "Time of a training step",
                ["softmax, ms", "LUCID, ms", "ratio"],
                [[round(value, 2) for value in (*reversed(timing["milliseconds"]), timing["ratio"])]],
                note="On one core, steps of both in turn, medians.",
            ),
        ],
    )


def final_loss(record: Record) -> float:
    """The loss of a run on unseen text, nats a character."""
    return uniform_loss(record["tests"][-1]["loss"])


def losses(one: Trained) -> list[float]:
    """The loss on unseen text, for every seed."""
    return [final_loss(record) for record in one.records]


def gap(group: Group) -> Spread:
    """The loss of softmax attention minus that of LUCID, seed by seed."""
    pairs = zip(*(losses(group[side]) for side in SIDES), strict=True)
    return spread((softmax - lucid for softmax, lucid in pairs), 3)


def minus(gap: Spread) -> str:
    """LUCID's loss minus that of softmax attention: below zero is better."""
    return f"{-gap.mean:+.3f} ± {gap.std:.3f}"


def trends(gaps: Mapping[str, Spread]) -> str:
    """Where LUCID's lead grows as the paper says, by more than the spread of either gap."""
    pairs = {
        "without RoPE": ("no_positions", "tuned"),
        "with the longer context": ("long_context", "tuned"),
        "with small heads": ("tuned", "one_wide_head"),
    }
    grows: list[str] = []
    unclear: list[str] = []
    for words, (larger, smaller) in pairs.items():
        margin = max(gaps[larger].std, gaps[smaller].std)
        (grows if gaps[larger].mean - gaps[smaller].mean > margin else unclear).append(words)
    sentences = [f"The difference grows {', '.join(grows)}."] if grows else []
    sentences += [f"It does not clearly grow {', '.join(unclear)}."] if unclear else []
    return " ".join(sentences)


def curve_figure(groups: Mapping[str, Group]) -> Figure:
    """Training losses against steps, tuned and untuned."""
    drawn = [
        series(f"{one.arm.label}{words}", one.arm.role, *one.curve(), dashed=bool(words))
        for name, words in (("tuned", ""), ("untuned", ", untuned"))
        for one in groups[name].values()
    ]
    return lines("Loss against steps", "step", NATS, drawn, note="A mean over the steps between two points.")


def loss_table(size: Size, groups: Mapping[str, Group], gaps: Mapping[str, Spread], chosen: str) -> Table:
    """Every setting next to the paper's number."""
    toy, late = size.toy, groups["equal_time"]["softmax"].arm.toy.steps
    shape = f"{toy.heads} heads of {toy.head_dim}, {toy.length} tokens"
    # The setting in words, and the paper's number for the most similar one.
    words = {
        "tuned": (f"{shape}; {toy.steps} steps each", "0.1 (heads of 16, 4096 tokens)"),
        "equal_time": (f"equal time: {late} steps of softmax", "not given"),
        "untuned": ("untuned: rate 0.003, embeddings 0.02", "not given"),
        "no_positions": ("without RoPE", "0.12 (32 768 tokens)"),
        "one_wide_head": (f"one head of {size.wide}", "0.012 (heads of 64, 4096 tokens)"),
        "long_context": (f"{size.long} tokens", "0.048 (heads of 64, 32 768 tokens)"),
    }
    rows = [
        [title, *(spread(losses(groups[name][side]), 3) for side in SIDES), gaps[name], paper]
        for name, (title, paper) in words.items()
    ]
    note = (
        "Nats a character, mean ± standard deviation over seeds; differences are taken seed by seed. Tuned for each "
        f"side at {shape}, and kept elsewhere: {chosen}. A step of the long context has as many tokens."
    )
    return table("Loss on unseen text", ["setting", "softmax", "LUCID", "LUCID lower by", "paper"], rows, note=note)
