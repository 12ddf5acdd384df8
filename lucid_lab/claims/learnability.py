"""§2.2, sequential task learning: does LUCID keep the gradients that a sharp softmax loses?

The paper trains one layer with one head of 256 on ten digits, first to copy them, then, with these weights, to average
all digits so far. Its claim: to copy, standard attention lowers the off-diagonal entries of its softmax Jacobian
diag(a) − a aᵀ by about 10³ and then does not adapt; LUCID keeps them and "rapidly adapts to the new task".

Two protocols are judged. Ours: rotary positions, digits drawn with repeats, Adam 1e-3, 1200 + 400 steps of 32, Adam
begins anew at the switch. That of the authors' script (saisuryadv/LUCID, synthetic_phase2_extension): no positions,
permutations of the digits, one Adam of 1e-4 for both phases, 30 000 + 10 000 steps of 64, Xavier weights, a linear head
on the context without an output projection, a gain in the key norm of P; its J is the mean |∂L/∂scores| over the mean
|∂L/∂weights| below the diagonal. Controls: its sizes with our module and our J ("after the script"), a layer norm
before the attention, embeddings of std 1. Our J is the mean of a_j a_k over queries and pairs j ≠ k of visible keys. A
task counts as learned at a squared error below 0.1.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lucid_attention.nn.attention import ATTENTIONS
from lucid_attention.nn.causal import split_heads

from ..analysis.jacobian import jacobians
from ..toys.lab import Lab, Record
from ..toys.results import Claim, Conclusion, Figure, Spread, Table, lines, series, spread, table
from ..toys.training import training_loop

CLAIM = Claim(
    title="Copying does not cost LUCID its gradients",
    section="2.2",
    says="Learning to copy makes the softmax of standard attention so sharp that its Jacobian vanishes, and it cannot "
    "learn another task afterwards; LUCID is sharp through its preconditioner, keeps the Jacobian and adapts.",
    paper="off-diagonal Jacobian of standard attention falls ~10³× in phase 1 and its loss remains high in phase 2; "
    "LUCID adapts within a few thousand steps",
)

DIGITS, LENGTH, WIDTH = 10, 10, 256
# Fixed before any run: a loss below this counts as learned. Copying instead of averaging has a loss of 5.8.
LEARNED = 0.1
NAMES = {"softmax": "standard", "lucid": "LUCID"}
# Sequences for the loss; the first few of them for the Jacobians, which take longer.
LOSS_SEQUENCES, JACOBIAN_SEQUENCES, TEST_SEED = 128, 16, 1_000_003


@dataclass(frozen=True)
class TwoTasks:
    """A run: first copy, then average. every: steps between two measurements of loss and Jacobian.

    script: the model, the optimiser and the J of the authors' script.
    """

    attention: str
    script: bool = False
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


class OneLayer(nn.Module):
    """Embedding, one head of attention, one number for each position. No residual, no MLP; a norm as an option."""

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
        x = F.embedding(digits, tokens)
        o = inner.finish(x, inner.attend(x, q, k, v, None, None, None)[0], v)
        y: Tensor = o[:, 0] @ (inner.o_proj.weight.mT @ self.out.weight[0]) + self.out.bias
        return y


class ScriptLayer(nn.Module):
    """The model of the authors' script: no output projection, Xavier, and for LUCID a gain in the key norm of P."""

    def __init__(self, run: TwoTasks) -> None:
        super().__init__()
        self.embedding = nn.Embedding(DIGITS, run.width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(run.width, run.width, bias=False) for _ in range(3))
        self.out = nn.Linear(run.width, 1)
        for linear in (self.q_proj, self.k_proj, self.v_proj, self.out):
            nn.init.xavier_uniform_(linear.weight)
        nn.init.zeros_(self.out.bias)
        self.key_norm = nn.RMSNorm(run.width) if run.attention == "lucid" else None

    def forward(self, digits: Tensor) -> Tensor:
        """digits: [B, T] -> [B, T]. `scores` and `weights`, [B, T, T], are those of the last call."""
        x, root = self.embedding(digits), math.sqrt(self.embedding.embedding_dim)
        q, k, y = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        hidden = torch.ones(digits.shape[-1], digits.shape[-1]).triu(1).bool()
        if self.key_norm is not None:
            k_rn = self.key_norm(k)
            P = (k_rn @ k_rn.mT / root - root).masked_fill(hidden, -math.inf).exp()
            y = torch.linalg.solve_triangular(P, y, upper=False, unitriangular=True)
        self.scores = (q @ k.mT / root).masked_fill(hidden, -math.inf)
        self.weights = self.scores.softmax(-1)
        answers: Tensor = self.out(self.weights @ y)[..., 0]
        return answers

    def gradient_ratio(self, digits: Tensor, answers: Tensor) -> float:
        """The script's Jacobian: mean |∂L/∂scores| over mean |∂L/∂weights|, below the diagonal."""
        with torch.enable_grad():
            loss = F.mse_loss(self(digits), answers)
            below = torch.ones_like(self.scores[0]).tril(-1).bool()
            scores, weights = torch.autograd.grad(loss, (self.scores, self.weights))
        return (scores[:, below].abs().mean() / (weights[:, below].abs().mean() + 1e-10)).item()


