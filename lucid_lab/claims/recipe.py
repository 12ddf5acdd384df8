"""A pretrained model moves to LUCID (not in the paper): overwrites and needles, against softmax attention.

The upper 14 layers of a checkpoint learn logs, "Anna now has the key.", at whose end the latest thing counts, and keep
ordinary text: a step has some logs, with the loss of their answers, and text, with the KL divergence from the original
model. Trained are the attention weights of these layers, or LoRA on them. The layers below are frozen; their output is
computed once for all arms, and no arm's time has it. LUCID is in the eight of these layers whose gates have the largest
gradients on logs, before any training. A gate per head, the strength s of P = I + s·L, and its sharpness c are learned,
from s = 0 at c = √D, which is exactly the original model, or from s = 1 at c = 16. Keys of P are the model's (raw),
minus their mean, or whitened, both calibrated on ordinary text.

Every arm takes the start and the learning rate with the lowest loss on logs of the trials, after half of the steps.

Sizes, rates and the rule were fixed before any run of LUCID of this form, with softmax attention alone (seed 100, rate
1e-3, other tests): after 20, 40 and 60 steps it named 93, 93 and 96 % of the latest things at the writes of training,
70, 78 and 60 % at 4 and 36, 39 and 28 % at 16 times as many, and 52, 84 and 67 % of needles. So 24 steps are hard for
it. About 36 core-minutes.

Predicted before the runs: whitened LUCID is level with softmax attention over all cells, ahead on needles and behind at
16 times the writes; raw keys are the worst of LUCID's; all arms keep the text; LoRA is behind softmax attention.
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
    "overwrites and needles better than with softmax attention, also with 4 and 16 times the writes and at 8 times the "
    "length, at no loss on text.",
    paper="none",
)
# A loss on text within these nats of softmax attention is level. Nothing is judged below this percentage of answers.
LEVEL, FLOOR = 0.05, 20.0
SOFTMAX, LORA, RAW, CENTRED, WHITENED = "softmax", "lora", "raw", "centred", "whitened"
LATE = "softmax, the time of LUCID"
TITLES = {SOFTMAX: "softmax", LORA: "softmax, LoRA"} | {
    keys: f"LUCID, {keys} keys" for keys in (WHITENED, CENTRED, RAW)
}
MAPS: dict[str, dict[str, Any]] = {
    RAW: {},
    CENTRED: {"center": "calibrated"},
    WHITENED: {"center": "calibrated", "whiten": True},
}
# Where gates and sharpness begin, None for √D, and the learning rate of gates.
STARTS: dict[str, tuple[float, float | None, float]] = {
    "s = 0": (0.0, None, 0.1),
    "s = 1, c = 16": (1.0, 16.0, 0.03),
}
# LUCID's layers: those with the largest gradients of their gates.
LAYERS = 8
# Trials begin with the middle one.
RATES: tuple[float, ...] = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
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
    keys: SOFTMAX, LORA, or a name in MAPS. first: the lowest trained layer.
    layers, start: LUCID's layers, and where it begins, a name in STARTS.
    logs, trained: logs of a step, and their cell. text: tokens of a step's ordinary text, and of a held-out one.
    rate, sharpness_rate: of the attention weights, and of LUCID's sharpness.
    marks: steps after which the model is tested; the last one ends the training. cells: (cell, logs) of the tests.
    """

    model: str
    sha256: str
    texts: str
    texts_sha256: str
    keys: str = SOFTMAX
    first: int = 16
    layers: tuple[int, ...] = ()
    start: str = "s = 0"
    logs: int = 4
    trained: Cell = Cell(6, 18)
    text: int = 128
    rate: float = 3e-4
    sharpness_rate: float = 0.1
    seed: int = 0
    warm_up: int = 4
    marks: tuple[int, ...] = (24,)
    cells: tuple[tuple[Cell, int], ...] = (
        (Cell(6, 18), 12),
        (Cell(6, 72), 8),
        (Cell(6, 288), 3),
        (Cell(8, 8, 200), 6),
        (Cell(8, 8, 550), 5),
        (Cell(8, 8, 1200), 3),
    )
    test_seed: int = TEST_SEED
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

    def log(self, cell: Cell, random: Random, test: bool) -> tuple[list[int], list[int]]:
        """ids, and labels: the first token of the latest thing where it is asked for.

        Every name is written at least once, and asked for once.
        """
        names = random.sample(NAMES, cell.names)
        order = names + random.choices(names, k=cell.writes - cell.names)
        random.shuffle(order)
        text, piece = self.text(random, cell.text, test) if cell.text else [], cell.text // cell.writes
        held = dict.fromkeys(names, "")
        ids = self.ids("The latest thing counts.")
        for write, name in enumerate(order):
            held[name] = random.choice([thing for thing in THINGS if thing != held[name]])
            ids += text[write * piece : (write + 1) * piece] + self.ids(f" {name} now has the {held[name]}.")
        labels = [IGNORED] * len(ids)
        for name in random.sample(names, len(names)):
            question, (answer, *rest) = self.ids(f"\nAt the end {name} has the"), self.ids(f" {held[name]}")
            ids += [*question, answer, *rest, *self.ids(".")]
            labels += [*[IGNORED] * (len(question) - 1), answer, *[IGNORED] * (len(rest) + 2)]
        return ids, labels


