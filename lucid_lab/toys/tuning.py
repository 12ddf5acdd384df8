"""A given checkpoint and texts: training that continues from it, with softmax attention or with LUCID, and its tests.

A step has one sequence. Three of four are packed text, with the loss of every token; each fourth is a context with
needles and several questions after it, with the loss of the answers. AdamW (0.9, 0.95), no weight decay, a gradient
norm of at most 1, a short warm-up and then a constant rate: a longer run is the same run until then, so one run of
softmax attention is tested after as many steps as LUCID and after as much time. Products are in bfloat16 (autocast),
weights in float32, LUCID's solve in float32. A stopped run resumes from its last state.
"""

import hashlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lucid_attention import SharpnessRamp, enable_lucid
from lucid_attention.files import partial_path
from lucid_attention.models.checkpoint import checkpoint_sha256, load_model, load_tokenizer

from ..data import IGNORED
from .lab import Record
from .questions import TRAIN_SEED, answers, needle_context, token_losses, update_context
from .results import finite
from .training import training_loop

TOKENS, HAY, STATE = "tokens.safetensors", "hay-{split}.txt", "state.pt"
# The parts of the texts: one to train on, and every tenth text, by a hash of its name, for all tests.
TRAIN, TEST, TEST_SHARE = "train", "test", 10
# Characters of the prose around needles.
HAY_CHARACTERS = 1_500_000
# Steps between two states.
SAVE_EVERY = 12
# Held-out texts whose loss is measured during a training: the last ones.
TEST_TEXTS = 2
# Each fourth sequence has needles: their numbers in turn, the most questions, and tokens of a question and answer.
NEEDLE_EVERY, NEEDLES, ASKED, QUESTION_TOKENS = 4, (1, 2, 4, 8), 6, 60


@dataclass(frozen=True)
class Subject:
    """A model and the texts that it is trained and tested on.

    model: folder of a checkpoint. sha256: its hash: another checkpoint in the same folder gives other results.
    texts: "folder" of `read_texts`. tuned: weights that `tune` has kept, see `tuned_by`; "" for the given ones.
    """

    model: str
    sha256: str
    texts: str = ""
    tuned: str = ""

    def tuned_by(self, record: Record, step: int) -> "Subject":
        """The model after a step of `tune`."""
        return replace(self, tuned=f"{record['folder']}/{_weights(step)}")

    def load(self, kept: Path) -> Any:
        """The model in float32 and evaluation mode. kept: the folder of all kept results, `folder.parent`."""
        return load_model(kept / self.tuned if self.tuned else self.model, torch.float32)

    def tokenizer(self) -> Any:
        """The tokenizer of the checkpoint."""
        return load_tokenizer(self.model)

    def tokens(self, kept: Path) -> dict[str, Tensor]:
        """TRAIN: [tokens]; TEST: [texts, tokens]."""
        return load_file(kept / self.texts / TOKENS)

    def hay(self, kept: Path, split: str) -> str:
        """The file of the prose around needles."""
        return str(kept / self.texts / HAY.format(split=split))


def given(model: str) -> Subject:
    """The checkpoint in a folder, without texts yet."""
    return Subject(model, checkpoint_sha256(Path(model))[:16])


def text_files(folder: str) -> list[tuple[str, Path]]:
    """(name, file) of all texts below a folder, sorted by name."""
    root = Path(folder)
    return sorted((path.relative_to(root).as_posix(), path) for path in root.rglob("*.txt") if path.is_file())


def texts_sha256(folder: str) -> str:
    """A hash of the names and sizes of the texts below a folder."""
    names = "\n".join(f"{name} {path.stat().st_size}" for name, path in text_files(folder))
    return hashlib.sha256(names.encode()).hexdigest()[:16]


