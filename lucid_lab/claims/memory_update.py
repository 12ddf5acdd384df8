"""Memory update (A.4): the latest value of a key wins.

The paper: "when the same key appears multiple times in a sequence, DeltaNet can overwrite the old value with the new
one … LUCID inherits this capability through its derivation from the same delta rule in RKHS". It gives no number.

Here one layer learns the task `overwrites`: a few keys are written again and again and then asked for. A token holds a
key and its value, so one layer is enough; the task `memory_update` of `lucid train` spells the pair as two tokens and
needs two layers. Softmax attention without positions does not see the order of the tokens, so no weights let it find
the last write.
"""

from functools import partial

from lucid_attention.nn.attention import ATTENTIONS

from .engine.jobs import Job
from .engine.result import Claim, Conclusion, Table, table
from .engine.scale import QUICK, Scale
from .engine.steps import Step, at_small_scale
from .engine.study import Done
from .engine.verdict import as_at_small_scale
from .small.contestants import (
    EQUAL_TIME,
    LARGE_EMBEDDINGS,
    LEARNED_SHARPNESS,
    SHIFT,
    Contestant,
    accuracy,
    accuracy_bars,
    accuracy_maps,
    accuracy_table,
    against_rivals,
    by_key,
    contestant,
    equal_time,
    family,
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
PAPER_NUMBERS, judge_paper = as_at_small_scale("memory_update")
# Accuracies in percent: the least of LUCID at every n; the most of softmax without positions at n = 8, where a key is
# written seven times.
SOLVED, BLIND = 99.0, 25.0

RUN = SmallRun(task="overwrites", test_lengths=(64, 128, 256))
WITH_MLP = RUN.but(heads=1, head_dim=64, mlp=2.0)
FEW = ("softmax", "lucid", "delta")
# The contestants of the short demonstration.
BRIEF = {*FEW, f"softmax+{SHIFT.key}", f"softmax+{EQUAL_TIME}"}


def judge(lucid: float, blind: float, ahead: bool, ahead_of_others: bool = True) -> str:
    """The verdict, from accuracies at the length of training.

    lucid: LUCID's lowest accuracy at any n, with and without positions and with MLPs. blind: the accuracy of softmax
    without positions. ahead: LUCID's mean accuracy is above that of softmax at equal time in all three.
    ahead_of_others: with positions it is clearly above that of PaTH, DeltaNet and Diff.
    """
    if not ahead:
        return "does not hold"
    return "holds" if lucid >= SOLVED and blind <= BLIND and ahead_of_others else "partly"


def settings(scale: Scale) -> tuple[SmallRun, SmallRun]:
    """The runs without and with an MLP."""
    if scale.tiny:
        small = {"steps": 4, "batch": 4, "test_batch": 8, "test_lengths": (64,)}
        return RUN.but(**small), WITH_MLP.but(**small)
    return RUN, WITH_MLP


def groups(scale: Scale, done: Done) -> dict[str, list[Contestant]]:
    """The contestants: with positions, without, with an MLP. Softmax at equal time joins once the times are known."""
    run, mlp = settings(scale)
    no_positions = run.but(rope=False)
    softmax, blind, softmax_mlp = (base.but(attention="softmax") for base in (run, no_positions, mlp))
    names = tuple(ATTENTIONS) if scale.every_attention else FEW
    found = {
        "positions": [
            *family(run, names),
            contestant(softmax, SHIFT, "control"),
            contestant(softmax, LARGE_EMBEDDINGS, "control"),
            *equal_time(run, softmax, done),
        ],
        "no_positions": [
            *family(no_positions, [name for name in names if ATTENTIONS[name].takes_rotary]),
            contestant(blind, SHIFT, "control"),
            *equal_time(no_positions, blind, done),
        ],
        "mlp": [
            contestant(softmax_mlp),
            contestant(mlp),
            contestant(mlp, LEARNED_SHARPNESS),
            contestant(softmax_mlp, LARGE_EMBEDDINGS, "control"),
            *equal_time(mlp, softmax_mlp, done),
        ],
    }
    if scale != QUICK:
        return found
    return {name: [member for member in group if member.key in BRIEF] for name, group in found.items()}


def timings(scale: Scale) -> dict[str, Job]:
    """The time of a step of LUCID over that of softmax, by the title of the setting."""
    run, mlp = settings(scale)
    runs = {"RoPE": run, "no positions": run.but(rope=False), "MLP, head of 64": mlp}
    return {title: timing(lucid, lucid.but(attention="softmax")) for title, lucid in runs.items()}


def plan(scale: Scale, done: Done) -> list[Job]:
    """Every contestant with every seed."""
    trained = [job for group in groups(scale, done).values() for job in training(group, scale.seeds)]
    return [*timings(scale).values(), *trained]


def conclude(scale: Scale, done: Done) -> Conclusion:
    """LUCID must solve the task everywhere, and softmax attention without positions must be blind."""
    run, _ = settings(scale)
    seeds, length, longest = scale.seeds, run.length, run.test_lengths[-1]
    by_setting = groups(scale, done)
    lucid = {name: by_key(group)["lucid"] for name, group in by_setting.items()}
    late = {name: by_key(group)[f"softmax+{EQUAL_TIME}"] for name, group in by_setting.items()}
    late_accuracy = {name: mean_accuracy(done, member, seeds, length) for name, member in late.items()}
    lowest = min(worst(done, member, seeds, length) for member in lucid.values())
    n = run.test_n[len(run.test_n) // 2]
    blind = accuracy(done, by_key(by_setting["no_positions"])["softmax"], seeds, n, length)
    ahead = all(
        mean_accuracy(done, member, seeds, length).mean > late_accuracy[name].mean for name, member in lucid.items()
    )
    (ahead_of_others, here), (_, there) = (
        against_rivals(by_key(by_setting["positions"]), partial(mean_accuracy, done, seeds=seeds, length=at))
        for at in (length, longest)
    )
    solved = f"at the length of training LUCID {lowest:.1f} % or more at every n, with and without RoPE and with MLPs"
    because = (
        f"{solved[0].upper()}{solved[1:]}; softmax without positions {blind} % at n = {n}, and "
        f"{late_accuracy['positions']} % with RoPE at equal time, {late_accuracy['mlp']} % with an MLP and a head of "
        "64 at equal time."
    )
    if here:
        because += f" With positions, mean over n: {here} Trained at {length} and tested at {longest} tokens: {there}"
    return Conclusion(
        ours=f"{solved}; softmax {blind} % (no positions, n = {n})",
        verdict=judge(lowest, blind.mean, ahead, ahead_of_others),
        because=because,
        seeds=len(seeds),
        figures=[
            accuracy_bars(
                "Without positions: one layer",
                done,
                by_setting["no_positions"],
                seeds,
                length,
                guess=True,
                note="The guess names any value of the asked key, with equal chances: the more often keys are written, "
                "the less it gets.",
            ),
            accuracy_maps(
                f"Trained at {length} tokens, tested at up to {longest}",
                done,
                by_setting["positions"],
                seeds,
                "keys",
                note="With rotary positions, or those of the attention itself. All have the same settings, which were "
                "chosen for softmax attention and LUCID: the linear ones, with a state of 16 × 16, were not tuned.",
            ),
            accuracy_bars("With an MLP and a head of 64", done, by_setting["mlp"], seeds, length),
        ],
        tables=[
            accuracy_table("No positions, accuracy %", done, by_setting["no_positions"], seeds, length),
            accuracy_table("With positions, accuracy %", done, by_setting["positions"], seeds, length),
            accuracy_table(f"The same, tested at {longest} tokens", done, by_setting["positions"], seeds, longest),
            accuracy_table("With an MLP and a head of 64, accuracy %", done, by_setting["mlp"], seeds, length),
            accuracy_table(f"The same, tested at {longest} tokens", done, by_setting["mlp"], seeds, longest),
            step_times(scale, done),
        ],
    )


def step_times(scale: Scale, done: Done) -> Table:
    """Milliseconds of a training step of LUCID and of softmax attention."""
    rows = []
    for title, job in timings(scale).items():
        record = done[job]
        rows.append([title, *(round(value, 2) for value in (*record["milliseconds"], record["ratio"]))])
    return table("Time of a training step, in turn, one thread", ["", "LUCID, ms", "softmax, ms", "ratio"], rows)


def paper() -> list[Step]:
    """The paper gives no number for this claim, so the full scale is the small one."""
    return [at_small_scale("memory_update")]
