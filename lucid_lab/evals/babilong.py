"""BABILong QA1 to QA5 (Kuratov et al. 2024): the facts of a bAbI story, in order, among the sentences of a long text.

First the stories of bAbI (Weston et al. 2015, data of release 1.2), simulated from scratch, with one question each.
`World` keeps what is true and what a reader of the story can know. Then samples: a prompt is an instruction, two
examples, the text and the question, in the words of the harness's tasks; the answer follows a space. Training and
evaluation never share a story: a hash of a story's content decides which of the two may use it.
"""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from hashlib import sha256
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from .haystacks import Haystack, Prose, check_fields, most_units, noise, read_prose, read_rows, warn_of_repeats
from .tokens import check_sizes, count_tokens, task_tokenizer, token_spans

ROOMS = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
OBJECTS = ("apple", "football", "milk")
PEOPLE = ("Daniel", "John", "Mary", "Sandra")
GIVERS = ("Bill", "Fred", "Jeff", "Mary")

MOVES = ("moved to", "went to", "went back to", "journeyed to", "travelled to")
GETS = ("got", "took", "grabbed", "picked up")
DROPS = ("dropped", "discarded", "left", "put down")
GIVES = ("gave", "passed", "handed")

OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}
# bAbI asks a question after every segment of a story. Here a story ends with the question after segment 1 to 5.
SEGMENTS = 5
# Drop a story that has no question after this many facts: a story must fit into a prompt.
LONGEST = 70
# One story in HELD_OUT is for evaluation.
HELD_OUT = 5
# Draw at most this many stories in search of one that fits the length of its sample.
DRAWS = 200
ANSWER_TOKENS = 32
# At most max(8, length / SLACK) tokens stay unused, or fewer than one unit of hay has.
SLACK = 1024
NAMES = re.compile(rf"\b({'|'.join(sorted({*PEOPLE, *GIVERS}))})\b")
LABELS = dict.fromkeys(("qa1", "qa2", "qa3", "qa4"), ROOMS) | {"qa5": (*GIVERS, *OBJECTS)}


@dataclass(frozen=True)
class Fact:
    """One sentence of a story.

    kind: "move", "get", "drop" or "give". other: the room of a move, the taker of a gift.
    """

    text: str
    kind: str
    person: str
    thing: str = ""
    other: str = ""


@dataclass(frozen=True)
class Stay:
    """An object in a room.

    arrival: the fact that brought a carrier of the object there. held: the last fact that names the object.
    """

    room: str
    arrival: int
    held: int


@dataclass
class World:
    """The state after some facts.

    room: of every person. place: the room of every object. No fact tells a reader where people and objects start.
    carrier: of every object that is carried. touched: the last fact that names an object.
    entered: the fact that tells the room of a person, for people whose room a reader knows.
    stays: for every object, the rooms in which a reader knows it was, in order.
    facts: the story so far.
    """

    room: dict[str, str]
    place: dict[str, str]
    carrier: dict[str, str] = field(default_factory=dict)
    touched: dict[str, int] = field(default_factory=dict)
    entered: dict[str, int] = field(default_factory=dict)
    stays: dict[str, list[Stay]] = field(default_factory=dict)
    facts: list[Fact] = field(default_factory=list)

    def add(self, fact: Fact) -> None:
        """Let a fact happen."""
        now, person, thing = len(self.facts), fact.person, fact.thing
        self.facts.append(fact)
        if fact.kind == "move":
            self.room[person], self.entered[person] = fact.other, now
            for carried in [thing for thing, carrier in self.carrier.items() if carrier == person]:
                self.place[carried] = fact.other
                self.stays.setdefault(carried, []).append(Stay(fact.other, now, self.touched[carried]))
            return
        self.touched[thing] = now
        if fact.kind == "drop":
            del self.carrier[thing]
        else:
            self.carrier[thing] = fact.other if fact.kind == "give" else person
        # A person who takes or drops an object shows its room, if a reader knows the room of the person.
        if fact.kind != "give" and person in self.entered:
            stays = self.stays.setdefault(thing, [])
            # In the same room, the stay of the last person who touched the object replaces the one before.
            if stays and stays[-1].room == self.room[person]:
                stays.pop()
            stays.append(Stay(self.room[person], self.entered[person], now))


