"""BABILong QA1 to QA5: the facts of a bAbI story, in order, among the sentences of a long text.

A sample is made from (split, task, length, seed, index) and nothing else. Training and evaluation never share a story:
they draw from generators with different seeds, and each keeps only stories whose content falls to its side.
"""

import re
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from random import Random
from typing import Any

from ..runs import EvalError, Options, Run
from ..spans import count, load_tokenizer
from .babi import TASKS, Story, make_story
from .babi.world import GIVERS, PEOPLE
from .babilong_prompts import lax, rendered, strict
from .haystacks import Haystack, Prose, noise, read_prose
from .needles import largest

SPLITS = ("train", "test")
# One story in so many is for evaluation.
HELD_OUT = 5
# Stories that are drawn for a sample before it is said that none fits.
DRAWS = 200
ANSWER_TOKENS = 32
LENGTHS = (0, 2048, 4096)
# As many tokens of a length may stay empty, of every thousand.
SLACK = 1024
SCORINGS = ("strict", "lax")
NAMES = re.compile(rf"\b({'|'.join(sorted({*PEOPLE, *GIVERS}))})\b")


@dataclass(frozen=True)
class Babilong:
    """What all samples of a cell have in common.

    task: "qa1" to "qa5". length: tokens of prompt and answer; 0 for the facts alone, as in BABILong's "0k".
    split: "train" or "test". background: as in `read_prose`, or "noise". answer_tokens: room for the answer.
    """

    task: str
    length: int
    split: str = "test"
    background: str = "prose"
    answer_tokens: int = ANSWER_TOKENS
    seed: int = 0

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise EvalError(f"task must be one of {', '.join(TASKS)}, got {self.task!r}")
        if self.length < 0:
            raise EvalError(f"--lengths must not be negative, got {self.length}")
        if self.split not in SPLITS:
            raise EvalError(f"split must be one of {', '.join(SPLITS)}, got {self.split!r}")
        if self.answer_tokens < 1:
            raise EvalError(f"--answer-tokens must be at least 1, got {self.answer_tokens}")
        if self.background == "needles":
            raise EvalError("--haystack must be noise, prose, essays, or a text file or folder, got 'needles'")


def split_of(story: Story) -> str:
    """The side that a story belongs to, by its content alone."""
    digest = sha256("\n".join((story.task, *story.facts, story.question)).encode()).digest()
    return "test" if int.from_bytes(digest[:8], "big") % HELD_OUT == 0 else "train"


def draw(settings: Babilong, random: Random) -> Story:
    """A story of the split."""
    while True:
        story = make_story(settings.task, random)
        if split_of(story) == settings.split:
            return story


@cache
def _nameless_prose(name: str) -> Prose:
    """Sentences that speak of nobody in the stories: what they say could be taken for a fact."""
    found = [sentence for sentence in read_prose(name).sentences if not NAMES.search(sentence)]
    if not found:
        raise EvalError(f"--haystack {name!r} must have sentences without the names of the stories' people, got none")
    return Prose(found)


def _hay(name: str, random: Random) -> Haystack:
    if name == "noise":
        return Haystack(lambda units: noise().take(units), " ")
    return _nameless_prose(name).from_random_place(random)


def mixed(facts: tuple[str, ...], depths: list[float], pieces: list[str]) -> str:
    """Facts before pieces of background, at depths from 0 to 1 that rise. None follows the last, which may be cut."""
    text: list[str] = []
    done = 0
    for fact, depth in zip(facts, depths, strict=True):
        place = int(depth * len(pieces))
        text.extend((*pieces[done:place], fact))
        done = place
    return " ".join((*text, *pieces[done:]))


def _drawn(settings: Babilong, tokenizer: Any, index: int) -> tuple[Story, Random]:
    """The story of a sample, which fits its length, and the generator for what else is random."""
    random = Random(f"babilong/{settings.split}/{settings.task}/{settings.length}/{settings.seed}/{index}")
    needed = []
    for _ in range(DRAWS):
        story = draw(settings, random)
        needed.append(count(tokenizer, rendered(story.task, " ".join(story.facts), story.question)))
        if not settings.length or needed[-1] + settings.answer_tokens <= settings.length:
            return story, random
    raise EvalError(_complaint(settings, min(needed)))


