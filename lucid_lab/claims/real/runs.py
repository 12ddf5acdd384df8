"""The jobs of the experiment, round by round: each round is known when the one before it is finished."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..engine.jobs import Job, Record
from ..engine.scale import Scale
from ..engine.study import Done
from . import costs, keys, questions, switching, tuning
from .given import STAND_IN, Given, corpus_job, given, sizes_of_model, stand_in_job
from .sizes import Sizes, sizes
from .tuning import Tuning

# The arms of the training, and the models that are asked: softmax attention counts twice, at equal steps and time.
SOFTMAX, ALL, CHOSEN = "softmax", "all layers", "chosen layers"
ARMS = (SOFTMAX, ALL, CHOSEN)
STOCK, SOFTMAX_TIME = "before training", "softmax, equal time"
# Nats that the chosen layers may cost together, before training.
ALLOWED = 0.25
# Where the ramps start, in units of √D.
START = 8.0

Model = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """The jobs at a scale, with what is done so far."""

    scale: Scale
    done: Done

    @cached_property
    def size(self) -> Sizes:
        """How much is run."""
        return sizes(self.scale)

    @cached_property
    def source(self) -> Given:
        """The model and the texts."""
        return STAND_IN if self.scale.tiny else given(self.scale.model, self.scale.texts)

    @cached_property
    def shape(self) -> Mapping[str, int]:
        """Layers, heads and sizes of the model."""
        return sizes_of_model(self.source)

    @cached_property
    def corpus(self) -> Job:
        """The texts."""
        return corpus_job(self.source, self.size.train_tokens, self.size.long_texts, self.size.long_tokens)

    def first(self) -> list[Job]:
        """What every other job reads."""
        return [*([stand_in_job()] if self.source == STAND_IN else []), self.corpus]

    def key_layers(self) -> list[int]:
        """The layers whose keys are measured up to the longest length."""
        last = self.shape["layers"] - 1
        return sorted({round(share * last) for share in self.size.key_layers})

    def key_jobs(self) -> dict[str, Job]:
        """Keys up to the longest length, by kind."""
        lengths = [length for length in self.size.key_lengths if length <= self.shape["context"]]
        layers = {keys.TRAINED: self.key_layers(), keys.UNTRAINED: self.key_layers(), keys.RANDOM: [0, 1, 2]}
        return {kind: self.keys_of(kind, chosen, lengths, 0) for kind, chosen in layers.items()}

    def keys_of(self, kind: str, layers: Sequence[int], lengths: Sequence[int], text: int) -> Job:
        """A job of `keys`."""
        return keys.keys_job(self.source, self.corpus, kind, layers, lengths, text, self.shape["head_dim"])

    def layer_jobs(self) -> list[Job]:
        """Keys of every layer, on the second long text."""
        count, step = self.shape["layers"], self.size.layers_a_job
        parts = [list(range(first, min(first + step, count))) for first in range(0, count, step)]
        return [self.keys_of(keys.TRAINED, part, self.size.all_lengths, 1) for part in parts]

    def hit_jobs(self, model: Model | None = None) -> list[Job]:
        """Hit rates by length."""
        lengths = self.size.hit_lengths if model is None else self.size.hit_lengths[:1]
        return [keys.hits_job(self.source, self.corpus, model, n, 4, self.size.hit_samples) for n in lengths]

    def switch_jobs(self) -> list[Job]:
        """Disturbances, by text."""
        root = math.sqrt(self.shape["head_dim"])
        c = [factor * root for factor in self.size.sharpnesses]
        texts = range(self.size.switch_texts)
        return [switching.switch_job(self.source, self.corpus, text, self.size.switch_length, c) for text in texts]

    def sets(self) -> list[list[int]]:
        """Sets of cheap layers, from the disturbances."""
        counts = [max(1, round(share * self.shape["layers"])) for share in self.size.counts]
        return switching.cheapest([self.done[job]["records"] for job in self.switch_jobs()], counts)

    def together_jobs(self) -> list[Job]:
        """What sets of cheap layers cost together, by text."""
        sets, texts = self.sets(), range(self.size.switch_texts)
        return [switching.together_job(self.source, self.corpus, t, self.size.switch_length, sets) for t in texts]

    def chosen(self) -> list[int]:
        """The layers of the arm CHOSEN."""
        return switching.choose(self.sets(), [self.done[job]["changes"] for job in self.together_jobs()], ALLOWED)

    def layers_of(self, arm: str) -> tuple[int, ...]:
        """The layers that become LUCID."""
        if arm == SOFTMAX:
            return ()
        return tuple(range(self.shape["layers"]) if arm == ALL else self.chosen())

    def cost_jobs(self) -> dict[tuple[str, int, str], Job]:
        """Costs by what is done, length and arm."""
        wanted = [("training", n) for n in self.size.cost_training] + [("decoding", n) for n in self.size.cost_decoding]
        arms: dict[str, list[int] | None] = {ALL: None, CHOSEN: self.chosen()}
        return {
            (what, length, arm): costs.cost_job(self.source, self.corpus, what, length, self.size.rounds, layers)
            for what, length in wanted
            for arm, layers in arms.items()
        }

    def run(self, arm: str, rate: float, marks: tuple[int, ...], seed: int, *, keep: bool) -> Job:
        """A training run of an arm."""
        layers = self.layers_of(arm)
        settings = Tuning(
            label=arm,
            layers=layers,
            rate=rate,
            marks=marks,
            ramp=max(1, round(self.size.ramp * marks[0])) if layers else 0,
            start=START * math.sqrt(self.shape["head_dim"]),
            keep=keep,
            seed=seed,
            length=self.size.length,
            warm_up=max(1, self.size.sweep_steps // 2),
            test_length=min(self.size.length, self.size.long_tokens - 1),
            test_every=max(1, self.size.steps // 6) if keep else max(1, self.size.sweep_steps),
        )
        return tuning.tune_job(self.source, self.corpus, settings)

    def sweep(self, arm: str) -> dict[float, Job]:
        """Short runs, by learning rate."""
        return {rate: self.run(arm, rate, (self.size.sweep_steps,), 0, keep=False) for rate in self.size.rates}

    def rate(self, arm: str) -> float:
        """The rate with the lowest loss on held-out text at the end of the sweep."""
        ends = {rate: self.done[job]["test_loss"][-1] for rate, job in self.sweep(arm).items()}
        return min(ends, key=lambda rate: ends[rate] if math.isfinite(ends[rate]) else math.inf)

    def equal_time(self) -> int:
        """The steps of softmax attention in the time of LUCID in all layers."""
        ratio = self.done[self.cost_jobs()["training", self.size.cost_training[0], ALL]]["ratio"]
        # The time of a tiny model is noise, and a long run would come to needles that do not fit into its sequences.
        longest = 2.0 if self.scale.tiny else math.inf
        return math.ceil(self.size.steps * min(max(1.0, ratio), longest))

    def final(self, arm: str, seed: int) -> Job:
        """The run of an arm."""
        marks: tuple[int, ...] = (self.size.steps,)
        if arm == SOFTMAX:
            marks = tuple(dict.fromkeys((self.size.steps, self.equal_time())))
        return self.run(arm, self.rate(arm), marks, seed, keep=True)

    def models(self, seed: int) -> dict[str, Model | None]:
        """The models that are asked, by name."""
        found: dict[str, Model | None] = {STOCK: None}
        for arm in ARMS:
            found[arm] = questions.saved(self.final(arm, seed), tuning.model_at(self.size.steps), arm)
        if self.equal_time() > self.size.steps:
            last = tuning.model_at(self.equal_time())
            found[SOFTMAX_TIME] = questions.saved(self.final(SOFTMAX, seed), last, SOFTMAX_TIME)
        return found

    def asked(self, model: Model | None) -> dict[tuple[str, int, int], Job]:
        """The questions to a model, by task, length (or boxes) and count (of needles, or of writes)."""
        cells = [("needles", *cell) for cell in self.size.needles] + [("boxes", *cell) for cell in self.size.boxes]
        return {
            (task, length, count): questions.ask_job(self.source, self.corpus, model, task, length, count, contexts)
            for task, length, count, contexts in cells
        }

    def loss(self, model: Model | None) -> Job:
        """The loss by position of a model."""
        return questions.loss_job(self.source, self.corpus, model, self.size.loss_texts, self.size.loss_length)

    def about(self, model: Model | None) -> list[Job]:
        """All tests of a model."""
        return [*self.asked(model).values(), self.loss(model), *self.hit_jobs(model)]

    def rounds(self) -> Iterator[list[Job]]:
        """The jobs of every round. A round may read the records of the rounds before it."""
        yield self.first()
        early = [job for arm in (SOFTMAX, ALL) for job in self.sweep(arm).values()]
        yield [*self.key_jobs().values(), *self.layer_jobs(), *self.switch_jobs(), *early, *self.about(None)]
        yield self.together_jobs()
        yield [*self.cost_jobs().values(), *self.sweep(CHOSEN).values()]
        yield [self.final(arm, seed) for arm in ARMS for seed in self.size.seeds]
        yield [job for seed in self.size.seeds for model in self.models(seed).values() for job in self.about(model)]

    def jobs(self) -> list[Job]:
        """The jobs that are known so far."""
        known: list[Job] = []
        for jobs in self.rounds():
            known += jobs
            if not all(job in self.done for job in jobs):
                break
        return list(dict.fromkeys(known))


def share_right(record: Record) -> float:
    """The share of the questions that were answered, in percent."""
    answers = [right for context in record["right"] for right in context]
    return 100 * sum(answers) / len(answers)
