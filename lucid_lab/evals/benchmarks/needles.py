"""S-NIAH and M-NIAH (§4.2): needles in a haystack, in RULER's words, at any length and with any number of needles.

A sample depends on (seed, length, needles, index) and the settings alone. Prompt and room for the answer fill the
length up to one unit of hay. A sample records which tokens hold its needles and their values.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from random import Random
from typing import Any, NamedTuple
from uuid import UUID

from tqdm import tqdm

from ..cells import LONGEST, Cell, EvalError, Labels, Options
from ..tokens import EncodedText, count_tokens, encode, load_tokenizer
from .haystacks import Haystack, lines, most_units, noise, prose_sha256, read_prose, warn_of_repeats

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
PROMPT = (
    "{some} special magic {kind} {are} hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What {are_all} the special magic {kind} for {query} mentioned in the provided text?"
)
ANSWER = "The special magic {kind} for {query} mentioned in the provided text {are}"
# Tokens of the shortest and the longest sample.
LENGTHS = (256, LONGEST)
# RULER leaves 128 tokens for an answer. In a short context, leave length / SHARE.
ANSWER_TOKENS, SHARE = 128, 16
# At most length / SLACK tokens stay unused, or fewer than one unit of hay has.
SLACK = 256


class Variant(NamedTuple):
    """A task of RULER, niah_NAME, for any number N of needles.

    haystack: None for --haystack, which stands in the place of RULER's essays. keys, kind: of keys and values.
    many: what N counts: "needles" (keys, of which one is asked for), "values" of one key, or "queries" (keys, all
    asked for).
    """

    haystack: str | None = None
    keys: str = "words"
    kind: str = "numbers"
    many: str = "needles"


SINGLE = {"single_1": Variant("noise"), "single_2": Variant(), "single_3": Variant(kind="uuids")}
MULTIPLE = {
    "multikey_1": Variant(),
    "multikey_2": Variant("needles"),
    "multikey_3": Variant("needles", "uuids", "uuids"),
    "multivalue": Variant(many="values"),
    "multiquery": Variant(many="queries"),
}


@dataclass(frozen=True)
class Needles:
    """The settings that all samples of a cell share.

    length: tokens of prompt and answer.
    needles: the number of keys. queries: how many of the keys a question asks for.
    values: the values, and so the needle sentences, of every key.
    keys, kind: the kind of the keys and of the values: "numbers", "words" or "uuids".
    haystack: "noise", "needles", or a name that `read_prose` knows.
    answer_tokens: room for the answer; 0 for RULER's, see `room_for_answer`.
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
        if self.needles * self.values > self.length:
            raise EvalError(
                f"{self.needles * self.values} needles must fit into --lengths {self.length}: take fewer needles"
            )
        if self.queries > self.needles:
            raise EvalError(f"--queries must be at most the number of needles, {self.needles}, got {self.queries}")
        if self.answer_tokens < 0:
            raise EvalError(f"--answer-tokens must not be negative, got {self.answer_tokens}")
        for name in ("keys", "kind"):
            if getattr(self, name) not in MAKERS:
                raise EvalError(f"--{name} must be one of {', '.join(MAKERS)}, got {getattr(self, name)!r}")
        if self.haystack not in ("noise", "needles", "prose"):
            read_prose(self.haystack)


@dataclass(frozen=True)
class Draft:
    """Everything random in a sample. The amount of hay is still open.

    sentences, keys, values, asked, depths: one entry for every needle, in the order of the text.
    """

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

    generator = RandomWord()
    adjectives, nouns = (sorted(set(generator.filter(include_categories=[name]))) for name in ("adjective", "noun"))
    return adjectives, nouns


def _fresh(kind: str, random: Random, taken: set[str]) -> str:
    """A key or value that is not in `taken`. It is added to `taken`."""
    for _ in range(1000):
        word = MAKERS[kind](random)
        if word not in taken:
            taken.add(word)
            return word
    raise EvalError(f"there are not enough different {kind} for {len(taken)} needles")


