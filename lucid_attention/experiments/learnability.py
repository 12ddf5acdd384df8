"""§2.2, sequential task learning: does LUCID keep the gradients that a sharp softmax loses?

The paper trains one layer with one head of 256 on ten digits, first to copy them, then, with the weights it has, to
average all digits so far. Its claim: to copy, standard attention lowers the off-diagonal entries of its softmax
Jacobian diag(a) − a aᵀ by about 10³ and then does not adapt to the average; LUCID keeps them and "rapidly adapts to the
new task, achieving low loss within a few thousand steps".

Two protocols: ours (rotary positions, digits drawn with repeats, Adam 1e-3, 1200 + 400 steps of 32) and that of the
published script (no positions, permutations of the digits, Adam 1e-4, 30 000 + 10 000 steps of 64). The weights are
kept at the switch, Adam begins anew; a task counts as learned at a squared error below 0.1. Controls: a layer norm
before the attention, and embeddings of std 1. J is the mean of a_j a_k over rows and pairs j ≠ k of keys they see.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..analysis.jacobian import jacobians
from ..nn.attention import ATTENTIONS
from ..nn.causal import split_heads
from .engine.jobs import Job, Record, Work
from .engine.result import Claim, Conclusion, Figure, Spread, Table, lines, series, spread, table
from .engine.steps import Step
from .engine.study import Done

CLAIM = Claim(
    title="Copying does not cost LUCID its gradients",
    section="2.2",
    says="Learning to copy makes the softmax of standard attention so sharp that its Jacobian vanishes, and it cannot "
    "learn another task afterwards; LUCID is sharp through its preconditioner, keeps the Jacobian and adapts.",
    paper="off-diagonal Jacobian of standard attention falls ~10³× in phase 1 and its loss remains high in phase 2; "
    "LUCID adapts within a few thousand steps",
)

DIGITS, LENGTH, WIDTH = 10, 10, 256
# Fixed before any run: a loss that counts as learned. Copying in place of averaging is 5.8, the digits' variance 8.25.
LEARNED = 0.1
NAMES = {"softmax": "standard", "lucid": "LUCID"}
# Sequences for the loss, and those of them for the Jacobians, which take longer.
TESTED, LOOKED_AT, TEST_SEED = 128, 16, 1_000_003


@dataclass(frozen=True)
class TwoTasks:
    """A run: to copy, then to average. every: steps between two measurements of loss and Jacobian."""

    attention: str
    rope: bool = True
    permutations: bool = False
    layer_norm: bool = False
    embedding_std: float = 0.02
    rate: float = 1e-3
    batch: int = 32
    copy_steps: int = 1200
    average_steps: int = 400
    every: int = 10
    width: int = WIDTH
    seed: int = 0

    def job(self, label: str = "", milliseconds: float = 4.0) -> Job:
        """Its training. milliseconds: about how long a step takes, measurements included."""
        seconds = (self.copy_steps + self.average_steps) * milliseconds / 1000
        return Job("learnability:train_two_tasks", asdict(self), label or f"two tasks, {self.attention}", seconds)


class OneLayer(nn.Module):
    """Embedding, one head of attention, one number out of each position. No residual, no MLP, a norm if asked for."""

    def __init__(self, run: TwoTasks) -> None:
        super().__init__()
        self.embedding = nn.Embedding(DIGITS, run.width)
        nn.init.normal_(self.embedding.weight, std=run.embedding_std)
        self.norm = nn.LayerNorm(run.width) if run.layer_norm else nn.Identity()
        self.attention = ATTENTIONS[run.attention](run.width, 1, rope_base=10_000.0 if run.rope else None)
        self.out = nn.Linear(run.width, 1)

    def forward(self, digits: Tensor) -> Tensor:
        """digits: [B, T] -> [B, T].

        The same as `out(attention(norm(embedding(digits))))`, several times faster: there are only ten different tokens
        to project, and the two linear maps at the end are one vector.
        """
        tokens, inner = self.norm(self.embedding.weight), self.attention
        q, k, v = (
            split_heads(F.embedding(digits, project(tokens)), self.embedding.embedding_dim)
            for project in (inner.q_proj, inner.k_proj, inner.v_proj)
        )
        if inner.rotary is not None:
            positions = torch.arange(digits.shape[-1])
            q, k = inner.rotary(q, positions), inner.rotary(k, positions)
        o, _ = inner.attend(F.embedding(digits, tokens), q, k, v, None, None, None)
        y: Tensor = o[:, 0] @ (inner.o_proj.weight.mT @ self.out.weight[0]) + self.out.bias
        return y


def draw(size: int, permutations: bool, generator: torch.Generator) -> Tensor:
    """Digits [size, LENGTH]: with repeats, or each of them once."""
    if permutations:
        return torch.rand(size, DIGITS, generator=generator).argsort(-1)
    return torch.randint(DIGITS, (size, LENGTH), generator=generator)


def copied(digits: Tensor) -> Tensor:
    """Phase 1: [B, T] -> [B, T]."""
    return digits.float()


def averaged(digits: Tensor) -> Tensor:
    """Phase 2, the mean of all digits so far: [B, T] -> [B, T]."""
    return digits.float().cumsum(-1) / torch.arange(1, digits.shape[-1] + 1)


def train_two_tasks(work: Work, **settings: Any) -> Record:
    """The job: loss and Jacobians of both phases on sequences that are always the same."""
    run = TwoTasks(**settings)
    torch.manual_seed(run.seed)
    model = OneLayer(run)
    tested = draw(TESTED, run.permutations, torch.Generator().manual_seed(TEST_SEED))
    generator = torch.Generator().manual_seed(run.seed)
    record: dict[str, list[Any]] = {"step": [], "loss": [], "off_diagonal": [], "query_jacobian": []}
    seconds = 0.0
    for first, steps, task in ((0, run.copy_steps, copied), (run.copy_steps, run.average_steps, averaged)):
        optimizer = torch.optim.Adam(model.parameters(), lr=run.rate, fused=True)
        for step in range(steps + 1):
            if step % run.every == 0 or step == steps:
                measure(record, model, tested, task(tested), first + step)
            if step == steps:
                break
            began = time.perf_counter()
            digits = draw(run.batch, run.permutations, generator)
            loss = F.mse_loss(model(digits), task(digits))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seconds += time.perf_counter() - began
    return {**record, "milliseconds": 1000 * seconds / (run.copy_steps + run.average_steps)}


@torch.no_grad()
def measure(record: dict[str, list[Any]], model: OneLayer, digits: Tensor, wanted: Tensor, step: int) -> None:
    """Write down where the model is. The step of the switch stands twice: with the loss of either task."""
    found = jacobians(model, digits[:LOOKED_AT])
    record["step"].append(step)
    record["loss"].append(F.mse_loss(model(digits), wanted).item())
    for name in ("off_diagonal", "query_jacobian"):
        record[name].append(statistics.fmean(each[name] for each in found))


@dataclass(frozen=True)
class Protocol:
    """What is compared: runs that differ in their attention alone."""

    name: str
    run: TwoTasks
    control: bool = False

    def job(self, attention: str, seed: int) -> Job:
        """Its training with an attention and a seed."""
        run = replace(self.run, attention=attention, seed=seed)
        milliseconds = (3.0 if attention == "softmax" else 5.5) + 30 / run.every
        return run.job(f"{self.name}, {NAMES[attention]}, seed {seed}", milliseconds)


OURS = TwoTasks("softmax")
# Two to four minutes a run: most of the time of this experiment.
PUBLISHED = TwoTasks(
    "softmax",
    rope=False,
    permutations=True,
    rate=1e-4,
    batch=64,
    copy_steps=30_000,
    average_steps=10_000,
    every=250,
)


def protocols(scale: str) -> list[Protocol]:
    """Ours, the published one, and the controls."""
    ours, published = OURS, PUBLISHED
    if scale == "smoke":
        tiny: dict[str, Any] = {"copy_steps": 4, "average_steps": 4, "every": 2, "batch": 2, "width": 16}
        ours, published = replace(ours, **tiny), replace(published, **tiny)
    return [
        Protocol("ours", ours),
        Protocol("published script", published),
        Protocol("ours, layer norm", replace(ours, layer_norm=True), control=True),
        Protocol("ours, embeddings of std 1", replace(ours, embedding_std=1.0), control=True),
    ]


def seeds(scale: str) -> Sequence[int]:
    """One is enough to see that it runs."""
    return (0,) if scale == "smoke" else (0, 1, 2)


def plan(scale: str, done: Done) -> list[Job]:
    """Every protocol with both attentions and every seed."""
    return [each.job(name, seed) for each in protocols(scale) for seed in seeds(scale) for name in NAMES]


@dataclass(frozen=True)
class Outcome:
    """What one attention did in a protocol, over seeds.

    fall: by what factor J is smaller at the end of phase 1 than at its beginning.
    adapted: steps of phase 2 until the loss is below LEARNED, a seed each; None where it never was.
    """

    fall: Spread
    copy_loss: Spread
    average_loss: Spread
    adapted: tuple[int | None, ...]
    query_jacobian: tuple[Spread, Spread]
    milliseconds: Spread

    @property
    def copies(self) -> bool:
        """Whether it learned phase 1."""
        return self.copy_loss.mean < LEARNED

    @property
    def steps(self) -> float | None:
        """Mean steps to adapt; None if a seed never did."""
        known = [each for each in self.adapted if each is not None]
        return statistics.fmean(known) if len(known) == len(self.adapted) else None

    def told(self) -> str:
        """Steps to adapt as text."""
        known = [each for each in self.adapted if each is not None]
        if len(known) == len(self.adapted):
            return f"{spread(known, 0)} steps"
        reached = f"loss {self.average_loss.mean:.2g} at the end"
        return f"{len(known)} of {len(self.adapted)} seeds ({reached})" if known else f"never ({reached})"


def outcome(protocol: Protocol, attention: str, chosen: Sequence[int], done: Done) -> Outcome:
    """Read the records of a protocol."""
    records = [done[protocol.job(attention, seed)] for seed in chosen]
    # The first of the two records of the step of the switch is the end of phase 1.
    at = records[0]["step"].index(protocol.run.copy_steps)
    return Outcome(
        fall=spread(each["off_diagonal"][0] / each["off_diagonal"][at] for each in records),
        copy_loss=spread((each["loss"][at] for each in records), 4),
        average_loss=spread((each["loss"][-1] for each in records), 4),
        adapted=tuple(adaptation(each, protocol.run.copy_steps) for each in records),
        query_jacobian=(
            spread((each["query_jacobian"][0] for each in records), 4),
            spread((each["query_jacobian"][at] for each in records), 4),
        ),
        milliseconds=spread(each["milliseconds"] for each in records),
    )


def adaptation(record: Record, switch: int) -> int | None:
    """Steps after the switch until the loss is below LEARNED, or None."""
    at = record["step"].index(switch) + 1
    below = zip(record["step"][at:], record["loss"][at:], strict=True)
    return next((step - switch for step, loss in below if loss < LEARNED), None)


Outcomes = Mapping[str, Mapping[str, Outcome]]

# "Approximately three orders of magnitude", rounded down to half an order.
VANISHED = 300.0
PARTS = (
    "both learn to copy",
    "standard J falls about 10³×",
    "LUCID keeps a higher J",
    "standard does not adapt",
    "LUCID adapts",
    "LUCID adapts sooner",
)


def parts(softmax: Outcome, lucid: Outcome) -> dict[str, bool]:
    """Which parts of the claim are true in a protocol."""
    both = softmax.copies and lucid.copies
    never = all(each is None for each in softmax.adapted)
    # A Jacobian that stays because copying was not learned is no merit.
    keeps = both and lucid.fall.mean + lucid.fall.std < softmax.fall.mean - softmax.fall.std
    sooner = lucid.steps is not None and (softmax.steps is None or lucid.steps < softmax.steps)
    truths = (both, softmax.fall.mean >= VANISHED, keeps, never, lucid.steps is not None, sooner)
    return dict(zip(PARTS, truths, strict=True))


def judged(found: Sequence[Mapping[str, bool]]) -> str:
    """All parts in all protocols; or LUCID ahead in something in one of them."""
    if all(all(each.values()) for each in found):
        return "holds"
    ahead = any(each["LUCID keeps a higher J"] or each["LUCID adapts sooner"] for each in found)
    return "partly" if ahead else "does not hold"


def conclude(scale: str, done: Done) -> Conclusion:
    """Loss and Jacobian of both protocols, and what is left of the effect in the controls."""
    chosen, shown = seeds(scale), protocols(scale)
    outcomes = {each.name: {name: outcome(each, name, chosen, done) for name in NAMES} for each in shown}
    main = [each for each in shown if not each.control]
    found = {each.name: parts(**outcomes[each.name]) for each in main}
    ours = outcomes["ours"]
    told = {name: f"{ours[name].fall}×, adapts: {ours[name].told()}" for name in NAMES}
    return Conclusion(
        ours=f"J of standard attention falls {told['softmax']}; of LUCID {told['lucid']}",
        verdict="too small to judge" if scale == "smoke" else judged(list(found.values())),
        because=explained(shown, outcomes, found),
        seeds=len(chosen),
        figures=[figure for each in main for figure in curves(each, chosen, done)],
        tables=[numbers(shown, outcomes), answers(found), theorem(outcomes)],
    )


def explained(shown: Sequence[Protocol], outcomes: Outcomes, found: Mapping[str, Mapping[str, bool]]) -> str:
    """Two sentences for the protocols and one for the controls."""
    said = []
    for each in shown:
        softmax, lucid = (outcomes[each.name][name] for name in NAMES)
        said.append(
            f"{each.name}: J falls {softmax.fall}× against {lucid.fall}× with LUCID, to adapt takes {softmax.told()} "
            f"against {lucid.told()}"
        )
    missing = [part for part in PARTS if not all(truths[part] for truths in found.values())]
    ending = f" Not seen in both protocols: {', '.join(missing)}." if missing else ""
    return f"{'; '.join(said)}.{ending}"


def curves(protocol: Protocol, chosen: Sequence[int], done: Done) -> list[Figure]:
    """Loss and J against steps, as in the paper's figure: geometric means over seeds."""
    figures = []
    switch = protocol.run.copy_steps
    for measure, label in (("loss", "squared error"), ("off_diagonal", "J, mean of a_j a_k")):
        drawn = []
        for name in NAMES:
            records = [done[protocol.job(name, seed)] for seed in chosen]
            y = [statistics.geometric_mean(values) for values in zip(*(each[measure] for each in records), strict=True)]
            drawn.append(series(NAMES[name], name, records[0]["step"], y))
        title = f"{'Loss' if measure == 'loss' else 'Off-diagonal Jacobian'}: {protocol.name}"
        note = f"Geometric mean of {len(chosen)} seeds."
        figures.append(lines(title, "training step", label, drawn, log="y", marks=[(switch, "task switch")], note=note))
    return figures


