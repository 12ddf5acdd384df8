"""BABILong QA1 to QA5 (Kuratov et al. 2024): the facts of a bAbI story, in order, among the sentences of a long text.

A prompt is an instruction, two examples, the text and the question, in the words of the harness's tasks. The answer
follows a space. Training and evaluation never share a story: a hash of a story's content decides which of the two may
use it.
"""

import json
import re
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from .babi import GIVERS, OBJECTS, PEOPLE, ROOMS, TASKS, Story, make_story
from .haystacks import Haystack, Prose, check_fields, most_units, noise, read_prose, read_rows, warn_of_repeats
from .tokens import check_sizes, count_tokens, task_tokenizer, token_spans

# One story in HELD_OUT is for evaluation.
HELD_OUT = 5
# Draw at most this many stories in search of one that fits the length of its sample.
DRAWS = 200
ANSWER_TOKENS = 32
# At most max(8, length / SLACK) tokens stay unused, or fewer than one unit of hay has.
SLACK = 1024
NAMES = re.compile(rf"\b({'|'.join(sorted({*PEOPLE, *GIVERS}))})\b")
LABELS = dict.fromkeys(("qa1", "qa2", "qa3", "qa4"), ROOMS) | {"qa5": (*GIVERS, *OBJECTS)}


@cache
def _prompts() -> dict[str, Any]:
    """By task: the instruction, and examples of text, question and answer."""
    return dict(json.loads((Path(__file__).parent / "tasks" / "babilong_prompts.json").read_text()))


def render_prompt(task: str, text: str, question: str) -> str:
    """The prompt for a text and a question."""
    prompt = _prompts()[task]
    examples = "".join(f"{example}\n{asked} {answer}\n\n" for example, asked, answer in prompt["examples"])
    return f"{prompt['instruction']}\n\n{examples}{text.strip()}\n{question.strip()}"


@dataclass(frozen=True)
class StorySample:
    """A prompt with its answer.

    target: the label. answer: the label in the form that the prompt asks for, for training. facts: of the story.
    supporting: indices of the facts that the answer follows from. answer_spans: (first, last + 1) of their tokens.
    tokens: of the prompt. answer_tokens: room for the answer. haystack_repeats: how often the background starts again.
    """

    task: str
    prompt: str
    question: str
    target: str
    answer: str
    facts: tuple[str, ...]
    supporting: tuple[int, ...]
    answer_spans: tuple[tuple[int, int], ...]
    tokens: int
    answer_tokens: int
    haystack_repeats: int


def split_of(story: Story) -> str:
    """The split of a story, "train" or "test", which depends on its content alone."""
    digest = sha256("\n".join((story.task, *story.facts, story.question)).encode()).digest()
    return "test" if int.from_bytes(digest[:8], "big") % HELD_OUT == 0 else "train"


def draw(task: str, split: str, random: Random) -> Story:
    """A random story of the task and the split."""
    while True:
        story = make_story(task, random)
        if split_of(story) == split:
            return story


@cache
def _nameless_prose(name: str) -> Prose:
    """Prose without the names of the stories' people: a sentence about one of them could be taken for a fact."""
    sentences = [sentence for sentence in read_prose(name).sentences if not NAMES.search(sentence)]
    if not sentences:
        raise ValueError(f"--haystack {name!r} must have sentences without the names of the stories' people, got none")
    return Prose(sentences)


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