def read_texts(folder: Path, settings: Mapping[str, Any]) -> Record:
    """Keep tokens to train on, long texts for tests, and prose to hide needles in, of training and of tests.

    TRAIN: [train_tokens], texts in a random order with the end token between them. TEST: [long_texts, long_tokens], the
    beginnings of texts that training never sees.
    settings: subject; texts, their folder, and sha256, of `texts_sha256`; train_tokens; long_texts; long_tokens.
    """
    wanted, count, length = (settings[name] for name in ("train_tokens", "long_texts", "long_tokens"))
    tokenizer = settings["subject"].tokenizer()
    ids: list[int] = []
    long: list[list[int]] = []
    hay: dict[str, list[str]] = {TRAIN: [], TEST: []}
    files = text_files(settings["texts"])
    Random("texts").shuffle(files)
    for name, path in files:
        text, split = path.read_text(errors="replace"), TEST if _is_test(name) else TRAIN
        if split == TEST and len(long) < count and len(text) > 3 * length:
            tokens = tokenizer(text, verbose=False)["input_ids"]
            if len(tokens) >= length:
                long.append(tokens[:length])
                continue
        if split == TRAIN and len(ids) < wanted:
            ids += [*tokenizer(text, verbose=False)["input_ids"], tokenizer.eos_token_id]
        if sum(map(len, hay[split])) < HAY_CHARACTERS:
            hay[split].append(text)
        elif len(long) == count and len(ids) >= wanted:
            break
    if len(ids) < wanted or len(long) < count or not hay[TEST]:
        raise ValueError(
            f"--texts must hold {wanted} tokens to train on, {count} test texts of {length} tokens and another test "
            f"text, got {len(ids)}, {len(long)} and {len(hay[TEST])}: give more or longer texts (python "
            "tools/get_texts.py OUT)"
        )
    for split, parts in hay.items():
        (folder / HAY.format(split=split)).write_text("\n\n".join(parts)[:HAY_CHARACTERS])
    save_file({TRAIN: torch.tensor(ids[:wanted]), TEST: torch.tensor(long)}, folder / TOKENS)
    return {"train_tokens": wanted, "test_texts": count}


def _is_test(name: str) -> bool:
    return zlib.crc32(name.encode()) % TEST_SHARE == 0


@dataclass(frozen=True)
class Tuning:
    """A training that continues from a checkpoint.

    layers: those that become LUCID; none for softmax attention.
    start: of the sharpness ramp, which takes `ramp` steps and ends at √D.
    marks: steps after which the model is tested; the last one ends the run. keep: its weights there are kept.
    rate, seed, length: learning rate, order of the data, tokens of a sequence. warm_up, test_every: steps.
    """

    subject: Subject
    layers: tuple[int, ...]
    rate: float
    marks: tuple[int, ...]
    ramp: int = 1
    start: float = 64.0
    keep: bool = False
    seed: int = 0
    length: int = 1024
    warm_up: int = 4
    test_every: int = 10


def _weights(step: int) -> str:
    return f"model-{step}"