def numbers(shown: Sequence[Protocol], outcomes: Outcomes) -> Table:
    """A row for every protocol and attention."""
    rows = [
        [each.name, NAMES[name], got.fall, got.copy_loss, got.told(), got.average_loss, got.milliseconds]
        for each in shown
        for name, got in outcomes[each.name].items()
    ]
    columns = ["protocol", "attention", "J falls ×", "loss, copy", "to adapt", "loss, average", "ms a step"]
    note = (
        f"To adapt: until the loss is below {LEARNED} after the switch. The time of a step depends on what else runs."
    )
    return table("After each phase", columns, rows, note=note)


def answers(found: Mapping[str, Mapping[str, bool]]) -> Table:
    """The claim, part by part."""
    rows = [[part, *("yes" if truths[part] else "no" for truths in found.values())] for part in PARTS]
    return table("The claim, part by part", ["", *found], rows)


def theorem(outcomes: Outcomes) -> Table:
    """‖∂o/∂q‖ of the paper's theorem: it says that it is not zero, not how large it is."""
    rows = [
        [protocol, NAMES[name], *got.query_jacobian]
        for protocol, found in outcomes.items()
        for name, got in found.items()
    ]
    note = "o: weights of the values, before they are multiplied with V. Mean over queries and sequences."
    return table("‖∂o/∂q‖ of the theorem", ["protocol", "attention", "at the start", "after copying"], rows, note=note)


def paper() -> list[Step]:
    """The paper's experiment is this small itself."""
    return [Step(("experiment", "learnability", "--scale", "small"))]