@dataclass(frozen=True)
class Story:
    """A question, and the facts before it.

    answer: one word. supporting: indices of the facts that it follows from. sentence: the answer in the form that the
    prompts of BABILong ask for. facts: sentences in order.
    """

    question: str
    answer: str
    supporting: tuple[int, ...]
    sentence: str
    facts: tuple[str, ...] = ()
    task: str = ""


def make_story(task: str, rng: Random) -> Story:
    """A story of a task, "qa1" to "qa5"; everything random comes from `rng`."""
    return replace(TASKS[task](rng), task=task)


def _begin(people: tuple[str, ...], rng: Random) -> World:
    room = {person: rng.choice(ROOMS) for person in people}
    return World(room, {thing: rng.choice(ROOMS) for thing in OBJECTS})


def _move(world: World, rng: Random) -> Fact:
    person = rng.choice(list(world.room))
    room = rng.choice([room for room in ROOMS if room != world.room[person]])
    return Fact(f"{person} {rng.choice(MOVES)} the {room}.", "move", person, other=room)


def _get(world: World, rng: Random) -> Fact | None:
    reach = [(p, t) for t in OBJECTS if t not in world.carrier for p in world.room if world.room[p] == world.place[t]]
    return _handle("get", GETS, reach, rng)


def _drop(world: World, rng: Random) -> Fact | None:
    return _handle("drop", DROPS, [(person, thing) for thing, person in world.carrier.items()], rng)


def _handle(kind: str, verbs: tuple[str, ...], pairs: list[tuple[str, str]], rng: Random) -> Fact | None:
    """A person takes or drops an object. pairs: (person, object) for which it is possible."""
    if not pairs:
        return None
    (person, thing), there = rng.choice(pairs), rng.choice(("", " there"))
    return Fact(f"{person} {rng.choice(verbs)} the {thing}{there}.", kind, person, thing)


def _give(world: World, rng: Random) -> Fact | None:
    possible = [
        (giver, thing, taker)
        for thing, giver in world.carrier.items()
        for taker in world.room
        if taker != giver and world.room[taker] == world.room[giver]
    ]
    if not possible:
        return None
    giver, thing, taker = rng.choice(possible)
    return Fact(f"{giver} {rng.choice(GIVES)} the {thing} to {taker}.", "give", giver, thing, taker)


Act = Callable[[World, Random], Fact | None]


def _until_asked(
    people: tuple[str, ...],
    acts: tuple[Act, ...],
    ask: Callable[[World, Random], Story | None],
    segment: int,
    rng: Random,
) -> Story:
    """A story of 1 to `SEGMENTS` segments, and the question after the last. segment: fewest facts of a segment.

    ask: gives a question about a world, or None. While it gives None, the segment gets longer.
    """
    while True:
        segments_left, segment_facts, world = rng.randint(1, SEGMENTS), 0, _begin(people, rng)
        while len(world.facts) < LONGEST:
            fact = rng.choice(acts)(world, rng)
            if fact is None:  # An act that is not possible is drawn again.
                continue
            world.add(fact)
            segment_facts += 1
            if segment_facts < segment or rng.random() < 0.5:
                continue
            question = ask(world, rng)
            if question is None:
                continue
            segments_left, segment_facts = segments_left - 1, 0
            if not segments_left:
                return replace(question, facts=tuple(fact.text for fact in world.facts))


def _qa1(rng: Random) -> Story:
    """One supporting fact: where a person is."""
    world = _begin(PEOPLE, rng)
    for _ in range(2 * rng.randint(1, SEGMENTS)):
        world.add(_move(world, rng))
    person = rng.choice(sorted(world.entered))
    room = world.room[person]
    sentence, facts = f"The most recent location of {person} is {room}.", tuple(fact.text for fact in world.facts)
    return Story(f"Where is {person}?", room, (world.entered[person],), sentence, facts)