def draw(size: int, permutations: bool, generator: torch.Generator) -> Tensor:
    """Digits [size, LENGTH]: independent ones, or permutations of all digits."""
    if permutations:
        return torch.rand(size, DIGITS, generator=generator).argsort(-1)
    return torch.randint(DIGITS, (size, LENGTH), generator=generator)


def copied(digits: Tensor) -> Tensor:
    """Phase 1: [B, T] -> [B, T]."""
    return digits.float()


def averaged(digits: Tensor) -> Tensor:
    """Phase 2, the mean of all digits so far: [B, T] -> [B, T]."""
    return digits.float().cumsum(-1) / torch.arange(1, digits.shape[-1] + 1)


def train_two_tasks(folder: Path, run: TwoTasks) -> Record:
    """Loss and Jacobians of both phases, measured on sequences that never change."""
    torch.manual_seed(run.seed)
    model = ScriptLayer(run) if run.script else OneLayer(run)
    tested = draw(LOSS_SEQUENCES, run.permutations, torch.Generator().manual_seed(TEST_SEED))
    generator = torch.Generator().manual_seed(run.seed)
    record: dict[str, list[Any]] = {"step": [], "loss": [], "off_diagonal": [], "query_jacobian": []}
    seconds = 0.0
    one_adam = torch.optim.Adam(model.parameters(), lr=run.rate)
    for first, steps, task in ((0, run.copy_steps, copied), (run.copy_steps, run.average_steps, averaged)):

        def loss(step: int, task: Callable[[Tensor], Tensor] = task) -> Tensor:
            digits = draw(run.batch, run.permutations, generator)
            return F.mse_loss(model(digits), task(digits))

        adam = one_adam if run.script else torch.optim.Adam(model.parameters(), lr=run.rate, fused=True)
        training = training_loop(steps, loss, adam)
        for step in range(steps + 1):
            if step % run.every == 0 or step == steps:
                measure(record, model, tested, task(tested), first + step)
            start = time.perf_counter()
            next(training, None)
            seconds += time.perf_counter() - start
    return {**record, "milliseconds": 1000 * seconds / (run.copy_steps + run.average_steps)}


@torch.no_grad()
def measure(
    record: dict[str, list[Any]], model: OneLayer | ScriptLayer, digits: Tensor, answers: Tensor, step: int
) -> None:
    """Add loss and Jacobians to the record. It holds the step of the switch twice, once with the loss of each task."""
    record["step"].append(step)
    record["loss"].append(F.mse_loss(model(digits), answers).item())
    if isinstance(model, ScriptLayer):
        record["off_diagonal"].append(model.gradient_ratio(digits, answers))
        return
    by_query = jacobians(model, digits[:JACOBIAN_SEQUENCES])
    for name in ("off_diagonal", "query_jacobian"):
        record[name].append(statistics.fmean(jacobian[name] for jacobian in by_query))


OURS = TwoTasks("softmax")
# A run takes two to four minutes: most of the time of this claim.
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
# The first two are judged, the others are controls.
PROTOCOLS = {
    "ours": OURS,
    "authors": replace(PUBLISHED, script=True),
    "after the script": PUBLISHED,
    "ours, layer norm": replace(OURS, layer_norm=True),
    "ours, embeddings of std 1": replace(OURS, embedding_std=1.0),
}
JUDGED = ("ours", "authors")
TINY: dict[str, Any] = {"copy_steps": 4, "average_steps": 4, "every": 2, "batch": 2, "width": 16}


