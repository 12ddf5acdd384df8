"""A pretrained model moves to LUCID (not in the paper): overwrites and needles, against softmax attention.

The upper layers of a checkpoint learn logs, "Anna now has the key.", at whose end the latest thing counts, and keep
ordinary text: a step has some logs, with the loss of their answers, and a sequence of text, with the loss of every
token. Trained are the attention weights of these layers. The layers below are frozen; their output is computed once for
all arms, and no arm's time has it. LUCID in the same layers starts as exactly the original model: a gate per head, the
strength s of P = I + s·L, is learned from 0, its sharpness from √D. Keys of P are the model's (raw), minus their mean,
or whitened, both calibrated on ordinary text.

Sizes, rates and the rule were fixed before any run of LUCID, with softmax attention alone (seed 100): after 30 steps of
3e-4 it named 83, 42 and 22 % of the latest things at 1, 4 and 16 times the writes of training, and 62 % of needles;
3e-4 and 1e-3 were level after 20 (losses of the logs 0.89 and 0.86). About 40 core-minutes.

Predicted before the runs: whitened LUCID is ahead of softmax attention where the writes are four times those of
training and more, at no loss on text; raw keys are worst.
"""

import hashlib
import math
import statistics
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lucid_attention import enable_lucid
from lucid_attention.models.checkpoint import checkpoint_sha256, load_config, load_model, load_tokenizer

from ..data import IGNORED
from ..toys.lab import Lab, Record
from ..toys.results import Claim, Conclusion, Spread, Table, explain_against, outcome, spread, table
from ..toys.training import training_loop

CLAIM = Claim(
    title="A pretrained model moves to LUCID and gains",
    section="not in the paper",
    says="After the same tokens and the same time, a pretrained model with LUCID in its upper layers answers "
    "overwrites and needles better than with softmax attention, also with 4 and 16 times the writes, at no loss on "
    "text.",
    paper="none",
)
# A loss on text within these nats of softmax attention is level. Nothing is judged below this percentage of answers.
LEVEL, FLOOR = 0.05, 20.0
SOFTMAX, RAW, CENTRED, WHITENED = "softmax", "raw", "centred", "whitened"
LATE = "softmax, the time of LUCID"
TITLES = {SOFTMAX: "softmax"} | {keys: f"LUCID, {keys} keys" for keys in (RAW, CENTRED, WHITENED)}
MAPS: dict[str, dict[str, Any]] = {
    RAW: {},
    CENTRED: {"center": "calibrated"},
    WHITENED: {"center": "calibrated", "whiten": True},
}
NAMES = (
    *("Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Ivan", "James", "Kate", "Leo", "Maria"),
    *("Nick", "Oscar", "Paul", "Rachel", "Sam", "Tom", "Victor", "Alice", "Bob", "Carl", "Diana", "Eric", "George"),
)
THINGS = (
    *("key", "book", "map", "ring", "coin", "lamp", "letter", "stone", "cup", "knife", "rope", "clock", "ball", "shoe"),
    *("hat", "box", "pen", "flag", "bell", "rose", "drum", "fish", "cake", "glass", "watch", "phone", "bag", "apple"),
)
# The seed of the trials that look for a rate, and of the tests.
TRIAL_SEED, TEST_SEED = 100, 1_000_003


@dataclass(frozen=True)
class Cell:
    """Logs of one kind: so many names, writes, and tokens of ordinary text between the writes."""

    names: int
    writes: int
    text: int = 0

    def __str__(self) -> str:
        return f"{self.names} names, {self.writes} writes" + (f", {self.text} tokens of text" if self.text else "")