def draft(settings: Needles, index: int) -> Draft:
    """Draw sample `index`: its keys and values, which keys are asked for, and the depths of the needles."""
    random = Random(f"{settings.seed}/{settings.length}/{settings.needles}/{index}")
    taken: set[str] = set()
    keys = [_fresh(settings.keys, random, taken) for _ in range(settings.needles)]
    asked_keys = random.sample(keys, settings.queries)
    pairs = [(key, _fresh(settings.kind, random, taken)) for key in keys for _ in range(settings.values)]
    # The depth is divided into equal shares, with one needle in each.
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
    """The question with `units` of hay, the beginning of its answer, and the first character of each needle."""
    pieces = drawn.hay.take(units)
    text: list[str] = []
    starts: list[int] = []
    position, done = 0, 0
    for depth, sentence in zip(drawn.depths, drawn.sentences, strict=True):
        piece_index = int(depth * (len(pieces) + 1))
        before = pieces[done:piece_index]
        position += sum(map(len, before)) + len(drawn.hay.separator) * len(before)
        starts.append(position)
        position += len(sentence) + len(drawn.hay.separator)
        text += [*before, sentence]
        done = piece_index
    text += pieces[done:]
    single = settings.queries * settings.values == 1
    kind = settings.kind.removesuffix("s") if single else settings.kind
    some, are, are_all = ("A", "is", "is") if single else ("Some", "are", "are all")
    context = drawn.hay.separator.join(text)
    question = PROMPT.format(context=context, kind=kind, query=drawn.query, some=some, are=are, are_all=are_all)
    head = question.index("\n") + 1
    return question, ANSWER.format(kind=kind, query=drawn.query, are=are), [head + start for start in starts]