def tune(folder: Path, run: Tuning) -> Record:
    """For `lab.map`: {"step", "loss", "sharpness"} of training, and {"test_step", "test_loss"} on held-out text.

    LUCID is tested and kept at the sharpness that it has at that step; "sharpness" of softmax attention is 0.
    """
    kept, last, state = folder.parent, run.marks[-1], folder / STATE
    model, sequences = run.subject.load(kept).train(), Sequences(run, kept)
    tested = run.subject.tokens(kept)[TEST][-TEST_TEXTS:, : run.length + 1].split(1)
    ramp = SharpnessRamp(run.ramp, start=run.start) if run.layers else None
    if ramp is not None:
        enable_lucid(model, layers=run.layers, sharpness=run.start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.rate, betas=(0.9, 0.95), weight_decay=0.0)
    first, parts = 0, {"model": model, "optimizer": optimizer}
    curve: dict[str, list[Any]] = {name: [] for name in ("step", "loss", "sharpness", "test_step", "test_loss")}
    if state.exists():
        saved = torch.load(state, weights_only=True)
        first, curve = saved["step"], saved["curve"]
        for name, part in parts.items():
            part.load_state_dict(saved[name])

    def loss(step: int) -> Tensor:
        ids, labels = sequences.sequence(first + step)
        with torch.autocast("cpu", torch.bfloat16):
            value: Tensor = model(ids, labels=labels, use_cache=False).loss
        return value

    def rate(step: int) -> float:
        return min(1.0, (first + step + 1) / run.warm_up)

    training = training_loop(last - first, loss, optimizer, rate=rate, clip=model.parameters())
    for step in range(first, last + 1):
        if ramp is not None:
            ramp.apply(model, step, last)
        if (step % run.test_every == 0 or step in run.marks) and step not in curve["test_step"]:
            curve["test_step"].append(step)
            curve["test_loss"] += finite([_mean_loss(model.eval(), tested)])
            model.train()
        if run.keep and step in run.marks:
            model.save_pretrained(folder / _weights(step))
        if step % SAVE_EVERY == 0 and first < step < last:
            contents = {name: part.state_dict() for name, part in parts.items()}
            torch.save({**contents, "step": step, "curve": curve}, partial_path(state))
            partial_path(state).replace(state)
        if step < last:
            curve["step"].append(step)
            curve["sharpness"].append(0.0 if ramp is None else ramp.value_of(model))
            curve["loss"] += finite([float(next(training))])
    state.unlink(missing_ok=True)
    return curve


def _mean_loss(model: Any, texts: tuple[Tensor, ...]) -> float:
    return sum(token_losses(model, text).mean().item() for text in texts) / len(texts)


class Sequences:
    """The sequences of a training, the same for every arm: sequence n depends on the seed and on n."""

    def __init__(self, run: Tuning, kept: Path) -> None:
        self.length, self.seed = run.length, run.seed
        self.tokenizer, self.hay = run.subject.tokenizer(), run.subject.hay(kept, TRAIN)
        self.text = run.subject.tokens(kept)[TRAIN]

    def sequence(self, step: int) -> tuple[Tensor, Tensor]:
        """ids and labels, at most [1, length] each."""
        if step % NEEDLE_EVERY == NEEDLE_EVERY - 1:
            return self._needles(step)
        count = len(self.text) // self.length
        order = torch.randperm(count, generator=torch.Generator().manual_seed(self.seed))
        ids = self.text.view(-1)[int(order[step % count]) * self.length :][None, : self.length]
        return ids, ids.clone()

    def _needles(self, step: int) -> tuple[Tensor, Tensor]:
        count = NEEDLES[step // NEEDLE_EVERY % len(NEEDLES)]
        room, index = self.length - QUESTION_TOKENS * min(count, ASKED), self.seed * 100_000 + step
        context = needle_context(self.tokenizer, self.hay, room, count, index, asked=ASKED, seed=TRAIN_SEED)
        ids, labels = list(context.ids), [IGNORED] * len(context.ids)
        end = self.tokenizer("\n", add_special_tokens=False)["input_ids"]
        for question in context.questions:
            ids += [*question.ids, *question.answer, *end]
            labels += [*[IGNORED] * len(question.ids), *question.answer, *end]
        return torch.tensor([ids[: self.length]]), torch.tensor([labels[: self.length]])


def ask(folder: Path, settings: Mapping[str, Any]) -> Record:
    """For `lab.map`: {"right", "stale"}, lists of lists, by context and question; see `answers`.

    settings: subject; task, "needles" or "boxes"; size, tokens of a context, or boxes; count, of needles, or of writes
    to each box; contexts.
    """
    subject, task, size, count = (settings[name] for name in ("subject", "task", "size", "count"))
    model, tokenizer = subject.load(folder.parent), subject.tokenizer()
    hay = subject.hay(folder.parent, TEST)
    records = []
    for index in range(settings["contexts"]):
        if task == "needles":
            context = needle_context(tokenizer, hay, size, count, index, asked=count)
        else:
            context = update_context(tokenizer, size, count, index)
        records.append(answers(model, context))
    return {name: [[answer[name] for answer in context] for context in records] for name in ("right", "stale")}
