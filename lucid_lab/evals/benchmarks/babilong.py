"""BABILong QA1 to QA5 (Kuratov et al. 2024): the facts of a bAbI story, in order, among the sentences of a long text.

A prompt is an instruction, two examples, the text and the question, in the words of the harness's tasks. The answer
follows a space. A sample depends on (split, task, length, seed, index) alone. Training and evaluation never share a
story: their generators have different seeds, and a hash of a story's content decides which of the two may use it.
"""

import re
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from random import Random
from typing import Any, NamedTuple

from ..cells import Cell, EvalError, Options
from ..tokens import count_tokens, load_tokenizer
from .babi import GIVERS, OBJECTS, PEOPLE, ROOMS, TASKS, Story, make_story
from .dataset_rows import published_rows, published_sha256
from .haystacks import Haystack, Prose, most_units, noise, prose_sha256, read_prose, warn_of_repeats

SPLITS = ("train", "test")
# One story in HELD_OUT is for evaluation.
HELD_OUT = 5
# Draw at most this many stories in search of one that fits the length of its sample.
DRAWS = 200
ANSWER_TOKENS = 32
LENGTHS = (0, 2048, 4096)
# At most max(8, length / SLACK) tokens stay unused, or fewer than one unit of hay has.
SLACK = 1024
SCORINGS = ("strict", "lax")
NAMES = re.compile(rf"\b({'|'.join(sorted({*PEOPLE, *GIVERS}))})\b")

LABELS = dict.fromkeys(("qa1", "qa2", "qa3", "qa4"), ROOMS) | {"qa5": (*GIVERS, *OBJECTS)}


class Prompt(NamedTuple):
    """The words of the harness's task. examples: (text, question, answer)."""

    instruction: str
    examples: tuple[tuple[str, str, str], ...]


_ONLY_FACTS = "You need to answer the question based only on the information from the facts."
_CARRIED = (
    "If a person got an item in the first location and travelled to the second location the item is also in the "
    "second location. If a person dropped an item in the first location and moved to the second location the item "
    "remains in the first location."
)
_FORM = "Always return your answer in the following format:"
_NOTHING_ELSE = "Do not write anything else after that."

PROMPTS = {
    "qa1": Prompt(
        "I will give you context with the facts about positions of different persons hidden in some random text and a "
        f"question. {_ONLY_FACTS} If a person was in different locations, use the latest location to answer the "
        f"question.\n{_FORM}\nThe most recent location of 'person' is 'location'. {_NOTHING_ELSE}",
        (
            (
                "Charlie went to the hallway. Judith come back to the kitchen. Charlie travelled to balcony.",
                "Where is Charlie?",
                "The most recent location of Charlie is balcony.",
            ),
            (
                "Alan moved to the garage. Charlie went to the beach. Alan went to the shop. Rouse travelled to "
                "balcony.",
                "Where is Alan?",
                "The most recent location of Alan is shop.",
            ),
        ),
    ),
    "qa2": Prompt(
        "I will give you context with the facts about locations and actions of different persons hidden in some random "
        f"text and a question. {_ONLY_FACTS} {_CARRIED}\n{_FORM}\nThe 'item' is in 'location'. {_NOTHING_ELSE}",
        (
            (
                "Charlie went to the kitchen. Charlie got a bottle. Charlie moved to the balcony.",
                "Where is the bottle?",
                "The bottle is in the balcony.",
            ),
            (
                "Alan moved to the garage. Alan got a screw driver. Alan moved to the kitchen.",
                "Where is the screw driver?",
                "The screw driver is in the kitchen.",
            ),
        ),
    ),
    "qa3": Prompt(
        "I give you context with the facts about locations and actions of different persons hidden in some random text "
        f"and a question. {_ONLY_FACTS} {_CARRIED}\n{_FORM}\nBefore the $location_1$ the $item$ was in the "
        f"$location_2$. {_NOTHING_ELSE}",
        (
            (
                "John journeyed to the bedroom. Mary grabbed the apple. Mary went back to the bathroom. Daniel "
                "journeyed to the bedroom. Daniel moved to the garden. Mary travelled to the kitchen.",
                "Where was the apple before the kitchen?",
                "Before the kitchen the apple was in the bathroom.",
            ),
            (
                "John went back to the bedroom. John went back to the garden. John went back to the kitchen. Sandra "
                "took the football. Sandra travelled to the garden. Sandra journeyed to the bedroom.",
                "Where was the football before the bedroom?",
                "Before the bedroom the football was in the garden.",
            ),
        ),
    ),
    "qa4": Prompt(
        "I will give you context with the facts about different people, their location and actions, hidden in some "
        f"random text and a question. {_ONLY_FACTS}\nYour answer should contain only one word - location. "
        f"{_NOTHING_ELSE}",
        (
            (
                "The hallway is south of the kitchen. The bedroom is north of the kitchen.",
                "What is the kitchen south of?",
                "bedroom",
            ),
            (
                "The garden is west of the bedroom. The bedroom is west of the kitchen.",
                "What is west of the bedroom?",
                "garden",
            ),
        ),
    ),
    "qa5": Prompt(
        "I will give you context with the facts about locations and their relations hidden in some random text and a "
        f"question. {_ONLY_FACTS}\nYour answer should contain only one word. {_NOTHING_ELSE} Do not explain your "
        "answer.",
        (
            (
                "Mary picked up the apple there. Mary gave the apple to Fred. Mary moved to the bedroom. Bill took the "
                "milk there.",
                "Who did Mary give the apple to?",
                "Fred",
            ),
            (
                "Jeff took the football there. Jeff passed the football to Fred. Jeff got the milk there. Bill "
                "travelled to the bedroom.",
                "Who gave the football?",
                "Jeff",
            ),
        ),
    ),
}