@dataclass(frozen=True)
class Outcome:
    """One attention in one protocol, over seeds.

    fall: J at the beginning of phase 1 over J at its end. rise: the largest J of phase 2 over J at the switch.
    adapted: steps of phase 2 until the loss is below LEARNED, for every seed; None for a seed that never gets there.
    query_jacobian: at the start and after copying; None for the authors' model.
    """

    fall: Spread
    rise: Spread
    copy_loss: Spread
    average_loss: Spread
    adapted: tuple[int | None, ...]
    query_jacobian: tuple[Spread | None, Spread | None]
    milliseconds: Spread

    @property
    def copies(self) -> bool:
        """Whether the attention learned to copy."""
        return self.copy_loss.mean < LEARNED

    @property
    def steps(self) -> float | None:
        """Mean steps to adapt; None if a seed never adapted."""
        steps = [count for count in self.adapted if count is not None]
        return statistics.fmean(steps) if len(steps) == len(self.adapted) else None

    def adaptation_text(self) -> str:
        """The steps to adapt in words, or the number of seeds that adapted."""
        steps = [count for count in self.adapted if count is not None]
        if len(steps) == len(self.adapted):
            return f"{spread(steps, 0)} steps"
        end_loss = f"loss {self.average_loss.mean:.2g} at the end"
        return f"{len(steps)} of {len(self.adapted)} seeds ({end_loss})" if steps else f"never ({end_loss})"


def outcome(records: Sequence[Record], switch: int) -> Outcome:
    """Read the records of one attention in one protocol, one for every seed. switch: the last step of phase 1."""
    # The step of the switch is recorded twice; its first record is the end of phase 1.
    end = records[0]["step"].index(switch)
    has_norms = bool(records[0]["query_jacobian"])
    J = [record["off_diagonal"] for record in records]
    return Outcome(
        fall=spread(values[0] / values[end] for values in J),
        rise=spread(max(values[end + 1 :]) / values[end] for values in J),
        copy_loss=spread((record["loss"][end] for record in records), 4),
        average_loss=spread((record["loss"][-1] for record in records), 4),
        adapted=tuple(adaptation(record, switch) for record in records),
        query_jacobian=(
            spread((record["query_jacobian"][0] for record in records), 4) if has_norms else None,
            spread((record["query_jacobian"][end] for record in records), 4) if has_norms else None,
        ),
        milliseconds=spread(record["milliseconds"] for record in records),
    )


def adaptation(record: Record, switch: int) -> int | None:
    """Steps after the switch until the loss is below LEARNED, or None."""
    start = record["step"].index(switch) + 1
    phase_2 = zip(record["step"][start:], record["loss"][start:], strict=True)
    return next((step - switch for step, loss in phase_2 if loss < LEARNED), None)


# By protocol, then by attention.
Outcomes = Mapping[str, Mapping[str, Outcome]]

# The paper says "approximately three orders of magnitude": at least two and a half.
VANISHED = 300.0
# The parts of the claim.
PARTS = {
    "copy": "both learn to copy",
    "vanishes": "standard J falls about 10³×",
    "keeps": "LUCID keeps a higher J",
    "rises": "LUCID's J rises after the switch",
    "stuck": "standard does not adapt",
    "adapts": "LUCID adapts",
    "sooner": "LUCID adapts sooner",
}


def parts(softmax: Outcome, lucid: Outcome) -> dict[str, bool]:
    """Which of PARTS are true in a protocol."""
    both_copy = softmax.copies and lucid.copies
    return {
        "copy": both_copy,
        "vanishes": softmax.fall.mean >= VANISHED,
        # A model that has not learned to copy keeps its Jacobian for free.
        "keeps": both_copy and lucid.fall.mean + lucid.fall.std < softmax.fall.mean - softmax.fall.std,
        "rises": lucid.rise.mean - lucid.rise.std > 1,
        "stuck": all(steps is None for steps in softmax.adapted),
        "adapts": lucid.steps is not None,
        "sooner": lucid.steps is not None and (softmax.steps is None or lucid.steps < softmax.steps),
    }