def make_story_sample(
    tokenizer: Any,
    task: str,
    length: int,
    *,
    split: str = "test",
    seed: int = 0,
    index: int = 0,
    haystack: str = "prose",
    answer_tokens: int = ANSWER_TOKENS,
) -> StorySample:
    """Sample `index` of a seed. It depends on the arguments alone.

    task: "qa1" to "qa5". length: tokens of the prompt with room for the answer, which the background fills; 0 for the
    facts alone, as in BABILong's "0k". split: "train" or "test", which share no story. haystack: "noise", or a name
    that `read_prose` knows.
    """
    if task not in TASKS:
        raise ValueError(f"stories must be some of {', '.join(TASKS)}, got {task!r}")
    if split not in ("train", "test"):
        raise ValueError(f"split must be train or test, got {split!r}")
    if length < 0 or answer_tokens < 1:
        raise ValueError(f"--lengths must not be negative and --answer-tokens be at least 1: {length}, {answer_tokens}")
    if haystack == "needles":
        raise ValueError("--haystack must be noise, prose, essays, pg19, or a text file or folder, got 'needles'")
    random, room = Random(f"babilong/{split}/{task}/{length}/{seed}/{index}"), length - answer_tokens

    def complaint(bare: int) -> str:
        return (
            f"a story of {task} with its prompt takes {bare} tokens and the answer {answer_tokens}, more than "
            f"--lengths {length}: take a length of {bare + answer_tokens} or more, or 0 for no background"
        )

    story, sizes = draw(task, split, random), []
    while length:
        sizes.append(count_tokens(tokenizer, render_prompt(task, " ".join(story.facts), story.question)))
        if sizes[-1] <= room:
            break
        if len(sizes) == DRAWS:
            raise ValueError(complaint(min(sizes)))
        story = draw(task, split, random)
    depths, hay = sorted(random.random() for _ in story.facts), Haystack(lambda units: [], " ")
    if length:
        hay = noise(" ") if haystack == "noise" else _nameless_prose(haystack).from_random_place(random)

    def write(units: int) -> str:
        return render_prompt(task, mix(story.facts, depths, hay.take(units)), story.question)

    units = 0
    if length:
        count = lambda units: count_tokens(tokenizer, write(units))  # noqa: E731
        units = most_units(count, room, max(8, length // SLACK), complaint)
    prompt = write(units)
    return StorySample(
        task=task,
        prompt=prompt,
        question=story.question,
        target=story.answer,
        answer=story.sentence,
        facts=story.facts,
        supporting=story.supporting,
        answer_spans=tuple(token_spans(tokenizer, prompt, _places(prompt, story))),
        tokens=count_tokens(tokenizer, prompt),
        answer_tokens=answer_tokens,
        haystack_repeats=hay.repeats(units),
    )


def _places(prompt: str, story: Story) -> list[tuple[int, int]]:
    """The characters of the supporting facts. A fact may occur twice: they are found backwards from the end."""
    places, end = [], prompt.rindex("\n")
    for fact in reversed(story.facts):
        start = prompt.rindex(fact, 0, end)
        places.append((start, start + len(fact)))
        end = start
    places.reverse()
    return [places[index] for index in story.supporting]


def published_samples(
    name: str, task: str, length: int, samples: int, tokenizer: Any = None, *, plain: bool = False
) -> list[dict[str, Any]]:
    """The first samples of a published set, whose background is PG19. plain: prompts of text and question alone.

    name: on the hub, with a config for each length and a split for each task, or a folder with data/TASK/LENGTH.json.
    """
    size = f"{length // 1024}k"
    advice = "Leave out --babilong-hub for stories of our own, or name a folder with data/TASK/LENGTH.json"
    what = f"--babilong-hub {name!r}, {task}, {size},"
    if Path(name).is_dir():
        file = Path(name) / "data" / task / f"{size}.json"
        rows = read_rows(what, "json", data_files=str(file), split="train", advice=advice)
    else:
        rows = read_rows(what, name, size, split=task, advice=advice)
    documents = []
    for row in islice(rows, samples):
        check_fields(row, what, ("input",), ("question",), ("target",))
        prompt = f"{row['input']} {row['question']}" if plain else render_prompt(task, row["input"], row["question"])
        documents.append(
            {
                "task": task,
                "prompt": prompt,
                "question": row["question"],
                "target": row["target"],
                "answer": row["target"].strip(),
                "tokens": count_tokens(tokenizer, prompt) if tokenizer else 0,
                "answer_tokens": ANSWER_TOKENS,
            }
        )
    return documents


def dataset(
    *,
    story: str = "qa1",
    length: int = 2048,
    samples: int = 100,
    seed: int = 0,
    haystack: str = "prose",
    answer_tokens: int = 0,
    babilong_hub: str = "",
    **metadata: Any,
) -> dict[str, Any]:
    """The documents of `lucid_babilong`. The arguments are the metadata of the task."""
    from datasets import Dataset

    check_sizes(samples, length, seed)
    tokenizer = task_tokenizer(metadata)
    if babilong_hub:
        return {"test": Dataset.from_list(published_samples(babilong_hub, story, length, samples, tokenizer))}
    how: dict[str, Any] = {"seed": seed, "haystack": haystack, "answer_tokens": answer_tokens or ANSWER_TOKENS}
    made = [asdict(make_story_sample(tokenizer, story, length, index=index, **how)) for index in range(samples)]
    warn_of_repeats(haystack, length, (sample["haystack_repeats"] for sample in made))
    return {"test": Dataset.from_list(made)}


def score_strict(task: str, question: str, target: str, output: str) -> float:
    """The original's score: 1 if the first sentence holds the target and no other label. Labels in the question do not
    count."""
    answer, question_text = output.lower(), question.lower()
    # The answer ends with its first sentence, or where the model makes up another example.
    for end in (".", "<context>", "<example>"):
        answer = answer.split(end)[0]
    labels = {label.lower() for label in LABELS[task]}
    return float({label for label in labels if label in answer and label not in question_text} == {target.lower()})


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Both scores: the original's, and the harness's: whether the target is anywhere in the output."""
    strict = score_strict(doc["task"], doc["question"], doc["target"], results[0])
    return {"strict": strict, "lax": float(doc["target"].strip().lower() in results[0].lower())}