def render_prompt(task: str, text: str, question: str) -> str:
    """The prompt for a text and a question."""
    prompt = PROMPTS[task]
    examples = "".join(
        f"{example}\n{example_question} {answer}\n\n" for example, example_question, answer in prompt.examples
    )
    return f"{prompt.instruction}\n\n{examples}{text.strip()}\n{question.strip()}"


@dataclass(frozen=True)
class Babilong:
    """The settings that all samples of a cell share.

    task: "qa1" to "qa5".
    length: tokens of prompt and answer; 0 for the facts alone, as in BABILong's "0k".
    split: "train" or "test".
    background: "noise", or a name that `read_prose` knows.
    answer_tokens: room for the answer.
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
            raise EvalError("--haystack must be noise, prose, essays, pg19, or a text file or folder, got 'needles'")


def split_of(story: Story) -> str:
    """The split of a story, which depends on its content alone."""
    digest = sha256("\n".join((story.task, *story.facts, story.question)).encode()).digest()
    return "test" if int.from_bytes(digest[:8], "big") % HELD_OUT == 0 else "train"


def draw(settings: Babilong, random: Random) -> Story:
    """A random story of the task and the split."""
    while True:
        story = make_story(settings.task, random)
        if split_of(story) == settings.split:
            return story


@cache
def _nameless_prose(name: str) -> Prose:
    """Prose without the names of the stories' people: a sentence about one of them could be taken for a fact."""
    sentences = [sentence for sentence in read_prose(name).sentences if not NAMES.search(sentence)]
    if not sentences:
        raise EvalError(f"--haystack {name!r} must have sentences without the names of the stories' people, got none")
    return Prose(sentences)


def _hay(name: str, random: Random) -> Haystack:
    if name == "noise":
        return Haystack(lambda units: noise().take(units), " ")
    return _nameless_prose(name).from_random_place(random)


def mix(facts: tuple[str, ...], depths: list[float], pieces: list[str]) -> str:
    """The pieces of background with every fact before the piece at its depth. depths: ascending, 0 to 1.

    No fact follows the last piece, which may be cut.
    """
    text: list[str] = []
    done = 0
    for fact, depth in zip(facts, depths, strict=True):
        place = int(depth * len(pieces))
        text.extend((*pieces[done:place], fact))
        done = place
    return " ".join((*text, *pieces[done:]))


def _draw_fitting(settings: Babilong, tokenizer: Any, index: int) -> tuple[Story, Random]:
    """The story of a sample, which fits its length, and the generator for the rest of the sample."""
    random = Random(f"babilong/{settings.split}/{settings.task}/{settings.length}/{settings.seed}/{index}")
    tokens = []
    for _ in range(DRAWS):
        story = draw(settings, random)
        tokens.append(count_tokens(tokenizer, render_prompt(story.task, " ".join(story.facts), story.question)))
        if not settings.length or tokens[-1] + settings.answer_tokens <= settings.length:
            return story, random
    raise EvalError(_complaint(settings, min(tokens)))