def judge(all_truths: Sequence[Mapping[str, bool]]) -> str:
    """The verdict, from the parts of both protocols: all are true in both, or LUCID is ahead in one protocol."""
    if all(all(truths.values()) for truths in all_truths):
        return "holds"
    lucid_ahead = any(truths["keeps"] or truths["sooner"] for truths in all_truths)
    return "partly" if lucid_ahead else "does not hold"


def run(lab: Lab) -> Conclusion:
    """Loss and Jacobian in both protocols and in the controls."""
    protocols = {title: replace(tasks, **TINY) if lab.tiny else tasks for title, tasks in PROTOCOLS.items()}
    settings = {
        (title, name): [replace(tasks, attention=name, seed=seed) for seed in lab.seeds]
        for title, tasks in protocols.items()
        for name in NAMES
    }
    records = lab.map_groups(train_two_tasks, settings, title="two tasks")
    outcomes = {
        title: {name: outcome(records[title, name], tasks.copy_steps) for name in NAMES}
        for title, tasks in protocols.items()
    }
    held = {title: parts(**outcomes[title]) for title in JUDGED}
    ours = {name: f"{result.fall}×, adapts: {result.adaptation_text()}" for name, result in outcomes["ours"].items()}
    rows = [[words, *("yes" if truths[part] else "no" for truths in held.values())] for part, words in PARTS.items()]
    return Conclusion(
        ours=f"J of standard attention falls {ours['softmax']}; of LUCID {ours['lucid']}",
        verdict=judge(list(held.values())),
        because=explain(outcomes, held),
        seeds=len(lab.seeds),
        figures=[
            curves(title, {name: records[title, name] for name in NAMES}, measure, protocols[title].copy_steps)
            for title in JUDGED
            for measure in ("loss", "off_diagonal")
        ],
        tables=[numbers(outcomes), table("The claim, part by part", ["", *held], rows)],
    )


def explain(outcomes: Outcomes, held: Mapping[str, Mapping[str, bool]]) -> str:
    """The reason for the verdict: J and adaptation in every protocol, and the parts that are missing."""
    sentences = []
    for title, by_name in outcomes.items():
        softmax, lucid = (by_name[name] for name in NAMES)
        sentences.append(
            f"{title}: J falls {softmax.fall}× against {lucid.fall}× with LUCID, to adapt takes "
            f"{softmax.adaptation_text()} against {lucid.adaptation_text()}"
        )
    missing = [words for part, words in PARTS.items() if not all(truths[part] for truths in held.values())]
    ending = f" Not seen in both protocols: {', '.join(missing)}." if missing else ""
    return f"{'; '.join(sentences)}.{ending}"


def curves(title: str, records: Mapping[str, Sequence[Record]], measure: str, switch: int) -> Figure:
    """Loss or J against steps as in the paper's figure, as geometric means over seeds."""
    heading, label = {
        "loss": ("Loss", "squared error"),
        "off_diagonal": ("Off-diagonal Jacobian", "J, mean of a_j a_k"),
    }[measure]
    plots = []
    for name, by_seed in records.items():
        points = zip(*(record[measure] for record in by_seed), strict=True)
        plots.append(series(NAMES[name], name, by_seed[0]["step"], [statistics.geometric_mean(p) for p in points]))
    note, marks = f"Geometric mean of {len(by_seed)} seeds.", [(switch, "task switch")]
    return lines(f"{heading}: {title}", "training step", label, plots, log="y", marks=marks, note=note)


def numbers(outcomes: Outcomes) -> Table:
    """A row for every protocol and attention."""
    rows = [
        [
            title,
            NAMES[name],
            result.fall,
            result.rise,
            result.copy_loss,
            result.adaptation_text(),
            result.average_loss,
            *result.query_jacobian,
            result.milliseconds,
        ]
        for title, by_name in outcomes.items()
        for name, result in by_name.items()
    ]
    norm = "‖∂o/∂q‖"
    columns = ["protocol", "attention", "J falls ×", "then rises ×", "loss, copy", "to adapt", "loss, average"]
    return table(
        "After each phase",
        [*columns, f"{norm} at the start", f"{norm} after copying", "ms a step"],
        rows,
        note=f"To adapt: until the loss is below {LEARNED} after the switch. {norm} is that of the paper's theorem, "
        "which says that it is not zero, but not how large it is; o: weights of the values, before they are multiplied "
        "with V; mean over queries and sequences. Other programs lengthen the time of a step.",
    )