def room_for_answer(settings: Needles, tokenizer: Any) -> int:
    """Tokens for the answer: RULER's 128, fewer in a short context, more if the answers need more."""
    if settings.answer_tokens:
        return settings.answer_tokens
    random = Random("answers")
    values = settings.queries * settings.values
    answers = [", ".join(MAKERS[settings.kind](random) for _ in range(values)) for _ in range(32)]
    longest = max(count_tokens(tokenizer, f" {answer}.") for answer in answers)
    return max(min(ANSWER_TOKENS, settings.length // SHARE), longest + longest // 4 + 2)


def make_sample(settings: Needles, tokenizer: Any, index: int) -> dict[str, Any]:
    """Sample `index`, as a document of the harness.

    input, gen_prefix: the prompt. outputs: the answers.
    needles: of each needle, its text, key, value, whether it is asked for, its depth (0 to 1, in tokens of the
        prompt), and [first, last + 1] of the tokens of the sentence (span) and of the value (value_span).
    answer_spans: the spans of the values that are asked for.
    """
    drawn = draft(settings, index)
    answer_room = room_for_answer(settings, tokenizer)
    room = settings.length - answer_room

    def tokens(units: int) -> int:
        question, prefix, _ = write(settings, drawn, units)
        return count_tokens(tokenizer, f"{question} {prefix}")

    units = most_units(tokens, room, settings.length // SLACK, _complaint(settings, answer_room))
    question, prefix, starts = write(settings, drawn, units)
    encoded = encode(tokenizer, f"{question} {prefix}")
    needles = list(_located(drawn, encoded, starts))
    order = {key: place for place, key in enumerate(drawn.query.replace(", and ", ", ").split(", "))}
    answers = sorted((needle for needle in needles if needle["asked"]), key=lambda needle: order[needle["key"]])
    return {
        "index": index,
        "input": question,
        "gen_prefix": prefix,
        "outputs": [needle["value"] for needle in answers],
        "tokens": len(encoded),
        "answer_tokens": answer_room,
        "max_length": settings.length,
        "haystack_repeats": drawn.hay.repeats(units),
        "needles": needles,
        "answer_spans": [needle["value_span"] for needle in answers],
    }


def _located(drawn: Draft, encoded: EncodedText, starts: list[int]) -> Iterator[dict[str, Any]]:
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


def _complaint(settings: Needles, answer_room: int) -> Callable[[int], str]:
    def message(base: int) -> str:
        return (
            f"{settings.needles * settings.values} needles with their question take {base} tokens and the answer "
            f"{answer_room}, more than --lengths {settings.length}: take fewer needles, or a length of at least "
            f"{base + answer_room}"
        )

    return message


def check_fits(settings: Needles, tokenizer: Any, samples: int) -> None:
    """Refuse a cell whose samples do not fit their length, before any sample is made."""
    answer_room = room_for_answer(settings, tokenizer)
    for index in range(min(samples, 32)):
        question, prefix, _ = write(settings, draft(settings, index), 0)
        base = count_tokens(tokenizer, f"{question} {prefix}")
        if base + answer_room > settings.length:
            raise EvalError(_complaint(settings, answer_room)(base))


def dataset(*, tokenizer: str, samples: int, settings: dict[str, Any], **_: Any) -> dict[str, Any]:
    """The harness's `custom_dataset`. The arguments are the cell's metadata."""
    from datasets import Dataset

    loaded, needles = load_tokenizer(tokenizer), Needles(**settings)
    # A long sample takes seconds. The bar goes to the real stderr, since `quiet` hides sys.stderr.
    bar = tqdm(range(samples), desc="making samples", delay=5, leave=False, file=sys.__stderr__)
    made = [make_sample(needles, loaded, index) for index in bar]
    warn_of_repeats(needles.haystack, needles.length, (sample["haystack_repeats"] for sample in made))
    return {"test": Dataset.from_list(made)}


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """RULER's score: the share of the answers that are in the output, in upper or lower case."""
    from lm_eval.tasks.ruler.common_utils import postprocess_pred, string_match_all

    return {"score": string_match_all(postprocess_pred(results), [doc["outputs"]])}


def single(options: Options) -> list[Cell]:
    """S-NIAH: RULER's tasks with one needle, at every length."""
    return [
        _cell("lucid_sniah", {"task": name, "length": length}, variant, options, length, 1)
        for name, variant in _chosen(SINGLE, options)
        for length in options.lengths or (2048, 4096)
    ]


def multiple(options: Options) -> list[Cell]:
    """M-NIAH: RULER's tasks with many needles, for every number of needles and length."""
    return [
        _cell("lucid_mniah", {"task": name, "needles": count, "length": length}, variant, options, length, count)
        for name, variant in _chosen(MULTIPLE, options)
        for count in options.needles or (2, 4, 6, 8, 10)
        for length in options.lengths or (2048, 4096)
    ]


def _chosen(variants: dict[str, Variant], options: Options) -> list[tuple[str, Variant]]:
    """The variants of a family that --variants names; all for none."""
    known = SINGLE | MULTIPLE
    for name in options.variants:
        if name not in known:
            raise EvalError(f"--variants must be some of {', '.join(known)}, got {name!r}")
    chosen = [item for item in variants.items() if not options.variants or item[0] in options.variants]
    if not chosen:
        raise EvalError(f"--variants must hold some of {', '.join(variants)}, got {', '.join(options.variants)}")
    return chosen


def _cell(task: str, labels: Labels, variant: Variant, options: Options, length: int, count: int) -> Cell:
    settings = Needles(
        length=length,
        needles=1 if variant.many == "values" else count,
        queries=count if variant.many == "queries" else 1,
        values=count if variant.many == "values" else 1,
        keys=variant.keys,
        kind=variant.kind,
        haystack=variant.haystack or options.haystack,
        answer_tokens=options.answer_tokens,
        seed=options.seed,
    )
    if options.samples < 1:
        raise EvalError(f"--samples must be at least 1, got {options.samples}")
    tokenizer = load_tokenizer(options.tokenizer)
    check_fits(settings, tokenizer, options.samples)
    return Cell(
        labels,
        metric="score",
        task=task,
        metadata={
            "tokenizer": options.tokenizer,
            "samples": options.samples,
            "settings": asdict(settings),
            "haystack_sha256": prose_sha256(settings.haystack),
        },
        answer_tokens=room_for_answer(settings, tokenizer),
        length=length,
        keep=("tokens", "haystack_repeats", "needles", "answer_spans"),
    )