def _qa2(rng: Random) -> Story:
    """Two supporting facts: where an object is that a person carries or has dropped."""

    def ask(world: World, rng: Random) -> Story | None:
        if not world.stays:
            return None
        thing = rng.choice(sorted(world.stays))
        stay = world.stays[thing][-1]
        supporting = tuple(sorted((stay.arrival, stay.held)))
        return Story(f"Where is the {thing}?", stay.room, supporting, f"The {thing} is in the {stay.room}.")

    return _until_asked(PEOPLE, (_move, _get, _drop), ask, 3, rng)


def _qa3(rng: Random) -> Story:
    """Three supporting facts: where an object was before the room in which it is."""

    def ask(world: World, rng: Random) -> Story | None:
        moved = sorted(thing for thing, stays in world.stays.items() if len(stays) > 1)
        if not moved:
            return None
        thing = rng.choice(moved)
        before, last = world.stays[thing][-2:]
        supporting = tuple(sorted({before.arrival, last.arrival, last.held}))
        question = f"Where was the {thing} before the {last.room}?"
        sentence = f"Before the {last.room} the {thing} was in the {before.room}."
        return Story(question, before.room, supporting, sentence)

    return _until_asked(PEOPLE, (_move, _get, _drop), ask, 8, rng)


def _qa4(rng: Random) -> Story:
    """Two-argument relations: three rooms in a row, and a question about the middle one."""
    first, middle, last = rng.sample(ROOMS, 3)
    direction = rng.choice(sorted(OPPOSITE))
    pairs = [(first, middle), (middle, last)]
    rng.shuffle(pairs)
    facts = []
    for one, other in pairs:
        # "A is north of B" and "B is south of A" say the same.
        a, b, way = rng.choice(((one, other, direction), (other, one, OPPOSITE[direction])))
        facts.append(f"The {a} is {way} of the {b}.")
    answer, towards = rng.choice(((first, direction), (last, OPPOSITE[direction])))
    pair = (first, middle) if answer == first else (middle, last)
    question = rng.choice((f"What is {towards} of the {middle}?", f"What is the {middle} {OPPOSITE[towards]} of?"))
    return Story(question, answer, (pairs.index(pair),), answer, tuple(facts))


def _qa5(rng: Random) -> Story:
    """Three-argument relations: who gave what to whom. If several gifts fit a question, the last one is its answer."""

    def ask(world: World, rng: Random) -> Story | None:
        gifts = [(i, fact) for i, fact in enumerate(world.facts) if fact.kind == "give"]
        if not gifts:
            return None
        index, gift = rng.choice(gifts)
        # Question: the field of the gift that it asks for, and the fields that it names.
        forms = {
            f"What did {gift.person} give to {gift.other}?": ("thing", ("person", "other")),
            f"Who did {gift.person} give the {gift.thing} to?": ("other", ("person", "thing")),
            f"Who gave the {gift.thing} to {gift.other}?": ("person", ("thing", "other")),
            f"Who gave the {gift.thing}?": ("person", ("thing",)),
            f"Who received the {gift.thing}?": ("other", ("thing",)),
        }
        question = rng.choice(list(forms))
        asked_field, named_fields = forms[question]
        fitting = [i for i, fact in gifts if all(getattr(fact, name) == getattr(gift, name) for name in named_fields)]
        answer = getattr(gift, asked_field)
        return Story(question, answer, (index,), answer) if index == fitting[-1] else None

    return _until_asked(GIVERS, (_move, _get, _drop, _give, _give), ask, 3, rng)


TASKS: dict[str, Callable[[Random], Story]] = {"qa1": _qa1, "qa2": _qa2, "qa3": _qa3, "qa4": _qa4, "qa5": _qa5}


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