@dataclass(frozen=True)
class Tuning:
    """A training that continues from a checkpoint, and its tests.

    model, sha256, texts, texts_sha256: folders of the checkpoint and of ordinary texts, and their hashes.
    keys: SOFTMAX, or a name in MAPS. first: the lowest trained layer.
    logs, trained: logs of a step, and their cell. text: tokens of a step's ordinary text, and of a held-out one.
    rate: of the attention weights. gate_rate, sharpness_rate: of LUCID's gates and sharpness.
    marks: steps after which the model is tested; the last one ends the training. cells: (cell, logs) of the tests.
    """

    model: str
    sha256: str
    texts: str
    texts_sha256: str
    keys: str = SOFTMAX
    first: int = 18
    logs: int = 4
    trained: Cell = Cell(6, 18)
    text: int = 128
    rate: float = 3e-4
    gate_rate: float = 0.03
    sharpness_rate: float = 0.1
    seed: int = 0
    warm_up: int = 4
    marks: tuple[int, ...] = (40,)
    cells: tuple[tuple[Cell, int], ...] = (
        (Cell(6, 18), 12),
        (Cell(6, 72), 10),
        (Cell(6, 288), 4),
        (Cell(8, 8, 900), 5),
    )
    test_texts: int = 12
    calibration: int = 2048


def lacks(lab: Lab) -> str | None:
    """What has to be given: a model and texts."""
    how = "python tools/get_smollm2.py models/smollm2; python tools/get_texts.py models/texts; then --model and --texts"
    if not lab.model or not lab.texts:
        return f"no --model and --texts were given ({how}; any checkpoint of a decoder and any folder of .txt will do)"
    if not (Path(lab.model) / "config.json").is_file():
        return f"--model {lab.model} is no checkpoint: it has no config.json ({how})"
    if not text_files(lab.texts):
        return f"--texts {lab.texts} holds no .txt files ({how})"
    return None


def text_files(folder: str) -> list[tuple[str, Path]]:
    """(name, file) of all texts below a folder, sorted by name."""
    root = Path(folder)
    return sorted((path.relative_to(root).as_posix(), path) for path in root.rglob("*.txt") if path.is_file())


def texts_sha256(folder: str) -> str:
    """A hash of the names and sizes of the texts below a folder."""
    names = "\n".join(f"{name} {path.stat().st_size}" for name, path in text_files(folder))
    return hashlib.sha256(names.encode()).hexdigest()[:16]


class Data:
    """Logs and ordinary text as tokens. Every tenth text, by a hash of its name, is for tests alone."""

    def __init__(self, run: Tuning) -> None:
        self.tokenizer = load_tokenizer(run.model)
        files = text_files(run.texts)
        self.files = {
            test: [path for name, path in files if (zlib.crc32(name.encode()) % 10 == 0) == test]
            for test in (False, True)
        }

    def ids(self, text: str) -> list[int]:
        """The tokens of a text, without special ones."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def text(self, random: Random, length: int, test: bool) -> list[int]:
        """`length` tokens from the beginnings of random texts."""
        ids: list[int] = []
        while len(ids) < length:
            ids += self.ids(random.choice(self.files[test]).read_text(errors="replace")[: 8 * length])
        return ids[:length]

    def log(self, cell: Cell, random: Random, test: bool) -> tuple[list[int], list[int], list[list[int]]]:
        """ids; labels, the first token of the latest thing where it is asked for; and overwritten things by question.

        Every name is written at least once, and asked for once.
        """
        names = random.sample(NAMES, cell.names)
        order = names + random.choices(names, k=cell.writes - cell.names)
        random.shuffle(order)
        text, piece = self.text(random, cell.text, test) if cell.text else [], cell.text // cell.writes
        held: dict[str, list[str]] = {name: [] for name in names}
        ids = self.ids("The latest thing counts.")
        for write, name in enumerate(order):
            held[name].append(random.choice([thing for thing in THINGS if thing not in held[name][-1:]]))
            ids += text[write * piece : (write + 1) * piece] + self.ids(f" {name} now has the {held[name][-1]}.")
        labels, stale = [IGNORED] * len(ids), []
        for name in random.sample(names, len(names)):
            question, (answer, *rest) = self.ids(f"\nAt the end {name} has the"), self.ids(f" {held[name][-1]}")
            ids += [*question, answer, *rest, *self.ids(".")]
            labels += [*[IGNORED] * (len(question) - 1), answer, *[IGNORED] * (len(rest) + 2)]
            stale.append([self.ids(f" {thing}")[0] for thing in held[name][:-1]])
        return ids, labels, stale


def padded(rows: Sequence[Sequence[int]], fill: int) -> Tensor:
    """Rows of one length, filled at the end: later tokens change nothing before them."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows])


