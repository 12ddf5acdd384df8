"""Memory update (A.4): the latest value of a key wins.

The paper: "when the same key appears multiple times in a sequence, DeltaNet can overwrite the old value with the new
one … LUCID inherits this capability through its derivation from the same delta rule in RKHS". It gives no number.

Here one layer learns the task `overwrites`: a few keys are written again and again and then asked for. A token holds a
key and its value, so one layer is enough. Softmax attention without positions does not see the order of the tokens, so
no weights let it find the last write.
"""

from lucid_attention.nn.attention import ATTENTIONS

from ..toys.arms import (
    EQUAL_TIME,
    LARGE_EMBEDDINGS,
    LEARNED_SHARPNESS,
    SHIFT,
    accuracy_bars,
    accuracy_maps,
    accuracy_table,
    against_rivals,
    arm,
    equal_time,
    family,
    time_ratios,
    train_arms,
)
from ..toys.lab import QUICK, Lab
from ..toys.results import Claim, Conclusion, table
from ..toys.training import Toy

CLAIM = Claim(
    title="The latest value of a key wins",
    section="A.4",
    says="LUCID inherits from the delta rule the ability to overwrite: when a key appears several times, the old value "
    "is erased and the new one written.",
    paper="no number given",
)
# Accuracies in percent: the least of LUCID at every n; the most of softmax without positions at n = 8, where a key is
# written seven times.
SOLVED, BLIND = 99.0, 25.0

TOY = Toy(task="overwrites", test_lengths=(64, 128, 256))
WITH_MLP = TOY.but(heads=1, head_dim=64, mlp=2.0)
TINY = {"steps": 4, "batch": 4, "test_batch": 8, "test_lengths": (64,)}
FEW = ("softmax", "lucid", "delta")
# The arms of the short demonstration.
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


def run(lab: Lab) -> Conclusion:
    """LUCID must solve the task everywhere, and softmax attention without positions must be blind."""
    toy, mlp = (one.but(**TINY) if lab.tiny else one for one in (TOY, WITH_MLP))
    plain = toy.but(rope=False)
    softmax, blind_softmax, softmax_mlp = (one.but(attention="softmax") for one in (toy, plain, mlp))
    names = tuple(ATTENTIONS) if lab.scale.every_attention else FEW
    timings = time_ratios(
        lab, {"RoPE": (toy, softmax), "no positions": (plain, blind_softmax), "MLP, head of 64": (mlp, softmax_mlp)}
    )
    arms = {
        "positions": [
            *family(toy, names),
            arm(softmax, SHIFT, "control"),
            arm(softmax, LARGE_EMBEDDINGS, "control"),
            equal_time(softmax, timings["RoPE"]),
        ],
        "no_positions": [
            *family(plain, [name for name in names if ATTENTIONS[name].takes_rotary]),
            arm(blind_softmax, SHIFT, "control"),
            equal_time(blind_softmax, timings["no positions"]),
        ],
        "mlp": [
            arm(softmax_mlp),
            arm(mlp),
            arm(mlp, LEARNED_SHARPNESS),
            arm(softmax_mlp, LARGE_EMBEDDINGS, "control"),
            equal_time(softmax_mlp, timings["MLP, head of 64"]),
        ],
    }
    if lab.scale == QUICK:
        arms = {name: [member for member in group if member.key in BRIEF] for name, group in arms.items()}
    groups = train_arms(lab, arms)

    length, longest = toy.length, toy.test_lengths[-1]
    lowest = min(group["lucid"].worst(length) for group in groups.values())
    late = {name: group[f"softmax+{EQUAL_TIME}"].mean_accuracy(length) for name, group in groups.items()}
    ahead = all(group["lucid"].mean_accuracy(length).mean > late[name].mean for name, group in groups.items())
    n = toy.test_n[len(toy.test_n) // 2]
    blind = groups["no_positions"]["softmax"].accuracy(n, length)
    ahead_of_others, here = against_rivals(groups["positions"], lambda one: one.mean_accuracy(length))
    _, there = against_rivals(groups["positions"], lambda one: one.mean_accuracy(longest))

    solved = f"at the length of training LUCID {lowest:.1f} % or more at every n, with and without RoPE and with MLPs"
    because = (
        f"{solved[0].upper()}{solved[1:]}; softmax without positions {blind} % at n = {n}, and {late['positions']} % "
        f"with RoPE at equal time, {late['mlp']} % with an MLP and a head of 64 at equal time."
    )
    if here:
        because += f" With positions, mean over n: {here} Trained at {length} and tested at {longest} tokens: {there}"
    time_rows = [
        [title, *(round(value, 2) for value in (*timing["milliseconds"], timing["ratio"]))]
        for title, timing in timings.items()
    ]
    return Conclusion(
        ours=f"{solved}; softmax {blind} % (no positions, n = {n})",
        verdict=judge(lowest, blind.mean, ahead, ahead_of_others),
        because=because,
        seeds=len(lab.seeds),
        figures=[
            accuracy_bars("Without positions: one layer", groups["no_positions"], length),
            accuracy_maps(
                f"Trained at {length} tokens, tested at up to {longest}",
                groups["positions"],
                "keys",
                note="With rotary positions, or those of the attention itself. All have the same settings, which were "
                "chosen for softmax attention and LUCID: the linear ones, with a state of 16 × 16, were not tuned.",
            ),
            accuracy_bars("With an MLP and a head of 64", groups["mlp"], length),
        ],
        tables=[
            accuracy_table("No positions, accuracy %", groups["no_positions"], length),
            accuracy_table("With positions, accuracy %", groups["positions"], length),
            accuracy_table(f"The same, tested at {longest} tokens", groups["positions"], longest),
            accuracy_table("With an MLP and a head of 64, accuracy %", groups["mlp"], length),
            accuracy_table(f"The same, tested at {longest} tokens", groups["mlp"], longest),
            table("Time of a training step, in turn, one thread", ["", "LUCID, ms", "softmax, ms", "ratio"], time_rows),
        ],
    )
