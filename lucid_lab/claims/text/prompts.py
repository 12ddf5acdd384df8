"""Prompts with answers to train small models of text on, of the kinds that `lucid eval` asks, and a tokenizer."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from ...data.tokenizer import BOS, EOS, PAD
from ...evals.benchmarks.haystacks import most_units, read_prose
from ...evals.benchmarks.needles import Draft, Needles, draft, write
from ...evals.make_data import Line, babilong_lines, question_lines
from ...evals.tokens import count_tokens, load_tokenizer
from .docstring_questions import NAMES, write_questions

# Far from the seeds of evaluations, which are small numbers.
TRAINING_SEED = 1_000_003
# Words and single digits: a model learns to copy ten digits long before it learns to copy a hundred pairs of digits.
PIECES = r" ?\d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Texts to train a tokenizer on.
SAMPLE = 400


@dataclass(frozen=True)
class NeedleTexts:
    """RULER's needles in haystacks of random size.

    needles: numbers of needles, in turn. length: the most tokens of a prompt with its answer.
    keys, kind, haystack: as in `Needles`.
    """

    needles: tuple[int, ...] = (1, 2, 4)
    length: int = 256
    keys: str = "words"
    kind: str = "numbers"
    haystack: str = "noise"

    def sample(self) -> Iterator[str]:
        """Texts to train a tokenizer on."""
        for index in range(SAMPLE):
            settings, drawn = self._drawn(index)
            prompt, prefix, _ = write(settings, drawn, 20)
            yield f"{prompt} {prefix}{answer_to(drawn)}"

    def lines(self, samples: int, tokenizer: str, folder: Path) -> Iterator[Line]:
        """Yield `samples` prompts. The number of needles changes with every prompt."""
        loaded = load_tokenizer(tokenizer)
        for index in range(samples):
            settings, drawn = self._drawn(index)
            answer = answer_to(drawn)

            def tokens(units: int, settings: Needles = settings, drawn: Draft = drawn) -> int:
                question, prefix, _ = write(settings, drawn, units)
                return count_tokens(loaded, f"{question} {prefix}")

            # One token for the end, which follows the answer.
            room = self.length - count_tokens(loaded, answer) - 1
            units_that_fit = most_units(
                tokens, room, 4, lambda base: f"needles and answers take more than {self.length} tokens"
            )
            question, prefix, _ = write(settings, drawn, Random(f"hay/{index}").randint(0, units_that_fit))
            yield {"prompt": f"{question} {prefix}", "answer": answer}

    def _drawn(self, index: int) -> tuple[Needles, Draft]:
        settings = Needles(
            length=256,
            needles=self.needles[index % len(self.needles)],
            keys=self.keys,
            kind=self.kind,
            haystack=self.haystack,
            seed=TRAINING_SEED,
        )
        return settings, draft(settings, index)


def answer_to(drawn: Draft) -> str:
    """The value that is asked for, spelt as in its needle."""
    (value,) = (value for value, asked in zip(drawn.values, drawn.asked, strict=True) if asked)
    return f" {value}."


@dataclass(frozen=True)
class Stories:
    """Stories of bAbI in a background of text. tasks, lengths, haystack: as for `lucid make-data babilong`."""

    tasks: tuple[str, ...] = ("qa1",)
    lengths: tuple[int, ...] = (0,)
    haystack: str = "prose"

    def sample(self) -> Iterator[str]:
        """Texts to train a tokenizer on: stories, and every fourth sentence of the background."""
        from ...evals.benchmarks.babi import make_story
        from ...evals.benchmarks.babilong import render_prompt

        random = Random("stories")
        for index in range(SAMPLE):
            story = make_story(self.tasks[index % len(self.tasks)], random)
            yield f"{render_prompt(story.task, ' '.join(story.facts), story.question)} {story.sentence}"
        if self.haystack == "prose":
            yield from islice(read_prose("prose").sentences, 0, None, 4)

    def lines(self, samples: int, tokenizer: str, folder: Path) -> Iterator[Line]:
        """Yield about `samples` prompts, equally many of every task and length."""
        cell = -(-samples // (len(self.tasks) * len(self.lengths)))
        return babilong_lines(
            tasks=self.tasks,
            lengths=self.lengths,
            samples=cell,
            seed=0,  # Training and evaluation have different stories with any seed.
            tokenizer=tokenizer,
            haystack=self.haystack,
        )


@dataclass(frozen=True)
class Questions:
    """Questions about functions of the standard library.

    functions: in every text. held_out: questions of each data set for evaluation.
    """

    functions: int = 4
    held_out: int = 50

    def sample(self) -> Iterator[str]:
        """Texts to train a tokenizer on, of the training split."""
        from .docstring_questions import row

        for index in range(SAMPLE):
            question = row("train", self.functions, TRAINING_SEED, index)
            yield f"{question['input']}\n\nQuestion: \nAnswer: {question['output']}"

    def lines(self, samples: int, tokenizer: str, folder: Path) -> Iterator[Line]:
        """Yield about `samples` prompts, and write all questions into `folder` in the format of SCROLLS."""
        per_data_set = -(-samples // len(NAMES))
        write_questions(folder, count=self.functions, samples=per_data_set, held_out=self.held_out)
        return question_lines(NAMES, str(folder))


KINDS: dict[str, Callable[..., Any]] = {"needles": NeedleTexts, "stories": Stories, "questions": Questions}


def write_tokenizer(texts: Iterable[str], vocabulary: int, folder: Path) -> None:
    """Train a byte-level BPE in which every digit is a token, and save it in `folder`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PIECES), "isolated"), as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    settings = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD, "clean_up_tokenization_spaces": False}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings).save_pretrained(folder)