# The input of the lowest trained layer, [B, T, width]; and labels [B, T], the answers of the next position.
Batch = tuple[Tensor, Tensor]


class Lower:
    """The frozen layers of a checkpoint, and the batches that they made. They are the same for all arms."""

    def __init__(self, run: Tuning) -> None:
        self.run, self.data = run, Data(run)
        self.model: Any = load_model(run.model, torch.float32).base_model
        self.model.layers, self.model.norm = self.model.layers[: run.first], torch.nn.Identity()
        self.steps: dict[tuple[int, int], tuple[Batch, Batch]] = {}

    @torch.no_grad()
    def batch(self, ids: Sequence[Sequence[int]], labels: Sequence[Sequence[int]]) -> Batch:
        """Rows of any lengths."""
        return self.model(padded(ids, 0), use_cache=False).last_hidden_state, padded(labels, IGNORED)

    def text(self, random: Random, length: int, test: bool) -> Batch:
        """Ordinary text: every token is an answer."""
        ids = self.data.text(random, length, test)
        return self.batch([ids[:-1]], [ids[1:]])

    def step(self, seed: int, step: int) -> tuple[Batch, Batch]:
        """Logs and text of a training step."""
        if (seed, step) not in self.steps:
            run, random = self.run, Random(f"{seed}/{step}")
            ids, labels, _ = zip(*(self.data.log(run.trained, random, False) for _ in range(run.logs)), strict=True)
            self.steps[seed, step] = self.batch(ids, labels), self.text(random, run.text, False)
        return self.steps[seed, step]

    @cached_property
    def tests(self) -> list[list[tuple[Batch, list[list[int]]]]]:
        """Logs of every cell, with the overwritten things of every question."""
        cells = []
        for cell, count in self.run.cells:
            random = Random(f"{TEST_SEED}/{cell}")
            logs = [self.data.log(cell, random, True) for _ in range(count)]
            cells.append([(self.batch([ids], [labels]), stale) for ids, labels, stale in logs])
        return cells

    @cached_property
    def texts(self) -> list[Batch]:
        """Held-out texts, twice as long as those of training."""
        random = Random(TEST_SEED)
        return [self.text(random, 2 * self.run.text, True) for _ in range(self.run.test_texts)]


# One per checkpoint and sizes, in the memory of this process.
lower = cache(Lower)


