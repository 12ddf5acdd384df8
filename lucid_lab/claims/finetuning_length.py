"""Fine-tuning length (§4.2): longer tuning helps LUCID more.

Here models are trained at 64 tokens (those of `needle_grid`), tuned at 64, 128 or 256, and tested at all of these.
The control, softmax attention with a token shift, learns the task too.
"""

from collections.abc import Sequence
from dataclasses import replace

from ..toys.arms import SHIFT, Group, Trained, arm, train_arms
from ..toys.lab import Lab
from ..toys.results import Claim, Conclusion, lines, series, table
from ..toys.training import train
from . import needle_grid

CLAIM = Claim(
    title="Longer tuning helps LUCID more",
    section="4.2",
    says="The gap between LUCID and standard attention grows with the sequence length of fine-tuning.",
    paper="gap +19.8 % tuned at 32K, +47.3 % tuned at 64K",
)
CONTROL = f"softmax+{SHIFT.key}"
TOY, LENGTHS, STEPS = needle_grid.TOY, (64, 128, 256), 200
TINY_TOY, TINY_LENGTHS, TINY_STEPS = needle_grid.TOY.but(**needle_grid.TINY), (64, 96), 2


def judge(gaps: Sequence[float], controls: Sequence[float]) -> str:
    """The verdict, from LUCID's lead over softmax attention and over the control, by length of tuning.

    "does not hold": the lead over softmax attention does not grow. "holds": it grows, and longer tuning also puts LUCID
    further ahead of the control. Otherwise "partly".
    """
    if gaps[-1] <= gaps[0]:
        return "does not hold"
    return "holds" if beats_control(controls) else "partly"


def beats_control(controls: Sequence[float]) -> bool:
    """Whether longer tuning puts LUCID further ahead of the control."""
    return controls[-1] > max(0.0, controls[0])


def run(lab: Lab) -> Conclusion:
    """The gap at the longest test, for every length of tuning."""
    toy, lengths, steps = (TINY_TOY, TINY_LENGTHS, TINY_STEPS) if lab.tiny else (TOY, LENGTHS, STEPS)
    softmax = toy.but(attention="softmax")
    before = train_arms(lab, {"": [arm(toy), arm(softmax), arm(softmax, SHIFT, "control")]})[""]
    tuned = tune(lab, before, lengths, steps)

    longest = lengths[-1]
    scores = {key: [one.mean_accuracy(longest) for one in by_length.values()] for key, by_length in tuned.items()}
    gaps, controls = (
        [ours.mean - theirs.mean for ours, theirs in zip(scores["lucid"], scores[key], strict=True)]
        for key in ("softmax", CONTROL)
    )
    by_length = ", ".join(f"{gap:+.1f} tuned at {length}" for length, gap in zip(lengths, gaps, strict=True))
    because = (
        f"Tested at {longest} tokens, LUCID minus softmax in points: {by_length}; minus softmax with a token shift: "
        + ", ".join(f"{gap:+.1f}" for gap in controls)
        + ("." if beats_control(controls) else ": that is at least as good, so it is not LUCID that is needed.")
    )
    curves = [series(one.arm.label, one.arm.role, lengths, scores[key]) for key, one in before.items()]
    return Conclusion(
        ours=f"gap {by_length} (points, at {longest} tokens)",
        verdict=judge(gaps, controls),
        because=because,
        seeds=len(lab.seeds),
        figures=[
            lines(f"Tested at {longest} tokens", "length of tuning", "accuracy, %", curves, range=(0, 100)),
        ],
        tables=[
            table(
                f"Tested at {longest}, {steps} steps of tuning, accuracy %",
                ["", *map(str, lengths)],
                [[one.arm.label, *scores[key]] for key, one in before.items()],
            ),
            table(
                "Before tuning, at the length of training, accuracy %",
                ["", "accuracy"],
                [[one.arm.label, one.mean_accuracy(toy.length)] for one in before.values()],
            ),
        ],
    )


def tune(lab: Lab, before: Group, lengths: Sequence[int], steps: int) -> dict[str, dict[int, Trained]]:
    """Every arm tuned at every length, each seed from its own weights. A step has equally many tokens everywhere."""
    toys = {}
    for key, start in before.items():
        for length in lengths:
            toy = start.arm.toy
            batch = max(2, toy.batch * toy.length // length)
            toys[key, length] = toy.but(length=length, batch=batch, steps=steps, rate=1e-3, test_lengths=tuple(lengths))
    settings = {
        (key, length): [
            toy.but(seed=seed, start=record["folder"])
            for seed, record in zip(lab.seeds, before[key].records, strict=True)
        ]
        for (key, length), toy in toys.items()
    }
    records = lab.map_groups(train, settings, title="tuning")
    return {
        key: {length: Trained(replace(start.arm, toy=toys[key, length]), records[key, length]) for length in lengths}
        for key, start in before.items()
    }
