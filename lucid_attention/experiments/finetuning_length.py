"""Fine-tuning length (§4.2): longer tuning helps LUCID more.

The paper: "The performance gap between LUCID and Standard Attention increases from +19.8% (32K finetuning) to +47.3%
(64K finetuning)", on contexts of 2K to 8K and 2K to 32K.

Here models are trained at 64 tokens (those of `needle_grid`), tuned at 64, 128 or 256, and tested at all of these.
Beside softmax attention as it is stands one with a token shift, which learns the task too.
"""

from collections.abc import Sequence
from dataclasses import asdict

from . import needle_grid
from .engine.jobs import Job
from .engine.result import Claim, Conclusion, Spread, heatmaps, lines, series, spread, table
from .engine.steps import Step, evaluate, train, tune
from .engine.study import Done
from .small.contestants import Contestant, mean_accuracy, reached, training
from .small.training import SmallRun

CLAIM = Claim(
    title="Longer tuning helps LUCID more",
    section="4.2",
    says="The gap between LUCID and standard attention grows with the sequence length of fine-tuning.",
    paper="gap +19.8 % tuned at 32K, +47.3 % tuned at 64K",
)


def settings(scale: str) -> tuple[SmallRun, tuple[int, ...], int, Sequence[int]]:
    """The run before tuning, lengths of tuning, its steps, and the seeds."""
    if scale == "smoke":
        small = {"steps": 2, "batch": 2, "test_batch": 2, "test_lengths": (64,)}
        return needle_grid.RUN.but(**small), (64, 96), 2, (0,)
    return needle_grid.RUN, (64, 128, 256), 200, (0, 1, 2)


def before(scale: str) -> list[Contestant]:
    """As they are before tuning: jobs of `needle_grid`."""
    run = settings(scale)[0]
    softmax = run.but(attention="softmax")
    return [
        Contestant("LUCID", "lucid", run),
        Contestant("softmax", "softmax", softmax),
        Contestant("softmax, token shift", "control", softmax.but(token_shift=True)),
    ]


def tuned(scale: str, contestant: Contestant, length: int, seed: int) -> Contestant:
    """Tuned at a length, from its run with the same seed. The same tokens a step at every length."""
    run, lengths, steps, _ = settings(scale)
    start = contestant.seed(seed)
    batch = max(2, run.batch * run.length // length)
    changes = {"length": length, "batch": batch, "steps": steps, "rate": 1e-3, "test_lengths": lengths}
    run = contestant.run.but(**changes, start=asdict(start))
    return Contestant(f"{contestant.name}, tuned at {length}", contestant.role, run)


def plan(scale: str, done: Done) -> list[Job]:
    """First the training, then the tuning."""
    _, lengths, _, seeds = settings(scale)
    first = training(before(scale), seeds)
    if not all(job in done for job in first):
        return first
    later = [tuned(scale, each, n, seed).job(seed) for seed in seeds for n in lengths for each in before(scale)]
    return [*first, *later]


def conclude(scale: str, done: Done) -> Conclusion:
    """The gap at the longest test, for every length of tuning."""
    _, lengths, steps, seeds = settings(scale)
    contestants = before(scale)
    longest = lengths[-1]
    scores = {
        (each.name, n): _over_seeds(scale, done, each, n, longest, seeds) for each in contestants for n in lengths
    }
    gaps = [scores["LUCID", n].mean - scores["softmax", n].mean for n in lengths]
    controls = [scores["LUCID", n].mean - scores["softmax, token shift", n].mean for n in lengths]
    grows, above = gaps[-1] > gaps[0], controls[-1] > max(0.0, controls[0])
    verdict = "holds" if grows and above else "partly" if grows else "does not hold"
    text = ", ".join(f"{gap:+.1f} tuned at {n}" for n, gap in zip(lengths, gaps, strict=True))
    because = (
        f"Tested at {longest} tokens, LUCID minus softmax in points: {text}; minus softmax with a token shift: "
        + ", ".join(f"{gap:+.1f}" for gap in controls)
        + ("." if above else ": that is at least as good, so it is not LUCID that is needed.")
    )
    maps = {}
    for each in contestants:
        values = [[_over_seeds(scale, done, each, n, to, seeds).mean for to in lengths] for n in lengths]
        maps[each.name] = (lengths, lengths, values)
    drawn = [
        series(each.name, each.role, lengths, [scores[each.name, n].mean for n in lengths],
               spread=[scores[each.name, n].std for n in lengths])
        for each in contestants
    ]  # fmt: skip
    rows = [[each.name, *(scores[each.name, n] for n in lengths)] for each in contestants]
    untuned = [[each.name, mean_accuracy(done, each, seeds, each.run.length)] for each in contestants]
    return Conclusion(
        ours=f"gap {text} (points, at {longest} tokens)",
        verdict="too small to judge" if scale == "smoke" else verdict,
        because=because,
        seeds=len(seeds),
        figures=[
            lines(f"Tested at {longest} tokens", "length of tuning", "accuracy, %", drawn, range=(0, 100)),
            heatmaps("Mean over needles", "tuned at", "tested at", maps, range=(0, 100), unit="%"),
        ],
        tables=[
            table(f"Tested at {longest}, {steps} steps of tuning, accuracy %", ["", *map(str, lengths)], rows),
            table("Before tuning, at the length of training, accuracy %", ["", "accuracy"], untuned),
        ],
    )


def _over_seeds(scale: str, done: Done, each: Contestant, length: int, test: int, seeds: Sequence[int]) -> Spread:
    """Accuracy over needles and seeds of what was tuned at one length and is tested at another."""
    ns = each.run.test_n
    values = []
    for seed in seeds:
        contestant = tuned(scale, each, length, seed)
        values.append(sum(reached(done, contestant, seed, n, test) for n in ns) / len(ns))
    return spread(values)


def paper() -> list[Step]:
    """Pretrain, tune at 32K and at 64K, and ask at 2K to 32K."""
    steps = []
    for attention in ("softmax", "lucid"):
        steps.append(train("pretrain_2k", attention))
        for length in (32_768, 65_536):
            out = f"runs/paper/finetune-{length}-{attention}"
            start = f"runs/paper/pretrain_2k-{attention}/model"
            # As many tokens a step at both.
            more = ("--set", f"sequence_length={length}", "--set", f"batch_size={16 * 65_536 // length}")
            steps.append(tune("finetune_64k", start, out, *more, "--parallel", "fsdp"))
            asked = ("--needles", "2,4,6,8,10", "--lengths", "2048,4096,8192,16384,32768", "--samples", "500")
            steps.append(evaluate(f"{out}/model", "mniah", f"results/paper/finetune-{length}-{attention}", *asked))
    return steps
