"""Hybrids (A.4): LUCID on the global layers only.

The paper: "In hybrid architectures that combine efficient layers (e.g., sliding window, SSMs) with global attention
layers, LUCID improves the precision of the global layers where retrieval quality is paramount." It gives no number.

Here two layers: a sliding window, then global attention, which is softmax attention or LUCID. Beside them stand two
global layers of either. Needles and overwrites are those of `needle_grid` and `memory_update`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..labels import IGNORED
from .engine.jobs import Job
from .engine.result import Claim, Conclusion, Figure, Spread, bar, bars, spread
from .engine.scale import Scale
from .engine.steps import Step, at_small_scale
from .engine.study import Done
from .engine.verdict import as_at_small_scale
from .small.contestants import EQUAL_TIME, Contestant, accuracy_table, mean_accuracy, training
from .staged.training import StagedRun

CLAIM = Claim(
    title="LUCID on the global layers of a hybrid",
    section="A.4",
    says="In hybrids of efficient layers, such as sliding windows, with global ones, LUCID improves the precision of "
    "the global layers.",
    paper="no number given",
)
PAPER_NUMBERS, judge_paper = as_at_small_scale("hybrid")
WINDOW = 16
# Points that LUCID must be ahead of softmax attention, at equal steps and at equal time.
GAP = 5.0
NEEDLES = StagedRun(task="needles", layers=2, steps=1000, local={"0": WINDOW}, test_lengths=(64, 256), test_batch=64)
SETTINGS = {
    "needles": NEEDLES,
    "needles, MLP": NEEDLES.but(mlp=2.0),
    "overwrites": NEEDLES.but(task="overwrites", steps=500),
}
TITLES = {"softmax": "softmax", "lucid": "LUCID"}


@dataclass(frozen=True)
class Scores:
    """Accuracies of hybrids at the length of training: softmax, softmax with the time of LUCID, LUCID.

    everywhere: two global layers of LUCID.
    """

    softmax: Spread
    equal_time: Spread
    lucid: Spread
    everywhere: Spread

    @property
    def lead(self) -> float:
        """Points by which LUCID is ahead, at equal steps and at equal time."""
        return self.lucid.mean - max(self.softmax.mean, self.equal_time.mean)


def judge(scores: Mapping[str, Scores]) -> str:
    """The verdict: LUCID must be GAP points ahead in every setting; in some, it is "partly"."""
    leads = [setting.lead >= GAP for setting in scores.values()]
    return "holds" if all(leads) else "partly" if any(leads) else "does not hold"


def settings(scale: Scale) -> dict[str, StagedRun]:
    """The hybrid run of every setting."""
    if not scale.tiny:
        return SETTINGS
    small = {"steps": 2, "batch": 2, "test_batch": 2, "test_n": (2, 4), "test_lengths": (64,)}
    return {title: run.but(**small) for title, run in SETTINGS.items()}


def hybrid(run: StagedRun, attention: str) -> Contestant:
    """A sliding window, then global attention."""
    title = f"sliding, then {TITLES[attention]}"
    return Contestant(f"hybrid+{attention}", title, attention, run.but(attention=attention))


def everywhere(run: StagedRun, attention: str) -> Contestant:
    """Two global layers."""
    title = f"{TITLES[attention]} in both layers"
    return Contestant(f"both+{attention}", title, "control", run.but(attention=attention, local={}))


def equal_time(run: StagedRun, scale: Scale, done: Done) -> list[Contestant]:
    """The hybrid of softmax attention with the time of that of LUCID; empty before the times are known."""
    jobs = [hybrid(run, attention).job(seed) for attention in ("softmax", "lucid") for seed in scale.seeds]
    if not all(job in done for job in jobs):
        return []
    softmax, lucid = (
        spread(done[hybrid(run, attention).job(seed)]["seconds"] for seed in scale.seeds).mean
        for attention in ("softmax", "lucid")
    )
    steps = round(run.steps * max(1.0, lucid / max(softmax, 1e-9)))
    longer = run.but(attention="softmax", steps=steps)
    return [Contestant(f"hybrid+{EQUAL_TIME}", "sliding, then softmax", "softmax", longer, "equal time")]


def contestants(run: StagedRun, scale: Scale, done: Done) -> list[Contestant]:
    """The hybrids, and two global layers of either attention."""
    both = [make(run, attention) for make in (hybrid, everywhere) for attention in ("softmax", "lucid")]
    return [*both, *equal_time(run, scale, done)]


def plan(scale: Scale, done: Done) -> list[Job]:
    """Every contestant with every seed."""
    return [job for run in settings(scale).values() for job in training(contestants(run, scale, done), scale.seeds)]


def conclude(scale: Scale, done: Done) -> Conclusion:
    """LUCID's lead in hybrids, and whether it needs LUCID in every layer."""
    scores, tables = {}, []
    for title, run in settings(scale).items():
        members = contestants(run, scale, done)
        at_length = {member.key: mean_accuracy(done, member, scale.seeds, run.length) for member in members}
        scores[title] = Scores(
            at_length["hybrid+softmax"],
            at_length[f"hybrid+{EQUAL_TIME}"],
            at_length["hybrid+lucid"],
            at_length["both+lucid"],
        )
        for length in run.test_lengths:
            tables.append(accuracy_table(f"{title}: {length} tokens, accuracy %", done, members, scale.seeds, length))
    ours = "; ".join(
        f"{title}: sliding + LUCID {score.lucid} %, sliding + softmax {score.softmax} %, at equal time "
        f"{score.equal_time} %, LUCID in both layers {score.everywhere} %"
        for title, score in scores.items()
    )
    overwrites = settings(scale)["overwrites"]
    held = 100 * sum(share_in_window(overwrites, n) for n in overwrites.test_n) / len(overwrites.test_n)
    because = (
        f"Mean over numbers of keys at the length of training. {ours}. A lead counts from {GAP:g} points on. A window "
        f"of {WINDOW} tokens holds the answers of {held:.1f} % of the questions of overwrites: what is not above that "
        "needs no global layer."
    )
    return Conclusion(
        ours=ours,
        verdict=judge(scores),
        because=because,
        seeds=len(scale.seeds),
        figures=[figure(scale, done)],
        tables=tables,
    )


def share_in_window(run: StagedRun, n: int) -> float:
    """The share of questions of overwrites whose key is written within the window, so that the answer is in it."""
    inputs, labels = run.make_task().test(run.test_batch, n, run.length)
    keys, asked = inputs[..., 0], labels != IGNORED
    # before[b, i, j]: token j is a write, and within the window of token i.
    distance = torch.arange(run.length)[:, None] - torch.arange(run.length)
    before = ((distance > 0) & (distance < WINDOW)) & ~asked[:, None, :]
    held = (before & (keys[:, :, None] == keys[:, None, :])).any(-1)
    return held[asked].double().mean().item()


def figure(scale: Scale, done: Done) -> Figure:
    """Accuracies at the length of training."""
    groups = {
        title: [
            bar(member.label, member.role, mean_accuracy(done, member, scale.seeds, run.length))
            for member in contestants(run, scale, done)
        ]
        for title, run in settings(scale).items()
    }
    note = f"Two layers, a window of {WINDOW} tokens, heads of 16; mean over numbers of keys."
    return bars("A sliding window, then global attention", "accuracy, %", groups, range=(0, 100), note=note)


def paper() -> list[Step]:
    """The paper has no such experiment, so the full scale is the small one."""
    return [at_small_scale("hybrid")]
