"""A contest of attentions on a task of words: each with its own learning rate, at equal steps and at equal time.

Used by `needle_lm` and `babilong`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lucid_attention.nn.attention import ATTENTIONS

from .arms import EQUAL_TIME, Arm, Group, Trained, arm, train_arms
from .lab import HOURS, Lab
from .results import Spread, Table, lead, outcome, spread, table
from .training import Toy, train

# The seed of the trials that look for a rate: none of those that are compared.
TRIAL_SEED = 100
# Two layers of attention without MLPs, whose keys and values also see the token before. In trials with MLPs, softmax
# attention did not get beyond a value of any needle in 420 steps, where the trial ended; without them it did after 300.
WORDS_TOY = Toy(layers=2, token_shift=True, test_batch=64)


@dataclass(frozen=True)
class Contest:
    """The arms of a claim, at `--scale hours`.

    toy: the settings that all arms share. attentions: names in ATTENTIONS.
    rates, trial_steps: every attention takes the best of these rates, found with TRIAL_SEED in `trial_steps` steps.
    pairs: (faster, slower): the faster attention is also trained for as long as the slower one takes.
    """

    toy: Toy
    attentions: tuple[str, ...]
    rates: tuple[float, ...]
    trial_steps: int
    pairs: tuple[tuple[str, str], ...]

    def at(self, lab: Lab) -> "Contest":
        """The contest at a scale. Below `--scale hours` it has half the steps, and one rate without trials."""
        if lab.scale == HOURS:
            return self
        toy = self.toy.but(steps=self.toy.steps // 2)
        if lab.tiny:
            toy = toy.but(steps=len(toy.stages), batch=2, test_batch=2, test_lengths=toy.test_lengths[:2])
        return replace(self, toy=toy, rates=self.rates[:1])


def run_contest(lab: Lab, contest: Contest) -> Group:
    """Train every attention at its best rate; then the faster ones of `pairs` for the time of the slower ones."""
    arms = [arm(contest.toy.but(attention=name)) for name in contest.attentions]
    arms = best_rates(lab, arms, contest.rates, contest.trial_steps)
    group = train_arms(lab, {"": arms})[""]
    late = [late_arm(group[fast], group[slow]) for fast, slow in contest.pairs]
    return group | train_arms(lab, {"": late})[""]


def best_rates(lab: Lab, arms: Sequence[Arm], rates: Sequence[float], steps: int) -> list[Arm]:
    """The arms, each with the rate whose training loss is the lowest after a trial of so many steps.

    A diverged trial is the worst. One rate needs no trials.
    """
    trials = {
        one.key: [one.toy.but(rate=rate, steps=steps, seed=TRIAL_SEED, test_lengths=()) for rate in rates]
        for one in arms
        if len(rates) > 1
    }
    best = {one.key: rates[0] for one in arms}
    for key, records in lab.map_groups(train, trials, title="learning rates").items():
        losses = [record["curve"]["loss"][-1] for record in records]
        best[key] = min(zip(losses, rates, strict=True), key=lambda pair: (pair[0] is None, pair[0]))[1]
    return [replace(one, toy=one.toy.but(rate=best[one.key])) for one in arms]


def late_arm(fast: Trained, slow: Trained) -> Arm:
    """The faster arm with the steps that fit into the processor time of the slower one."""
    ratio = max(1.0, round(slow.seconds / max(fast.seconds, 1e-9), 2))
    toy = fast.arm.toy.but(steps=round(fast.arm.toy.steps * ratio))
    change = f"the time of {ATTENTIONS[slow.arm.toy.attention].title}"
    return replace(fast.arm, key=f"{fast.arm.key}+{EQUAL_TIME}", role="control", toy=toy, change=change)


def mean_score(one: Trained, ns: Sequence[int], lengths: Sequence[int]) -> Spread:
    """The mean accuracy over all pairs of n and length, in percent, over seeds."""
    cells = [one.values(n, length) for n in ns for length in lengths]
    return spread(sum(values) / len(values) for values in zip(*cells, strict=True))


def judge_against(ours: Spread, standard: Mapping[str, Spread], others: Mapping[str, Spread], floor: float) -> str:
    """The verdict from scores in percent.

    standard: of softmax attention, at equal steps, then at equal time. others: of the other baselines.
    floor: if no score is above it, nothing was learned, and nothing is judged.
    "holds": clearly ahead of all. Against softmax attention the rule is `lead`; not ahead of all others: "partly".
    """
    if max(score.mean for score in (ours, *standard.values(), *others.values())) <= floor:
        return "too small to judge"
    steps, *time = (outcome(ours, score) for score in standard.values())
    verdict = lead(steps, time[-1] if time else steps)
    beaten = all(outcome(ours, score) == "ahead" for score in others.values())
    return "partly" if verdict == "holds" and not beaten else verdict


def contest_table(title: str, group: Group, n_title: str, names: Sequence[str], note: str) -> Table:
    """A row for every arm and n, a column for every length. n_title, names: what n is, and the names of its values."""
    rows = []
    for one in group.values():
        toy = one.arm.toy
        for n, name in zip(toy.test_n, names, strict=True):
            scores = [one.accuracy(n, length) for length in toy.test_lengths]
            rows.append([one.arm.label, name, *scores, toy.steps, toy.rate, round(one.seconds)])
    lengths = next(iter(group.values())).arm.toy.test_lengths
    columns = ["attention", n_title, *(f"{length} tokens" for length in lengths), "steps", "rate", "seconds"]
    return table(title, columns, rows, note=note)