def padded(rows: Sequence[Sequence[int]], fill: int) -> Tensor:
    """Rows of one length, filled at the end: later tokens change nothing before them."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], True, fill)


# The input of the lowest trained layer, [B, T, width]; and labels [B, T], the answers of the next position.
Batch = tuple[Tensor, Tensor]


class Lower:
    """The frozen layers of a checkpoint, and the batches that they made. They are the same for all arms."""

    def __init__(self, run: Tuning) -> None:
        self.run, self.data = run, Data(run)
        self.model: Any = load_model(run.model, torch.float32).base_model
        self.model.layers, self.model.norm = self.model.layers[: run.first], torch.nn.Identity()
        self.original = upper(replace(run, keys=SOFTMAX), self.data)[0]
        self.steps: dict[tuple[int, int], tuple[Batch, Batch]] = {}

    @torch.no_grad()
    def batch(self, ids: Sequence[Sequence[int]], labels: Sequence[Sequence[int]]) -> Batch:
        """Rows of any lengths."""
        return self.model(padded(ids, 0), use_cache=False).last_hidden_state, padded(labels, IGNORED)

    def text(self, random: Random, length: int, test: bool) -> Batch:
        """Ordinary text: every token is an answer."""
        ids = self.data.text(random, length, test)
        return self.batch([ids[:-1]], [ids[1:]])

    @torch.no_grad()
    def step(self, seed: int, step: int) -> tuple[Batch, Batch]:
        """Logs of a training step; text, and the last hidden states of the original model there."""
        if (seed, step) not in self.steps:
            run, random = self.run, Random(f"{seed}/{step}")
            ids, labels = zip(*(self.data.log(run.trained, random, False) for _ in range(run.logs)), strict=True)
            logs, (text, _) = self.batch(ids, labels), self.text(random, run.text, False)
            self.steps[seed, step] = logs, (text, last_hidden(self.original, text))
        return self.steps[seed, step]

    @cached_property
    def tests(self) -> list[list[Batch]]:
        """Logs of every cell, one to a batch."""
        cells = []
        for cell, count in self.run.cells:
            random = Random(f"{self.run.test_seed}/{cell}")
            logs = [self.data.log(cell, random, True) for _ in range(count)]
            cells.append([self.batch([ids], [labels]) for ids, labels in logs])
        return cells

    @cached_property
    def texts(self) -> list[Batch]:
        """Held-out texts, twice as long as those of training."""
        random = Random(self.run.test_seed)
        return [self.text(random, 2 * self.run.text, True) for _ in range(self.run.test_texts)]


@cache
def _lower(run: Tuning) -> Lower:
    return Lower(run)


def lower(run: Tuning) -> Lower:
    """One per checkpoint and sizes, in the memory of this process."""
    return _lower(replace(run, keys=SOFTMAX, layers=(), start="", rate=0.0, seed=0, marks=()))


def last_hidden(model: Any, hidden: Tensor) -> Tensor:
    """The trained layers, and the norm above them."""
    return model.base_model(inputs_embeds=hidden, use_cache=False).last_hidden_state


def answer_logits(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """The logits where labels ask, and the answers: [answers, vocabulary], [answers]."""
    hidden, labels = batch
    asked = labels != IGNORED
    return model.get_output_embeddings()(last_hidden(model, hidden)[asked]).float(), labels[asked]


def divergence(model: Any, text: Batch) -> Tensor:
    """KL from the original model to this one, in nats a token."""
    hidden, original = text
    ours, theirs = (
        model.get_output_embeddings()(states[0]).float().log_softmax(-1)
        for states in (last_hidden(model, hidden), original)
    )
    return F.kl_div(ours, theirs, log_target=True, reduction="batchmean")


def upper(run: Tuning, data: Data) -> tuple[Any, list[dict[str, Any]]]:
    """The model of a run without its frozen layers, and the groups of weights that are trained."""
    model: Any = load_model(run.model, torch.float32).train()
    groups: list[dict[str, Any]] = [{"params": [], "lr": run.rate}]
    if run.keys in MAPS:
        strength, sharpness, gate_rate = STARTS[run.start]
        settings = MAPS[run.keys] | {"strength": strength, "sharpness": sharpness}
        enable_lucid(model, layers=run.layers, learned=("sharpness", "strength"), **settings)
        if run.keys != RAW:
            texts = [data.text(Random(f"calibration/{n}"), run.calibration // 4, False) for n in range(4)]
            model.calibrate(torch.tensor(texts))
        groups += [{"params": [], "lr": gate_rate}, {"params": [], "lr": run.sharpness_rate}]
    model.requires_grad_(False)
    model.base_model.layers = model.base_model.layers[run.first :]
    if run.keys == LORA:
        from peft import LoraConfig, inject_adapter_in_model

        targets = [f"{name}_proj" for name in "qkvo"]
        inject_adapter_in_model(LoraConfig(r=16, lora_alpha=32, target_modules=targets), model)
    for layer in model.base_model.layers:
        for name, weight in layer.self_attn.named_parameters():
            kind = {"strength": 1, "sharpness": 2}.get(name.rpartition(".")[2], 0)
            if run.keys != LORA or "lora_" in name:
                groups[kind]["params"].append(weight.requires_grad_())
    return model, groups


def gate_gradients(folder: Path, run: Tuning) -> Record:
    """For `lab.map`: {"gradients"} of the loss of the run's tests by the gates of each layer in `run.layers`.

    Sums over heads of the absolute value, relative to the largest one of a cell, mean over cells.
    """
    below = lower(run)
    model, groups = upper(run, below.data)
    means = torch.zeros(len(run.layers))
    for logs in below.tests:
        model.zero_grad()
        for batch in logs:
            F.cross_entropy(*answer_logits(model, batch)).backward()
        sums = torch.stack([gate.grad.abs().sum() for gate in groups[1]["params"]])
        means += sums / sums.max() / len(below.tests)
    return {"gradients": means.tolist()}


def tune(folder: Path, run: Tuning) -> Record:
    """For `lab.map`: {"tests"} by mark; {"seconds"} of a training step, the median."""
    below = lower(run)
    model, groups = upper(run, below.data)

    def loss(step: int) -> Tensor:
        logs, text = below.step(run.seed, step)
        return F.cross_entropy(*answer_logits(model, logs)) + divergence(model, text)

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
    return {"tests": tests, "seconds": statistics.median(seconds)}


@torch.no_grad()
def test(model: Any, below: Lower) -> Record:
    """{"right"}: percent of every cell; {"loss"}: of its answers; {"text"}: nats a token; {"strength", "sharpness"}."""
    record: Record = {"right": [], "loss": []}
    for logs in below.tests:
        pairs = zip(*(answer_logits(model, batch) for batch in logs), strict=True)
        logits, answers = map(torch.cat, pairs)
        record["right"].append(100 * (logits.argmax(-1) == answers).double().mean().item())
        record["loss"].append(F.cross_entropy(logits, answers).item())
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


Trials = dict[str, dict[tuple[str, float], float]]


def search(lab: Lab, trial: Tuning, rates: Sequence[float]) -> tuple[Trials, float]:
    """Losses of trials by arm, and by start and rate; and the time of a step of LUCID over softmax attention's.

    Rates are added until the best one of an arm lies between others. A loss is the mean over cells plus that of text.
    """
    losses: Trials = {keys: {} for keys in TITLES}
    seconds: dict[str, list[float]] = {keys: [] for keys in TITLES}
    middle = rates[len(rates) // 2]
    todo = {keys: [(start, middle) for start in (STARTS if keys in MAPS else ("",))] for keys in TITLES}
    while any(todo.values()):
        trials = {
            keys: [replace(trial, keys=keys, start=start, rate=rate) for start, rate in pairs]
            for keys, pairs in todo.items()
        }
        for keys, records in lab.map_groups(tune, trials, title="trials").items():
            for pair, record in zip(todo[keys], records, strict=True):
                (last,) = record["tests"].values()
                losses[keys][pair] = sum(last["loss"]) / len(last["loss"]) + last["text"]
                seconds[keys].append(record["seconds"])
        for keys, tried in losses.items():
            start, rate = min(tried, key=tried.__getitem__)
            place = rates.index(rate)
            beside = [(start, one) for one in rates[max(0, place - 1) : place + 2]]
            todo[keys] = [pair for pair in beside if pair not in tried]
    return losses, min(seconds[WHITENED]) / min(seconds[SOFTMAX])


def run(lab: Lab) -> Conclusion:
    """LUCID's layers, every arm's start and rate; all seeds for softmax attention and whitened LUCID, else one."""
    base = Tuning(lab.model, checkpoint_sha256(Path(lab.model))[:16], lab.texts, texts_sha256(lab.texts))
    steps, rates = base.marks[-1], RATES
    trial_cells: tuple[tuple[Cell, int], ...] = ((Cell(6, 18), 4), (Cell(6, 72), 4), (Cell(8, 8, 200), 4))
    count = load_config(lab.model).get_text_config(decoder=True).num_hidden_layers
    if lab.tiny:
        steps, rates, trial_cells = 2, (1e-3,), ((Cell(3, 6), 1),)
        cells = ((Cell(3, 6), 2), (Cell(2, 2, 40), 1))
        base = replace(
            base, first=count - 1, logs=2, trained=Cell(3, 6), text=16, cells=cells, test_texts=1, calibration=64
        )
    trial = replace(base, seed=TRIAL_SEED, marks=(steps // 2,), cells=trial_cells, test_seed=TRIAL_SEED, test_texts=4)
    trained = tuple(range(base.first, count))
    (measured,) = lab.map(gate_gradients, [replace(trial, keys=WHITENED, layers=trained)], title="layers")
    gradients = dict(zip(trained, measured["gradients"], strict=True))
    layers = tuple(sorted(sorted(trained, key=gradients.__getitem__)[-LAYERS:]))
    losses, ratio = search(lab, replace(trial, layers=layers), rates)
    late = 2 * steps if lab.tiny else max(steps + 1, math.ceil(steps * ratio))
    finals: dict[str, list[Tuning]] = {}
    for keys, tried in losses.items():
        start, rate = min(tried, key=tried.__getitem__)
        final = replace(base, keys=keys, layers=layers, start=start, rate=rate)
        seeds = lab.seeds if keys in (SOFTMAX, WHITENED) else lab.seeds[:1]
        marks = (steps, late) if keys == SOFTMAX else (steps,)
        finals[keys] = [replace(final, seed=seed, marks=marks) for seed in seeds]
    finals[SOFTMAX][0] = replace(finals[SOFTMAX][0], marks=(0, steps, late))
    tuned = lab.map_groups(tune, finals, title="training")
    rows = {"before": [tuned[SOFTMAX][0]["tests"]["0"]]}
    rows |= {TITLES[keys]: [record["tests"][str(steps)] for record in tuned[keys]] for keys in TITLES}
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
        f"{explain_against('LUCID with whitened keys', ours.score, others)} LUCID's layers: {layers}. Text: LUCID "
        f"{ours.text} nats a token, softmax {softmax.text}, at equal time ({late} steps) {same_time.text}, before "
        f"{ends_of['before'].text}.",
        seeds=len(lab.seeds),
        tables=[
            answers_table(base, rows),
            table(
                "Loss of trials: the lowest one of an arm decides",
                ["", "start", "rate", "loss"],
                [
                    [TITLES[keys], *pair, round(tried[pair], 3)]
                    for keys, tried in losses.items()
                    for pair in sorted(tried)
                ],
            ),
            table(
                "Gradient of the loss by the gates of a layer, relative to the largest",
                [str(layer) for layer in trained],
                [[round(value, 2) for value in gradients.values()]],
            ),
        ],
    )


def _outcome(records: Sequence[Record]) -> Outcome:
    return Outcome(
        spread(sum(one["right"]) / len(one["right"]) for one in records), spread((one["text"] for one in records), 3)
    )


def answers_table(base: Tuning, rows: Mapping[str, Sequence[Record]]) -> Table:
    """A row for every arm: the cells, the loss on text, and LUCID's mean gate and sharpness."""
    rest = {"text": 3, "strength": 2, "sharpness": 1}
    cells = [
        [
            arm,
            *(spread(values) for values in zip(*(record["right"] for record in records), strict=True)),
            *(spread((record[key] for record in records), digits) for key, digits in rest.items()),
            len(records),
        ]
        for arm, records in rows.items()
    ]
    columns = ["", *(str(cell) for cell, _ in base.cells), "text, nats", "gate s", "c", "seeds"]
    note = f"Trained with {base.trained}; layers {base.first} and above."
    return table("Latest thing named, %", columns, cells, note=note)