def make_sample(settings: Babilong, tokenizer: Any, index: int) -> dict[str, Any]:
    """Sample `index`, as a document of the harness.

    prompt: instruction, examples, text and question. target: a label. answer: as the prompt wants it, for training.
    facts, supporting: the story's sentences and the indices of those that matter. tokens: of the prompt.
    """
    story, random = _drawn(settings, tokenizer, index)
    depths = sorted(random.random() for _ in story.facts)
    hay = _hay(settings.background, random) if settings.length else None

    def written(units: int) -> str:
        pieces = hay.take(units) if hay else []
        return rendered(story.task, mixed(story.facts, depths, pieces), story.question)

    units = 0
    if settings.length:
        room, slack = settings.length - settings.answer_tokens, max(8, settings.length // SLACK)
        units = largest(lambda n: count(tokenizer, written(n)), room, slack, lambda base: _complaint(settings, base))
    prompt = written(units)
    return {
        "index": index,
        "task": story.task,
        "prompt": prompt,
        "question": story.question,
        "target": story.answer,
        "answer": story.sentence,
        "facts": list(story.facts),
        "supporting": list(story.supporting),
        "tokens": count(tokenizer, prompt),
    }


def _complaint(settings: Babilong, bare: int) -> str:
    needed = bare + settings.answer_tokens
    return (
        f"a story of {settings.task} with its prompt takes {bare} tokens and the answer {settings.answer_tokens}, more "
        f"than --lengths {settings.length}: take a length of {needed} or more, or 0 for no background"
    )


def dataset(*, samples: int, settings: dict[str, Any], tokenizer: str = "", hub: str = "", **_: Any) -> dict[str, Any]:
    """What the harness's `custom_dataset` asks for. The arguments are the task's metadata."""
    from datasets import Dataset

    wanted = Babilong(**settings)
    if hub:
        return {"test": Dataset.from_list(_from_hub(hub, wanted, samples))}
    loaded = load_tokenizer(tokenizer)
    return {"test": Dataset.from_list([make_sample(wanted, loaded, index) for index in range(samples)])}


def _from_hub(name: str, settings: Babilong, samples: int) -> list[dict[str, Any]]:
    """Samples of a data set of the hub in BABILong's format: a config for each length, a split for each task."""
    from .hub_rows import hub_split

    rows = hub_split(
        name, f"{settings.length // 1024}k", settings.task, "Leave out --babilong-hub for stories of our own"
    )
    found = []
    for index, row in zip(range(samples), rows, strict=False):
        prompt = rendered(settings.task, row["input"], row["question"])
        told = {"question": row["question"], "target": row["target"], "answer": row["target"]}
        found.append({"index": index, "task": settings.task, "prompt": prompt, "supporting": [], **told})
    return found


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Both scores: the original's and the harness's."""
    output = results[0]
    return {
        "strict": strict(doc["task"], doc["question"], doc["target"], output),
        "lax": lax(doc["target"], output),
    }


def check_fits(settings: Babilong, options: Options) -> None:
    """Refuse a cell whose stories have no room, before any sample is made."""
    if not options.babilong_hub:
        for index in range(min(options.samples, 4)):
            _drawn(settings, load_tokenizer(options.tokenizer), index)


def runs(options: Options) -> list[Run]:
    """A cell for every task and length."""
    if options.scoring not in SCORINGS:
        raise EvalError(f"--scoring must be one of {', '.join(SCORINGS)}, got {options.scoring!r}")
    made = []
    room = options.answer_tokens or ANSWER_TOKENS
    for task in options.qa:
        for length in options.lengths or LENGTHS:
            settings: dict[str, Any] = {
                "task": task,
                "length": length,
                "background": options.haystack,
                "answer_tokens": room,
                "seed": options.seed,
            }
            check_fits(Babilong(**settings), options)
            metadata = {"settings": settings, "samples": options.samples, "tokenizer": options.tokenizer}
            made.append(
                Run(
                    labels={"task": task, "length": length},
                    metric=options.scoring,
                    task="lucid_babilong",
                    metadata=metadata | ({"hub": options.babilong_hub} if options.babilong_hub else {}),
                    answer_tokens=room,
                    length=0 if options.babilong_hub else length,
                    keep=("question", "target", "supporting"),
                )
            )
    return made
