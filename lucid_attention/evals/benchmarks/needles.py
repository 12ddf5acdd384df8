"""Needles in a haystack, in RULER's words: S-NIAH and M-NIAH at any length, with any number of needles.

A sample is made from (seed, length, needles, index) and the settings alone. It fills its length but for a unit of hay,
question and room for the answer included, and says where its needles are, in characters and in tokens.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any
from uuid import UUID

from tqdm import tqdm

from ..runs import EvalError
from ..spans import Encoded, encode, load_tokenizer
from ..spans import count as count_tokens
from .haystacks import KINDS as HAYSTACKS
from .haystacks import Haystack, lines, noise, read_prose

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
PROMPT = (
    "{some} special magic {kind} {are} hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What {are_all} the special magic {kind} for {query} mentioned in the provided text?"
)
ANSWER = "The special magic {kind} for {query} mentioned in the provided text {are}"
LENGTHS = (256, 131_072)
# RULER's room for an answer. A sixteenth of a short context.
ANSWER_TOKENS, SHARE = 128, 16
# One part in so many of a length may stay empty, or less than a unit of hay takes.
SLACK = 256
PROBE = 64


@dataclass(frozen=True)
class Needles:
    """What all samples of a cell have in common.

    length: tokens of prompt and answer. needles: how many keys. queries: how many of them are asked for. values: how
    many values, and so needle sentences, every key has. keys, kind: "numbers", "words" or "uuids", of keys and values.
    haystack: see `read_prose`. answer_tokens: room for the answer, 0 for RULER's.
    """

    length: int
    needles: int = 1
    queries: int = 1
    values: int = 1
    keys: str = "words"
    kind: str = "numbers"
    haystack: str = "prose"
    answer_tokens: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        low, high = LENGTHS
        if not low <= self.length <= high:
            raise EvalError(f"--lengths must be {low} to {high}, got {self.length}")
        for name in ("needles", "queries", "values"):
            if getattr(self, name) < 1:
                raise EvalError(f"--{name} must be at least 1, got {getattr(self, name)}")
        if self.queries > self.needles:
            raise EvalError(f"--queries must be at most the number of needles, {self.needles}, got {self.queries}")
        if self.answer_tokens < 0:
            raise EvalError(f"--answer-tokens must not be negative, got {self.answer_tokens}")
        for name in ("keys", "kind"):
            if getattr(self, name) not in MAKERS:
                raise EvalError(f"--{name} must be one of {', '.join(MAKERS)}, got {getattr(self, name)!r}")
        if self.haystack not in HAYSTACKS or self.haystack == "essays":
            read_prose(self.haystack)


@dataclass(frozen=True)
class Draft:
    """A sample before its hay is measured: all that is drawn at random."""

    sentences: list[str]
    keys: list[str]
    values: list[str]
    asked: list[bool]
    depths: list[float]
    query: str
    hay: Haystack


def _number(random: Random) -> str:
    return str(random.randrange(10**6, 10**7))


def _word(random: Random) -> str:
    adjectives, nouns = _words()
    return f"{random.choice(adjectives)}-{random.choice(nouns)}"


def _uuid(random: Random) -> str:
    return str(UUID(int=random.getrandbits(128), version=4))


MAKERS: dict[str, Callable[[Random], str]] = {"numbers": _number, "words": _word, "uuids": _uuid}


@cache
def _words() -> tuple[list[str], list[str]]:
    from wonderwords import RandomWord

    known = RandomWord()
    adjectives, nouns = (sorted(set(known.filter(include_categories=[name]))) for name in ("adjective", "noun"))
    return adjectives, nouns


def _fresh(kind: str, random: Random, taken: set[str]) -> str:
    """One that is not taken, and is from now on."""
    for _ in range(1000):
        made = MAKERS[kind](random)
        if made not in taken:
            taken.add(made)
            return made
    raise EvalError(f"there are not enough different {kind} for {len(taken)} needles")


def draft(settings: Needles, index: int) -> Draft:
    """Draw the sample `index`: keys, values, which are asked for, where they stand."""
    random = Random(f"{settings.seed}/{settings.length}/{settings.needles}/{index}")
    taken: set[str] = set()
    keys = [_fresh(settings.keys, random, taken) for _ in range(settings.needles)]
    asked_keys = random.sample(keys, settings.queries)
    pairs = [(key, _fresh(settings.kind, random, taken)) for key in keys for _ in range(settings.values)]
    # One needle in each of equal shares of the depth, in any order.
    random.shuffle(pairs)
    depths = [(share + random.random()) / len(pairs) for share in range(len(pairs))]

    def line() -> str:
        key, value = _fresh(settings.keys, random, taken), _fresh(settings.kind, random, taken)
        return NEEDLE.format(kind=settings.kind, key=key, value=value)

    if settings.haystack == "noise":
        hay = noise()
    elif settings.haystack == "needles":
        hay = lines(line)
    else:
        hay = read_prose(settings.haystack).from_random_place(random)
    return Draft(
        sentences=[NEEDLE.format(kind=settings.kind, key=key, value=value) for key, value in pairs],
        keys=[key for key, _ in pairs],
        values=[value for _, value in pairs],
        asked=[key in asked_keys for key, _ in pairs],
        depths=depths,
        query=", ".join(asked_keys[:-1]) + ", and " + asked_keys[-1] if len(asked_keys) > 1 else asked_keys[0],
        hay=hay,
    )


def write(settings: Needles, drawn: Draft, units: int) -> tuple[str, str, list[int]]:
    """The question with so much hay, how its answer begins, and where in the text each needle starts."""
    pieces = drawn.hay.take(units)
    text: list[str] = []
    starts: list[int] = []
    position, done = 0, 0
    for depth, sentence in zip(drawn.depths, drawn.sentences, strict=True):
        place = int(depth * (len(pieces) + 1))
        before = pieces[done:place]
        position += sum(map(len, before)) + len(drawn.hay.separator) * len(before)
        starts.append(position)
        position += len(sentence) + len(drawn.hay.separator)
        text += [*before, sentence]
        done = place
    text += pieces[done:]
    single = settings.queries * settings.values == 1
    kind = settings.kind.removesuffix("s") if single else settings.kind
    some, are, are_all = ("A", "is", "is") if single else ("Some", "are", "are all")
    context = drawn.hay.separator.join(text)
    question = PROMPT.format(context=context, kind=kind, query=drawn.query, some=some, are=are, are_all=are_all)
    head = question.index("\n") + 1
    return question, ANSWER.format(kind=kind, query=drawn.query, are=are), [head + each for each in starts]


def room_for_answer(settings: Needles, tokenizer: Any) -> int:
    """RULER's 128 tokens, fewer in a short context, more where the answers take more."""
    if settings.answer_tokens:
        return settings.answer_tokens
    random = Random("answers")
    wanted = settings.queries * settings.values
    tried = [", ".join(MAKERS[settings.kind](random) for _ in range(wanted)) for _ in range(32)]
    longest = max(count_tokens(tokenizer, f" {each}.") for each in tried)
    return max(min(ANSWER_TOKENS, settings.length // SHARE), longest + longest // 4 + 2)


def make_sample(settings: Needles, tokenizer: Any, index: int) -> dict[str, Any]:
    """Sample `index`, as a document of the harness.

    input and gen_prefix make the prompt; outputs are the answers. needles lists each needle with its text, key, value,
    depth (0 to 1, of the prompt's tokens), whether it is asked for, and [first, last + 1] tokens of the whole and of
    its value; answer_spans are the spans of the values that are asked for.
    """
    drawn = draft(settings, index)
    answer_room = room_for_answer(settings, tokenizer)
    room = settings.length - answer_room

    def tokens(units: int) -> int:
        question, prefix, _ = write(settings, drawn, units)
        return count_tokens(tokenizer, f"{question} {prefix}")

    units = largest(tokens, room, settings.length // SLACK, _complaint(settings, answer_room))
    question, prefix, starts = write(settings, drawn, units)
    encoded = encode(tokenizer, f"{question} {prefix}")
    needles = list(_located(drawn, encoded, starts))
    order = {key: place for place, key in enumerate(drawn.query.replace(", and ", ", ").split(", "))}
    answers = sorted((each for each in needles if each["asked"]), key=lambda each: order[each["key"]])
    return {
        "index": index,
        "input": question,
        "gen_prefix": prefix,
        "outputs": [each["value"] for each in answers],
        "tokens": len(encoded),
        "answer_tokens": answer_room,
        "max_length": settings.length,
        "needles": needles,
        "answer_spans": [each["value_span"] for each in answers],
    }


def _located(drawn: Draft, encoded: Encoded, starts: list[int]) -> Iterator[dict[str, Any]]:
    for text, key, value, asked, start in zip(
        drawn.sentences, drawn.keys, drawn.values, drawn.asked, starts, strict=True
    ):
        end = start + len(text)
        span, value_span = encoded.span(start, end), encoded.span(end - 1 - len(value), end - 1)
        depth = span[0] / len(encoded)
        yield {
            "text": text, "key": key, "value": value, "asked": asked, "depth": depth, "span": span,
            "value_span": value_span,
        }  # fmt: skip


def largest(count: Callable[[int], int], room: int, slack: int, complaint: Callable[[int], str]) -> int:
    """The most units whose count is at most `room`, or so many that less than `slack` is left.

    Interpolates, then halves: at most some 25 calls, two or three as a rule. A unit counts at least 1.
    """
    base = count(0)
    if base > room:
        raise EvalError(complaint(base))
    low, left, high = 0, room - base, room - base + 1
    guess = min(max(PROBE, room // PROBE), high - 1)
    for step in range(64):
        if left <= slack or high - low <= 1:
            break
        # Where interpolation has not ended the search, halving does.
        tried = min(max(guess, low + 1), high - 1) if step < 6 else (low + high) // 2
        counted = count(tried)
        if counted <= room:
            low, left = tried, room - counted
        else:
            high = tried
        guess = int((room - slack // 2 - base) * tried / max(counted - base, 1))
    return low


def _complaint(settings: Needles, answer_room: int) -> Callable[[int], str]:
    def said(base: int) -> str:
        return (
            f"{settings.needles * settings.values} needles with their question take {base} tokens and the answer "
            f"{answer_room}, more than --lengths {settings.length}: take fewer needles, or a length of at least "
            f"{base + answer_room}"
        )

    return said


def check_fits(settings: Needles, tokenizer: Any, samples: int) -> None:
    """Refuse a cell whose samples have no room, before any is made."""
    answer_room = room_for_answer(settings, tokenizer)
    for index in range(min(samples, 32)):
        question, prefix, _ = write(settings, draft(settings, index), 0)
        base = count_tokens(tokenizer, f"{question} {prefix}")
        if base + answer_room > settings.length:
            raise EvalError(_complaint(settings, answer_room)(base))


def dataset(*, tokenizer: str, samples: int, settings: dict[str, Any], **_: Any) -> dict[str, Any]:
    """What the harness's `custom_dataset` asks for. The arguments are the task's metadata."""
    from datasets import Dataset

    loaded, needles = load_tokenizer(tokenizer), Needles(**settings)
    # Long ones take seconds each. What the harness writes there is hidden: this is not.
    bar = tqdm(range(samples), desc="making samples", delay=5, leave=False, file=sys.__stderr__)
    return {"test": Dataset.from_list([make_sample(needles, loaded, index) for index in bar])}


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """RULER's score: the share of the answers that are in the output, whatever their case."""
    from lm_eval.tasks.ruler.common_utils import postprocess_pred, string_match_all

    return {"score": string_match_all(postprocess_pred(results), [doc["outputs"]])}
