"""Part (c): training continues from the checkpoint, with softmax attention or with LUCID by a sharpness ramp.

Every step has one sequence. Three of four are packed text, with the loss of every token. Each fourth is a context with
needles and several questions after it, with the loss of the answers. AdamW (0.9, 0.95), no weight decay, a gradient
norm of at most 1, a short warm-up and then a constant rate: a longer run is the same run until then, so
one run of softmax attention is tested after as many steps as LUCID and after as much time. Products are in bfloat16
(autocast), weights in float32, LUCID's solve in float32.

A stopped job continues from its last state, which it writes every few steps.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lucid_attention import enable_lucid
from lucid_attention.files import partial_path
from lucid_attention.models.ramps import SharpnessRamp

from ...labels import IGNORED
from ..engine.jobs import Job, Record, Work
from .given import TEST, TRAIN, Given, open_model, open_tokenizer, read_tokens
from .questions import TRAIN_SEED, Haystacks, needle_prompts, token_losses

STATE = "state.pt"
NEEDLE_EVERY = 4
# Numbers of needles in turn, and the most questions about one context.
NEEDLES, ASKED = (1, 2, 4, 8), 6


@dataclass(frozen=True)
class Tuning:
    """A training run.

    label: of the arm. layers: those that become LUCID; none for softmax attention.
    start, end: of the sharpness ramp, which takes `ramp` steps; end 0 for √D.
    marks: steps at which the weights are saved; the last one ends the run. Without `keep`, none are saved.
    rate, seed, length: learning rate, order of the data, tokens of a sequence. warm_up: steps.
    test_texts, test_length, test_every: the loss on held-out text, measured every few steps.
    """

    label: str
    layers: tuple[int, ...]
    rate: float
    marks: tuple[int, ...]
    ramp: int
    start: float = 64.0
    end: float = 0.0
    keep: bool = False
    seed: int = 0
    length: int = 1024
    warm_up: int = 4
    test_texts: int = 2
    test_length: int = 1024
    test_every: int = 10
    save_every: int = 12


def tune_job(source: Given, corpus: Job, run: Tuning) -> Job:
    """`tune` as a job."""
    arguments = {"source": source.arguments, "corpus": dict(corpus.arguments), "run": asdict(run)}
    step = 1.3 if run.layers else 1.0
    tests = run.marks[-1] / run.test_every + 1
    seconds = (run.marks[-1] * step * run.length + tests * run.test_texts * run.test_length / 3) / 110
    name = f"{run.label}, rate {run.rate:g}, {run.marks[-1]} steps, seed {run.seed}"
    return Job("real.tuning:tune", arguments, name, seconds if source.model else 2.0)


def model_at(step: int) -> str:
    """The folder of the weights after a step."""
    return f"model-{step}"


def tune(work: Work, source: dict[str, str], corpus: dict[str, Any], run: dict[str, Any]) -> Record:
    """The job: {"step", "loss", "sharpness"} of the training loss, {"test_step", "test_loss"} and core seconds a step.

    The models of `marks` are in folders named by `model_at`.
    """
    origin, settings = Given(**source), Tuning(**_tuples(run))
    state = _State(work, origin, settings)
    data = _Data(work, origin, Job("real.given:corpus", corpus), settings)
    while state.step < settings.marks[-1]:
        if state.step % settings.test_every == 0:
            state.test(data.test)
        started = time.process_time()
        state.train(data.sequence(state.step))
        state.curve["seconds"].append(round(time.process_time() - started, 2))
        if state.step in settings.marks:
            state.test(data.test)
            if settings.keep:
                state.model.save_pretrained(work.folder / model_at(state.step))
        elif state.step % settings.save_every == 0:
            state.save()
    state.file.unlink(missing_ok=True)
    return state.curve


def _tuples(run: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in run.items()}


class _State:
    """The model, its optimizer and its curves; those of the last state where a stopped job has left one."""

    def __init__(self, work: Work, source: Given, run: Tuning) -> None:
        self.run, self.file = run, work.folder / STATE
        self.model = open_model(work, source).train()
        self.tokenizer = open_tokenizer(work, source)
        self.ramp = SharpnessRamp(max(1, run.ramp), start=run.start, end=run.end or None) if run.layers else None
        if run.layers:
            enable_lucid(self.model, layers=run.layers, sharpness=run.start)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=run.rate, betas=(0.9, 0.95), weight_decay=0.0)
        self.step = 0
        names = ("step", "loss", "sharpness", "needles", "seconds", "test_step", "test_loss")
        self.curve: dict[str, list[float]] = {name: [] for name in names}
        if self.file.exists():
            state = torch.load(self.file, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step, self.curve = state["step"], state["curve"]
        self._follow()

    def _follow(self) -> None:
        """Set the sharpness of the coming step."""
        if self.ramp is not None:
            self.ramp.apply(self.model, self.step, self.run.marks[-1])

    def save(self) -> None:
        """Write the state, whole or not at all."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        part = partial_path(self.file)
        torch.save(state | {"step": self.step, "curve": self.curve}, part)
        Path(part).replace(self.file)

    def train(self, sequence: tuple[Tensor, Tensor]) -> None:
        """One step."""
        ids, labels = sequence
        for group in self.optimizer.param_groups:
            group["lr"] = self.run.rate * min(1.0, (self.step + 1) / self.run.warm_up)
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.model(ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.curve["step"].append(self.step)
        self.curve["loss"].append(loss.item())
        self.curve["needles"].append(float((labels == IGNORED).any()))
        self.curve["sharpness"].append(0.0 if self.ramp is None else self.ramp.value_of(self.model))
        self.step += 1
        self._follow()

    def test(self, texts: Sequence[Tensor]) -> None:
        """Measure the loss on held-out text, at the sharpness of this step."""
        self.model.eval()
        losses = [token_losses(self.model, text).mean().item() for text in texts]
        self.model.train()
        self.curve["test_step"].append(self.step)
        self.curve["test_loss"].append(sum(losses) / len(losses))


class _Data:
    """The sequences of a run, the same for every arm: sequence n depends on the seed and on n."""

    def __init__(self, work: Work, source: Given, corpus: Job, run: Tuning) -> None:
        self.run, self.tokenizer = run, open_tokenizer(work, source)
        tokens = read_tokens(work, corpus)
        self.train = tokens[TRAIN]
        # The last long texts: the first ones are asked about position by position.
        self.test = [text[None, : run.test_length + 1] for text in tokens[TEST][-run.test_texts :]]
        self.hay = Haystacks(work, corpus).file(TRAIN)

    def sequence(self, step: int) -> tuple[Tensor, Tensor]:
        """ids and labels, [1, length] each."""
        if step % NEEDLE_EVERY == NEEDLE_EVERY - 1:
            return self._needles(step)
        count = len(self.train) // self.run.length
        order = torch.randperm(count, generator=torch.Generator().manual_seed(self.run.seed))
        at = int(order[step % count]) * self.run.length
        ids = self.train[at : at + self.run.length][None]
        return ids, ids.clone()

    def _needles(self, step: int) -> tuple[Tensor, Tensor]:
        index = self.run.seed * 100_000 + step
        count = NEEDLES[step // NEEDLE_EVERY % len(NEEDLES)]
        room = self.run.length - 60 * min(count, ASKED)
        context = needle_prompts(self.tokenizer, self.hay, room, count, index, asked=ASKED, seed=TRAIN_SEED)
        ids, labels = list(context.ids), [IGNORED] * len(context.ids)
        for question in context.questions:
            end = self.tokenizer("\n", add_special_tokens=False)["input_ids"]
            ids += [*question.ids, *question.answer, *end]
            labels += [*[IGNORED] * len(question.ids), *question.answer, *end]
        return torch.tensor([ids[: self.run.length]]), torch.tensor([labels[: self.run.length]])
