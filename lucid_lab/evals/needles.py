"""S-NIAH and M-NIAH (§4.2): needles in a haystack, in RULER's words, at any length and with any number of needles."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Any, NamedTuple
from uuid import UUID

from tqdm import tqdm

from .haystacks import Haystack, lines, most_units, noise, read_prose, warn_of_repeats
from .tokens import LONGEST, check_sizes, count_tokens, task_tokenizer, token_spans

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
PROMPT = (
    "{some} special magic {kind} {are} hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What {are_all} the special magic {kind} for {query} mentioned in the provided text?"
)
ANSWER = "The special magic {kind} for {query} mentioned in the provided text {are}"
# RULER leaves 128 tokens for an answer. In a short context, leave length / SHARE.
ANSWER_TOKENS, SHARE = 128, 16
# At most length / SLACK tokens stay unused, or fewer than one unit of hay has.
SLACK = 256


class Needle(NamedTuple):
    """A sentence with a key and a value. depth: 0 to 1, in tokens.

    span, value_span: (first, last + 1) of the tokens of the sentence and of the value, in the prompt.
    """

    text: str
    key: str
    value: str
    depth: float
    span: tuple[int, int]
    value_span: tuple[int, int]


@dataclass(frozen=True)
class NeedleSample:
    """A prompt with its answer.

    context: haystack and needles. kind: of the values. query: the keys that are asked for. single: whether there is one
    answer. answer_tokens: room for the answer. haystack_repeats: how often the haystack starts again. needles: in the
    order of the text. tokens: of the prompt.
    """

    context: str
    kind: str
    query: tuple[str, ...]
    single: bool
    answer_tokens: int
    haystack_repeats: int
    needles: tuple[Needle, ...] = ()
    tokens: int = 0

    @property
    def question(self) -> str:
        """The prompt up to the question mark."""
        return self._worded(PROMPT)

    @property
    def prefix(self) -> str:
        """The beginning of the answer, with which the prompt ends."""
        return self._worded(ANSWER)

    @property
    def prompt(self) -> str:
        """What the model gets."""
        return f"{self.question} {self.prefix}"

    @property
    def asked(self) -> list[Needle]:
        """The needles that are asked for, in the order of the question."""
        return [needle for key in self.query for needle in self.needles if needle.key == key]

    @property
    def answer(self) -> str:
        """The values that are asked for, as the text that continues the prompt."""
        return f" {', '.join(needle.value for needle in self.asked)}."

    @property
    def answer_spans(self) -> list[tuple[int, int]]:
        """The tokens of the answers in the prompt."""
        return [needle.value_span for needle in self.asked]

    def _worded(self, template: str) -> str:
        query = ", ".join(self.query[:-1]) + ", and " + self.query[-1] if len(self.query) > 1 else self.query[0]
        some, are, are_all = ("A", "is", "is") if self.single else ("Some", "are", "are all")
        kind = self.kind.removesuffix("s") if self.single else self.kind
        return template.format(context=self.context, kind=kind, query=query, some=some, are=are, are_all=are_all)


def _word(random: Random) -> str:
    adjectives, nouns = ruler_words()
    return f"{random.choice(adjectives)}-{random.choice(nouns)}"


MAKERS: dict[str, Callable[[Random], str]] = {
    "numbers": lambda random: str(random.randrange(10**6, 10**7)),
    "words": _word,
    "uuids": lambda random: str(UUID(int=random.getrandbits(128), version=4)),
}


@cache
def ruler_words() -> tuple[list[str], list[str]]:
    """The adjectives and nouns of RULER's keys."""
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
    raise ValueError(f"there are not enough different {kind} for {len(taken)} needles")