def answer_logits(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """The logits where labels ask, and the answers: [answers, vocabulary], [answers]."""
    hidden, labels = batch
    asked = labels != IGNORED
    above = model.base_model(inputs_embeds=hidden, use_cache=False).last_hidden_state[asked]
    return model.get_output_embeddings()(above).float(), labels[asked]


def upper(run: Tuning, data: Data) -> tuple[Any, list[dict[str, Any]]]:
    """The model of a run without its frozen layers, and the groups of weights that are trained."""
    model: Any = load_model(run.model, torch.float32).train()
    groups: list[dict[str, Any]] = [{"params": [], "lr": run.rate}]
    if run.keys != SOFTMAX:
        layers = range(run.first, model.config.num_hidden_layers)
        enable_lucid(model, layers=layers, strength=0.0, learned=("sharpness", "strength"), **MAPS[run.keys])
        if run.keys != RAW:
            texts = [data.text(Random(f"calibration/{n}"), run.calibration // 4, False) for n in range(4)]
            model.calibrate(torch.tensor(texts))
        groups += [{"params": [], "lr": run.gate_rate}, {"params": [], "lr": run.sharpness_rate}]
    model.requires_grad_(False)
    model.base_model.layers = model.base_model.layers[run.first :]
    for layer in model.base_model.layers:
        for name, weight in layer.self_attn.named_parameters():
            kind = {"strength": 1, "sharpness": 2}.get(name.rpartition(".")[2], 0)
            groups[kind]["params"].append(weight.requires_grad_())
    return model, groups


def tune(folder: Path, run: Tuning) -> Record:
    """For `lab.map`: {"loss"} of the logs by step; {"tests"} by mark; {"seconds"} of a training step, the median."""
    below = lower(replace(run, keys=SOFTMAX, rate=0.0, seed=0, marks=()))
    model, groups = upper(run, below.data)
    losses: list[float] = []

    def loss(step: int) -> Tensor:
        logs, text = below.step(run.seed, step)
        of_logs = F.cross_entropy(*answer_logits(model, logs))
        losses.append(of_logs.item())
        return of_logs + F.cross_entropy(*answer_logits(model, text))

    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    weights = [weight for group in groups for weight in group["params"]]
    steps = training_loop(
        run.marks[-1], loss, optimizer, rate=lambda step: min(1.0, (step + 1) / run.warm_up), clip=weights
    )
    tests, seconds = {}, []
    for step in range(run.marks[-1] + 1):
        if step in run.marks:
            tests[str(step)] = test(model, below)
        if step < run.marks[-1]:
            below.step(run.seed, step)
            start = time.process_time()
            next(steps)
            seconds.append(time.process_time() - start)
    return {"loss": losses, "tests": tests, "seconds": statistics.median(seconds)}


@torch.no_grad()
def test(model: Any, below: Lower) -> Record:
    """{"right", "stale"}: percent of every cell; {"text"}: nats a token of held-out text; {"strength", "sharpness"}."""
    record: Record = {"right": [], "stale": []}
    for logs in below.tests:
        right, stale, asked = 0, 0, 0
        for batch, overwritten in logs:
            logits, answers = answer_logits(model, batch)
            for likeliest, answer, old in zip(logits.argmax(-1).tolist(), answers.tolist(), overwritten, strict=True):
                right, stale = right + (likeliest == answer), stale + (likeliest != answer and likeliest in old)
            asked += len(answers)
        record["right"].append(100 * right / asked)
        record["stale"].append(100 * stale / asked)
    losses = [F.cross_entropy(*answer_logits(model, text)).item() for text in below.texts]
    record["text"] = sum(losses) / max(1, len(losses))
    for name in ("strength", "sharpness"):
        values = [weight for key, weight in model.named_parameters() if key.endswith(f".{name}")]
        record[name] = torch.cat(values).mean().item() if values else 0.0
    return record


@dataclass(frozen=True)
class Outcome:
    """An arm at the end, over seeds. score: mean of all cells, percent. text: nats a token."""

    score: Spread
    text: Spread


def judge(lucid: Outcome, softmax: Outcome, late: Outcome) -> str:
    """The verdict from scores, means over all cells of tests: overwrites at 1, 4 and 16 times the writes, and needles.

    lucid: with whitened keys. softmax, late: softmax attention at equal steps and at equal time. "holds": LUCID is
    clearly ahead of both, and its loss on text is at most 0.05 nats above both. "partly": ahead of softmax attention at
    equal steps, and level on text. Otherwise "does not hold"; "too small to judge" if no score reaches 20 %.
    """
    if max(one.score.mean for one in (lucid, softmax, late)) < FLOOR:
        return "too small to judge"
    better = [
        outcome(lucid.score, one.score) == "ahead" and lucid.text.mean <= one.text.mean + LEVEL
        for one in (softmax, late)
    ]
    return "holds" if all(better) else "partly" if better[0] else "does not hold"


def run(lab: Lab) -> Conclusion:
    """Every arm's rate; whitened LUCID and softmax attention with all seeds, raw and centred keys with one."""
    base = Tuning(lab.model, checkpoint_sha256(Path(lab.model))[:16], lab.texts, texts_sha256(lab.texts))
    rates: tuple[float, ...] = (3e-4, 1e-3)
    steps = base.marks[-1]
    if lab.tiny:
        layers, steps, rates = load_config(lab.model).get_text_config(decoder=True).num_hidden_layers, 2, (1e-3,)
        cells = ((Cell(3, 6), 2), (Cell(2, 2, 40), 1))
        base = replace(base, first=layers - 1, trained=Cell(3, 6), text=16, cells=cells, test_texts=1, calibration=64)
    trial = replace(base, seed=TRIAL_SEED, marks=(steps // 2,), cells=(), test_texts=0)
    trials = {keys: [replace(trial, keys=keys, rate=rate) for rate in rates] for keys in TITLES}
    tried = lab.map_groups(tune, trials, title="learning rates")
    # The last quarter of a trial: single steps are noisy.
    ends = {keys: [_end(record["loss"]) for record in records] for keys, records in tried.items()}
    best = {keys: rates[losses.index(min(losses))] for keys, losses in ends.items()}
    ratio = sum(one["seconds"] for one in tried[WHITENED]) / sum(one["seconds"] for one in tried[SOFTMAX])
    late = 2 * steps if lab.tiny else max(steps + 1, math.ceil(steps * ratio))
    marks = {SOFTMAX: (0, steps, late)}
    finals = {
        keys: [
            replace(base, keys=keys, rate=best[keys], marks=marks.get(keys, (steps,)), seed=seed)
            for seed in (lab.seeds if keys in (SOFTMAX, WHITENED) else lab.seeds[:1])
        ]
        for keys in (SOFTMAX, WHITENED, CENTRED, RAW)
    }
    tuned = lab.map_groups(tune, finals, title="training")
    rows: dict[str, list[Record]] = {"before": [tuned[SOFTMAX][0]["tests"]["0"]]}
    rows |= {TITLES[keys]: [record["tests"][str(steps)] for record in records] for keys, records in tuned.items()}
    rows[LATE] = [record["tests"][str(late)] for record in tuned[SOFTMAX]]
    ends_of = {title: _outcome(records) for title, records in rows.items()}
    ours, softmax, same_time = (ends_of[title] for title in (TITLES[WHITENED], TITLES[SOFTMAX], LATE))
    others = {title: one.score for title, one in ends_of.items() if title != TITLES[WHITENED]}
    tokens = round(steps * (base.logs * len(Data(base).log(base.trained, Random(0), False)[0]) + base.text), -2)
    return Conclusion(
        ours=f"LUCID {ours.score} %, softmax {softmax.score} %, at equal time {same_time.score} %; text {ours.text}, "
        f"{softmax.text} and {same_time.text} nats",
        verdict=judge(ours, softmax, same_time),
        because=f"Mean over {len(base.cells)} kinds of logs, after {steps} steps, about {tokens} tokens. "
        f"{explain_against('LUCID with whitened keys', ours.score, others)} Text: LUCID {ours.text} nats a token, "
        f"softmax {softmax.text}, at equal time ({late} steps) {same_time.text}, before {ends_of['before'].text}.",
        seeds=len(lab.seeds),
        tables=[
            answers_table(base, rows, "right", "Latest thing named, %"),
            answers_table(base, rows, "stale", "An overwritten thing named, %"),
            _rates_table(ends, rates, best),
        ],
    )


def _end(losses: Sequence[float]) -> float:
    last = losses[-max(1, len(losses) // 4) :]
    return sum(last) / len(last)


def _outcome(records: Sequence[Record]) -> Outcome:
    return Outcome(
        spread(sum(one["right"]) / len(one["right"]) for one in records), spread((one["text"] for one in records), 3)
    )


def answers_table(base: Tuning, rows: Mapping[str, Sequence[Record]], name: str, title: str) -> Table:
    """A row for every arm: the cells, the loss on text, and LUCID's mean gate and sharpness."""
    cells = [
        [
            arm,
            *(spread(values) for values in zip(*(record[name] for record in records), strict=True)),
            *(
                spread((record[key] for record in records), digits)
                for key, digits in (("text", 3), ("strength", 2), ("sharpness", 1))
            ),
            len(records),
        ]
        for arm, records in rows.items()
    ]
    columns = ["", *(str(cell) for cell, _ in base.cells), "text, nats", "gate s", "c", "seeds"]
    note = f"Trained with {base.trained}; layers {base.first} and above."
    return table(title, columns, cells, note=note)


def _rates_table(ends: Mapping[str, Sequence[float]], rates: Sequence[float], best: Mapping[str, float]) -> Table:
    rows = [[TITLES[keys], *(round(loss, 3) for loss in losses), best[keys]] for keys, losses in ends.items()]
    return table("Loss of the logs at the end of trials, by learning rate", ["", *map(str, rates), "chosen"], rows)
