"""Attentions beside each other on text, at `--scale hours`: own rates, equal steps, equal time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lucid_attention.nn.attention import ATTENTIONS

from ..engine.jobs import Job
from ..engine.result import Figure, Spread, Table, lines, series, spread, table
from ..engine.study import Done
from ..small.contestants import EQUAL_TIME, Contestant, accuracy
from .sizes import MILLISECONDS, Size
from .training import StagedRun

# The seed of the runs that look for a rate: none of those that are compared.
TUNING_SEED = 100


@dataclass(frozen=True)
class Contest:
    """All runs of a size."""

    size: Size
    seeds: tuple[int, ...]

    def job(self, run: StagedRun, label: str) -> Job:
        """The job of a run, with its estimated duration."""
        tokens = sum(length for length, _ in run.stages) / max(1, len(run.stages)) * run.batch
        return run.job(label, MILLISECONDS.get(run.attention, 20.0) * tokens / 1024)

    def tuning_runs(self, arm: str) -> list[StagedRun]:
        """The short runs that look for a rate."""
        base = replace(self.size.run, attention=arm, steps=self.size.tuning, seed=TUNING_SEED, test_lengths=())
        return [replace(base, rate=rate) for rate in self.size.rates]

    def tuning(self, arm: str) -> list[Job]:
        """The jobs that look for a rate. A single rate needs none."""
        if len(self.size.rates) == 1:
            return []
        title = ATTENTIONS[arm].title
        return [self.job(run, f"{title}, rate {run.rate:g}") for run in self.tuning_runs(arm)]

    def rate(self, arm: str, done: Done) -> float | None:
        """The rate with the lowest loss at the end of the short runs; None before they are done."""
        jobs = self.tuning(arm)
        if not jobs:
            return self.size.rates[0]
        if not all(job in done for job in jobs):
            return None
        losses = [done[job]["curve"]["loss"][-1] for job in jobs]
        return min(zip(losses, self.size.rates, strict=True), key=lambda pair: (pair[0] is None, pair[0]))[1]

    def member(self, arm: str, done: Done) -> Contestant | None:
        """An arm with its rate."""
        rate = self.rate(arm, done)
        if rate is None:
            return None
        run = replace(self.size.run, attention=arm, rate=rate)
        return Contestant(arm, ATTENTIONS[arm].title, arm, run)

    def longer(self, done: Done) -> list[Contestant]:
        """The faster arms with the time of the slower ones, where the times are known and differ."""
        members = []
        for fast, slow in self.size.longer:
            pair = [self.member(arm, done) for arm in (fast, slow)]
            if any(member is None or any(member.job(seed) not in done for seed in self.seeds) for member in pair):
                continue
            times = [self.seconds(member, done) for member in pair if member]
            steps = round(self.size.run.steps * max(1.0, round(times[1] / max(times[0], 1e-9), 2)))
            member = pair[0]
            assert member is not None
            title = f"the time of {ATTENTIONS[slow].title}"
            run = replace(self.size.run, attention=fast, rate=member.run.rate, steps=steps)
            members.append(Contestant(f"{fast}+{EQUAL_TIME}", member.title, "control", run, title))
        return members

    def seconds(self, member: Contestant, done: Done) -> float:
        """Seconds of the processor for the training of an arm, mean over seeds."""
        return spread(done[member.job(seed)]["seconds"] for seed in self.seeds).mean

    def plan(self, done: Done) -> list[Job]:
        """Rates; then every arm with every seed; then equal time."""
        jobs = [job for arm in self.size.arms for job in self.tuning(arm)]
        for arm in self.size.arms:
            member = self.member(arm, done)
            if member is not None:
                jobs += [self.job(_staged(member, seed), f"{member.label}, seed {seed}") for seed in self.seeds]
        for member in self.longer(done):
            jobs += [self.job(_staged(member, seed), f"{member.label}, seed {seed}") for seed in self.seeds]
        return jobs

    def members(self, done: Done) -> list[Contestant]:
        """Every arm, and those with more time."""
        arms = [self.member(arm, done) for arm in self.size.arms]
        return [member for member in arms if member is not None] + self.longer(done)

    def score(self, done: Done, member: Contestant, ns: Sequence[int], lengths: Sequence[int]) -> Spread:
        """The mean accuracy over cells, in percent, over seeds."""
        cells = [
            [
                test["accuracy"]
                for test in done[member.job(seed)]["tests"]
                if test["n"] in ns and test["length"] in lengths
            ]
            for seed in self.seeds
        ]
        return spread(sum(values) / len(values) for values in cells)

    def curves(self, done: Done, title: str) -> Figure:
        """The training loss against steps."""
        drawn = []
        for member in self.members(done):
            curves = [done[member.job(seed)]["curve"] for seed in self.seeds]
            means = [spread(losses, 3) for losses in zip(*(curve["loss"] for curve in curves), strict=True)]
            values, deviations = [loss.mean for loss in means], [loss.std for loss in means]
            drawn.append(
                series(
                    member.label,
                    member.role,
                    curves[0]["step"],
                    values,
                    spread=deviations,
                    dashed=bool(member.change),
                )
            )
        return lines(
            title, "step", "loss of the answers, nats", drawn, note="Mean over seeds. Stages follow each other."
        )

    def table(self, done: Done, title: str, columns: Sequence[str], note: str = "") -> Table:
        """A row for every arm and n; accuracies by length. columns: what n is called, and the names of its values."""
        lengths, ns = self.size.run.test_lengths, self.size.run.test_n
        rows = []
        for member in self.members(done):
            for n, name in zip(ns, columns[1:], strict=True):
                scores = [accuracy(done, member, self.seeds, n, length) for length in lengths]
                seconds = round(self.seconds(member, done))
                rows.append([member.label, name, *scores, member.run.steps, member.run.rate, seconds])
        heads = ["attention", columns[0], *(f"{length} tokens" for length in lengths), "steps", "rate", "seconds"]
        return table(title, heads, rows, note=note)


def _staged(member: Contestant, seed: int) -> StagedRun:
    run = member.seed(seed)
    assert isinstance(run, StagedRun)
    return run