def make_needles(
    tokenizer: Any,
    length: int,
    needles: int = 1,
    *,
    seed: int = 0,
    index: int = 0,
    haystack: str = "prose",
    queries: int = 1,
    values: int = 1,
    keys: str = "words",
    kind: str = "numbers",
    answer_tokens: int = 0,
) -> NeedleSample:
    """Sample `index` of a seed. It depends on the arguments alone.

    length: tokens of the prompt with room for the answer, which the haystack fills.
    needles: the number of keys. queries: how many of them the question asks for. values: sentences for every key.
    haystack: "noise", "needles" (more sentences like needles), or a name that `read_prose` knows.
    keys, kind: the kind of the keys and of the values: "numbers", "words" or "uuids".
    answer_tokens: room for the answer; 0 for RULER's 128, fewer in a short context, more if the answers need more.
    """
    if not 1 <= length <= LONGEST:
        raise ValueError(f"--lengths must be 1 to {LONGEST}, got {length}")
    if min(needles, queries, values) < 1 or queries > needles or needles * values > length:
        raise ValueError(
            f"--needles must be 1 to --lengths {length}, got {needles}; queries 1 to needles, got {queries}; values at "
            f"least 1, got {values}"
        )
    if answer_tokens < 0:
        raise ValueError(f"--answer-tokens must not be negative, got {answer_tokens}")
    if keys not in MAKERS or kind not in MAKERS:
        raise ValueError(f"keys and kind must be one of {', '.join(MAKERS)}, got {keys!r} and {kind!r}")
    random = Random(f"{seed}/{length}/{needles}/{index}")
    taken: set[str] = set()
    all_keys = [_fresh(keys, random, taken) for _ in range(needles)]
    query = tuple(random.sample(all_keys, queries))
    pairs = [(key, _fresh(kind, random, taken)) for key in all_keys for _ in range(values)]
    random.shuffle(pairs)
    depths = sorted(random.random() for _ in pairs)
    sentences = [NEEDLE.format(kind=kind, key=key, value=value) for key, value in pairs]

    def line() -> str:
        return NEEDLE.format(kind=kind, key=_fresh(keys, random, taken), value=_fresh(kind, random, taken))

    if haystack in ("noise", "needles"):
        hay = noise() if haystack == "noise" else lines(line)
    else:
        hay = read_prose(haystack).from_random_place(random)
    room = answer_tokens or _answer_room(tokenizer, length, queries * values, kind)

    def written(units: int) -> NeedleSample:
        context = _hide(sentences, depths, hay, units)
        return NeedleSample(context, kind, query, queries * values == 1, room, hay.repeats(units))

    units = most_units(
        lambda units: count_tokens(tokenizer, written(units).prompt),
        length - room,
        length // SLACK,
        lambda base: (
            f"{len(pairs)} needles with their question take {base} tokens and the answer {room}, more than --lengths "
            f"{length}: take fewer needles, or a length of at least {base + room}"
        ),
    )
    sample = written(units)
    prompt, tokens, places = sample.prompt, count_tokens(tokenizer, sample.prompt), []
    for (_, value), text in zip(pairs, sentences, strict=True):
        end = prompt.index(text) + len(text)  # Values are unique, and so are the sentences.
        places += [(end - len(text), end), (end - 1 - len(value), end - 1)]
    spans = token_spans(tokenizer, prompt, places)
    located = zip(sentences, pairs, spans[::2], spans[1::2], strict=True)
    needles_found = tuple(Needle(text, *pair, span[0] / tokens, span, inner) for text, pair, span, inner in located)
    return replace(sample, needles=needles_found, tokens=tokens)


def _hide(sentences: list[str], depths: list[float], hay: Haystack, units: int) -> str:
    """`units` of hay with the sentences at their depths."""
    pieces = hay.take(units)
    text: list[str] = []
    done = 0
    for depth, sentence in zip(depths, sentences, strict=True):
        place = int(depth * (len(pieces) + 1))
        text += [*pieces[done:place], sentence]
        done = place
    return hay.separator.join([*text, *pieces[done:]])


@cache
def _answer_room(tokenizer: Any, length: int, values: int, kind: str) -> int:
    random = Random("answers")
    answers = [", ".join(MAKERS[kind](random) for _ in range(values)) for _ in range(32)]
    longest = max(count_tokens(tokenizer, f" {answer}.") for answer in answers)
    return max(min(ANSWER_TOKENS, length // SHARE), longest + longest // 4 + 2)


# The tasks niah_NAME of RULER, for any number N of needles: arguments of `make_needles`. A task without a haystack gets
# --haystack, which replaces RULER's essays. "many" is what N counts: needles (keys, of which one is asked for), values
# of one key, or queries (keys, all asked for).
SINGLE: dict[str, dict[str, str]] = {"single_1": {"haystack": "noise"}, "single_2": {}, "single_3": {"kind": "uuids"}}
MULTIPLE: dict[str, dict[str, str]] = {
    "multikey_1": {},
    "multikey_2": {"haystack": "needles"},
    "multikey_3": {"haystack": "needles", "keys": "uuids", "kind": "uuids"},
    "multivalue": {"many": "values"},
    "multiquery": {"many": "queries"},
}


def dataset(
    *,
    variant: str = "multikey_1",
    needles: int = 4,
    length: int = 2048,
    samples: int = 100,
    seed: int = 0,
    haystack: str = "prose",
    answer_tokens: int = 0,
    **metadata: Any,
) -> dict[str, Any]:
    """The documents of `lucid_sniah` and `lucid_mniah`, with RULER's names. The arguments are metadata of the task."""
    from datasets import Dataset

    variants = SINGLE | MULTIPLE
    if variant not in variants:
        raise ValueError(f"--variants must be some of {', '.join(variants)}, got {variant!r}")
    check_sizes(samples, length, seed)
    tokenizer = task_tokenizer(metadata)
    how: dict[str, Any] = {"haystack": haystack, "answer_tokens": answer_tokens, "seed": seed, **variants[variant]}
    many, count = how.pop("many", "needles"), 1 if variant in SINGLE else needles
    counts = {"needles": 1 if many == "values" else count} | ({many: count} if many != "needles" else {})
    documents, repeats = [], []
    for index in tqdm(range(samples), desc="making samples", delay=5, leave=False):
        sample = make_needles(tokenizer, length, index=index, **counts, **how)
        repeats.append(sample.haystack_repeats)
        documents.append(
            {
                "input": sample.question,
                "gen_prefix": sample.prefix,
                "outputs": [needle.value for needle in sample.asked],
                "tokens": sample.tokens,
                "answer_tokens": sample.answer_tokens,
                "haystack_repeats": sample.haystack_repeats,
                "needles": [needle._asdict() for needle in sample.needles],
                "answer_spans": sample.answer_spans,
            }
        )
    warn_of_repeats(how["haystack"], length, repeats)
    return {"test": Dataset.from_list(documents)}


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """RULER's score: the share of the answers that are in the output, in upper or lower case."""
    from lm_eval.tasks.ruler.common_utils import postprocess_pred, string_match_all

    return {"score": string_match_all(postprocess_pred(results), [doc["outputs"]])}
