"""Memory update (A.4): the latest value of a key wins.

The paper: "when the same key appears multiple times in a sequence, DeltaNet can overwrite the old value with the new
one … LUCID inherits this capability through its derivation from the same delta rule in RKHS". It gives no number.

One layer reads sequences in which a few keys are written over and over, and then asked for (`overwrites`). Softmax
attention without positions cannot know which write was the last: it is blind to order, whatever its weights.
"""

from collections.abc import Sequence

from ..nn.attention import ATTENTIONS
from .engine.jobs import Job
from .engine.result import Claim, Conclusion, table
from .engine.steps import Step
from .engine.study import Done
from .small.contestants import (
    Contestant,
    accuracy,
    accuracy_bars,
    accuracy_maps,
    accuracy_table,
    family,
    given_the_time_of,
    mean_accuracy,
    timing,
    training,
    worst,
)
from .small.training import SmallRun

CLAIM = Claim(
    title="The latest value of a key wins",
    section="A.4",
    says="LUCID inherits from the delta rule the ability to overwrite: when a key appears several times, the old value "
    "is erased and the new one written.",
    paper="no number given",
)
# LUCID at every n; softmax without positions at n = 8, where a key is written seven times.
SOLVED, BLIND = 99.0, 25.0

RUN = SmallRun(task="overwrites", test_lengths=(64, 128, 256))
WITH_MLP = RUN.but(heads=1, head_dim=64, mlp=2.0)


def settings(scale: str) -> tuple[SmallRun, SmallRun, Sequence[int]]:
    """The runs without and with an MLP, and the seeds."""
    if scale == "smoke":
        small = {"steps": 4, "batch": 4, "test_batch": 8, "test_lengths": (64,)}
        return RUN.but(**small), WITH_MLP.but(**small), (0,)
    return RUN, WITH_MLP, (0, 1) if scale == "quick" else (0, 1, 2)


def groups(scale: str, done: Done) -> dict[str, list[Contestant]]:
    """The contestants that are known."""
    run, mlp, _ = settings(scale)
    names = ("softmax", "lucid", "delta") if scale in ("smoke", "quick") else tuple(ATTENTIONS)
    base, base_mlp = (each.but(attention="softmax") for each in (run, mlp))
    blind = base.but(rope=False)
    late = [
        given_the_time_of(run, base, done, "softmax, equal time"),
        given_the_time_of(run.but(rope=False), blind, done, "softmax, equal time"),
        given_the_time_of(mlp, base_mlp, done, "softmax, equal time"),
    ]
    learned = {"sharpness": 4.0, "learn_sharpness": True}
    found = {
        "positions": [
            *family(run, names),
            Contestant("softmax, token shift", "control", base.but(token_shift=True)),
            Contestant("softmax, embeddings of size 1", "control", base.but(embedding_std=1.0)),
        ],
        "none": [
            *family(run.but(rope=False), [name for name in names if ATTENTIONS[name].takes_rotary]),
            Contestant("softmax, token shift", "control", blind.but(token_shift=True)),
        ],
        "mlp": [
            Contestant("softmax", "softmax", base_mlp),
            Contestant("LUCID", "lucid", mlp),
            Contestant("LUCID, learned sharpness from 4", "lucid", mlp.but(options=learned)),
            Contestant("softmax, embeddings of size 1", "control", base_mlp.but(embedding_std=1.0)),
        ],
    }
    for group, contestant in zip(found.values(), late, strict=True):
        group += [contestant] if contestant else []
    return found


def plan(scale: str, done: Done) -> list[Job]:
    """Every contestant with every seed; softmax at equal time when that is known."""
    run, mlp, seeds = settings(scale)
    times = [timing(each, each.but(attention="softmax")) for each in (run, run.but(rope=False), mlp)]
    return [*times, *(job for group in groups(scale, done).values() for job in training(group, seeds))]


def conclude(scale: str, done: Done) -> Conclusion:
    """LUCID must solve it everywhere, and softmax attention must be blind without positions."""
    run, _, seeds = settings(scale)
    found = groups(scale, done)
    length, longest = run.length, run.test_lengths[-1]
    named = {key: {each.name: each for each in group} for key, group in found.items()}
    lowest = {key: worst(done, group["LUCID"], seeds, length) for key, group in named.items()}
    solved = min(lowest.values()) >= SOLVED
    n = run.test_n[len(run.test_n) // 2]
    blind = accuracy(done, named["none"]["softmax"], seeds, n, length)
    ahead = all(
        mean_accuracy(done, group["LUCID"], seeds, length).mean
        > mean_accuracy(done, group["softmax, equal time"], seeds, length).mean
        for group in named.values()
    )
    verdict = "holds" if solved and blind.mean <= BLIND and ahead else "partly" if ahead else "does not hold"
    reached = f"LUCID {min(lowest.values()):.1f} % or more at every n, with and without RoPE and with MLPs"
    because = (
        f"{reached}; softmax without positions {blind} % at n = {n}, and "
        + ", ".join(
            f"{mean_accuracy(done, named[key]['softmax, equal time'], seeds, length)} % {where} at equal time"
            for key, where in (("positions", "with RoPE"), ("mlp", "with an MLP and a head of 64"))
        )
        + f". Trained at {length}, tested at {longest}: see the maps."
    )
    return Conclusion(
        ours=f"{reached}; softmax {blind} % (no positions, n = {n})",
        verdict="too small to judge" if scale == "smoke" else verdict,
        because=because,
        seeds=len(seeds),
        figures=[
            accuracy_bars(
                "Without positions: one layer",
                done,
                found["none"],
                seeds,
                length,
                guess=True,
                note="The guess names any value of the asked key, with equal chances: the more often keys are written, "
                "the less it gets.",
            ),
            accuracy_maps(
                f"Trained at {length} tokens, tested at up to {longest}",
                done,
                found["positions"],
                seeds,
                "keys",
                note="With rotary positions, or those of the attention itself. All have the same settings, which were "
                "chosen for softmax attention and LUCID: the linear ones, with a state of 16 × 16, were not tuned.",
            ),
            accuracy_bars("With an MLP and a head of 64", done, found["mlp"], seeds, length),
        ],
        tables=[
            accuracy_table("No positions, accuracy %", done, found["none"], seeds, length),
            accuracy_table("With positions, accuracy %", done, found["positions"], seeds, length),
            accuracy_table(f"The same, tested at {longest} tokens", done, found["positions"], seeds, longest),
            accuracy_table("With an MLP and a head of 64, accuracy %", done, found["mlp"], seeds, length),
            accuracy_table(f"The same, tested at {longest} tokens", done, found["mlp"], seeds, longest),
            step_times(scale, done),
        ],
    )


def step_times(scale: str, done: Done) -> dict[str, object]:
    """What a step of LUCID costs."""
    run, mlp, _ = settings(scale)
    rows = []
    for name, each in (("RoPE", run), ("no positions", run.but(rope=False)), ("MLP, head of 64", mlp)):
        record = done[timing(each, each.but(attention="softmax"))]
        rows.append([name, *(round(value, 2) for value in (*record["milliseconds"], record["ratio"]))])
    return table("Time of a training step, in turn, one thread", ["", "LUCID, ms", "softmax, ms", "ratio"], rows)


def paper() -> list[Step]:
    """The paper has no such experiment: this one is its own full scale."""
    return [Step(("experiment", "memory_update", "--scale", "small"))]