def make_sample(settings: Babilong, tokenizer: Any, index: int) -> dict[str, Any]:
    """Sample `index`, as a document of the harness.

    target: the label. answer: the label in the form that the prompt asks for, for training.
    facts: the story's sentences. supporting: indices of the facts that the answer follows from.
    tokens: of the prompt. haystack_repeats: how often the background starts again.
    """
    story, random = _draw_fitting(settings, tokenizer, index)
    depths = sorted(random.random() for _ in story.facts)
    hay = _hay(settings.background, random) if settings.length else None

    def write(units: int) -> str:
        pieces = hay.take(units) if hay else []
        return render_prompt(story.task, mix(story.facts, depths, pieces), story.question)

    units = 0
    if settings.length:
        room, slack = settings.length - settings.answer_tokens, max(8, settings.length // SLACK)
        units = most_units(
            lambda units: count_tokens(tokenizer, write(units)), room, slack, lambda base: _complaint(settings, base)
        )
    prompt = write(units)
    return {
        "index": index,
        "task": story.task,
        "prompt": prompt,
        "question": story.question,
        "target": story.answer,
        "answer": story.sentence,
        "facts": list(story.facts),
        "supporting": list(story.supporting),
        "tokens": count_tokens(tokenizer, prompt),
        "haystack_repeats": hay.repeats(units) if hay else 0,
    }


def _complaint(settings: Babilong, bare: int) -> str:
    needed = bare + settings.answer_tokens
    return (
        f"a story of {settings.task} with its prompt takes {bare} tokens and the answer {settings.answer_tokens}, more "
        f"than --lengths {settings.length}: take a length of {needed} or more, or 0 for no background"
    )


def dataset(*, samples: int, settings: dict[str, Any], tokenizer: str = "", hub: str = "", **_: Any) -> dict[str, Any]:
    """The harness's `custom_dataset`. The arguments are the cell's metadata."""
    from datasets import Dataset

    babilong = Babilong(**settings)
    if hub:
        return {"test": Dataset.from_list(published_samples(hub, babilong.task, babilong.length, samples))}
    loaded = load_tokenizer(tokenizer)
    made = [make_sample(babilong, loaded, index) for index in range(samples)]
    warn_of_repeats(babilong.background, babilong.length, (sample["haystack_repeats"] for sample in made))
    return {"test": Dataset.from_list(made)}


def published_samples(name: str, task: str, length: int, samples: int) -> list[dict[str, Any]]:
    """The first samples of a published set, whose background is PG19. name: on the hub, or a folder that holds it."""
    return [
        {
            "index": index,
            "task": task,
            "prompt": render_prompt(task, row["input"], row["question"]),
            "supporting": [],
            "haystack_repeats": 0,
            "question": row["question"],
            "target": row["target"],
            "answer": row["target"],
        }
        for index, row in enumerate(published_rows(name, task, length, samples))
    ]


def score_strict(task: str, question: str, target: str, output: str) -> float:
    """The original's score: 1 if the first sentence holds the target and no other label. Labels in the question do not
    count."""
    answer, question_text = output.lower(), question.lower()
    # The answer ends with its first sentence, or where the model makes up another example.
    for end in (".", "<context>", "<example>"):
        answer = answer.split(end)[0]
    labels = {label.lower() for label in LABELS[task]}
    return float({label for label in labels if label in answer and label not in question_text} == {target.lower()})


def score_lax(target: str, output: str) -> float:
    """The harness's score: 1 if the target is anywhere in the output."""
    return float(target.strip().lower() in output.lower())


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Both scores: the original's and the harness's."""
    output = results[0]
    return {
        "strict": score_strict(doc["task"], doc["question"], doc["target"], output),
        "lax": score_lax(doc["target"], output),
    }


def check_fits(settings: Babilong, options: Options) -> None:
    """Refuse a cell whose stories do not fit its length, before any sample is made."""
    if not options.babilong_hub:
        for index in range(min(options.samples, 4)):
            _draw_fitting(settings, load_tokenizer(options.tokenizer), index)


def cells(options: Options) -> list[Cell]:
    """A cell for every task and length."""
    if options.scoring not in SCORINGS:
        raise EvalError(f"--scoring must be one of {', '.join(SCORINGS)}, got {options.scoring!r}")
    made_cells = []
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
            # Facts alone and texts of the hub have no haystack of ours.
            if options.babilong_hub:
                metadata["hub"] = options.babilong_hub
                metadata["hub_sha256"] = published_sha256(options.babilong_hub, task, length)
            elif length:
                metadata["haystack_sha256"] = prose_sha256(options.haystack)
            made_cells.append(
                Cell(
                    labels={"task": task, "length": length},
                    metric=options.scoring,
                    task="lucid_babilong",
                    metadata=metadata,
                    answer_tokens=room,
                    length=0 if options.babilong_hub else length,
                    keep=("question", "target", "supporting", "haystack_repeats"),
                )
            )
    return made_cells
