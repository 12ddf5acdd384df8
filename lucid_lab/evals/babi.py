"""Stories of bAbI's tasks QA1 to QA5 (Weston et al. 2015, data of release 1.2), simulated from scratch.

A story has one question. `World` keeps what is true and what a reader of the story can know.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

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


class Question(NamedTuple):
    """supporting: indices of the facts that the answer follows from. answer: one word.

    sentence: the answer in the form that the prompts of BABILong ask for.
    """

    question: str
    answer: str
    supporting: tuple[int, ...]
    sentence: str


@dataclass(frozen=True)
class Story:
    """facts: sentences in order. The other fields are those of `Question`."""

    task: str
    facts: tuple[str, ...]
    question: str
    answer: str
    supporting: tuple[int, ...]
    sentence: str


def make_story(task: str, rng: random.Random) -> Story:
    """A story of a task, "qa1" to "qa5"; everything random comes from `rng`."""
    if task not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {task!r}")
    facts, question = TASKS[task](rng)
    return Story(task, facts, *question)


FactsAndQuestion = tuple[tuple[str, ...], Question]


def _begin(people: tuple[str, ...], rng: random.Random) -> World:
    room = {person: rng.choice(ROOMS) for person in people}
    return World(room, {thing: rng.choice(ROOMS) for thing in OBJECTS})


def _move(world: World, rng: random.Random) -> Fact:
    person = rng.choice(list(world.room))
    room = rng.choice([room for room in ROOMS if room != world.room[person]])
    return Fact(f"{person} {rng.choice(MOVES)} the {room}.", "move", person, other=room)


def _get(world: World, rng: random.Random) -> Fact | None:
    reach = [(p, t) for t in OBJECTS if t not in world.carrier for p in world.room if world.room[p] == world.place[t]]
    return _handle("get", GETS, reach, rng)


def _drop(world: World, rng: random.Random) -> Fact | None:
    return _handle("drop", DROPS, [(person, thing) for thing, person in world.carrier.items()], rng)


def _handle(kind: str, verbs: tuple[str, ...], pairs: list[tuple[str, str]], rng: random.Random) -> Fact | None:
    """A person takes or drops an object. pairs: (person, object) for which it is possible."""
    if not pairs:
        return None
    (person, thing), there = rng.choice(pairs), rng.choice(("", " there"))
    return Fact(f"{person} {rng.choice(verbs)} the {thing}{there}.", kind, person, thing)


def _give(world: World, rng: random.Random) -> Fact | None:
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


Act = Callable[[World, random.Random], Fact | None]


def _until_asked(
    people: tuple[str, ...],
    acts: tuple[Act, ...],
    ask: Callable[[World, random.Random], Question | None],
    segment: int,
    rng: random.Random,
) -> FactsAndQuestion:
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
                return tuple(fact.text for fact in world.facts), question


def _qa1(rng: random.Random) -> FactsAndQuestion:
    """One supporting fact: where a person is."""
    world = _begin(PEOPLE, rng)
    for _ in range(2 * rng.randint(1, SEGMENTS)):
        world.add(_move(world, rng))
    person = rng.choice(sorted(world.entered))
    room = world.room[person]
    question = Question(
        f"Where is {person}?", room, (world.entered[person],), f"The most recent location of {person} is {room}."
    )
    return tuple(fact.text for fact in world.facts), question


def _qa2(rng: random.Random) -> FactsAndQuestion:
    """Two supporting facts: where an object is that a person carries or has dropped."""

    def ask(world: World, rng: random.Random) -> Question | None:
        if not world.stays:
            return None
        thing = rng.choice(sorted(world.stays))
        stay = world.stays[thing][-1]
        supporting = tuple(sorted((stay.arrival, stay.held)))
        return Question(f"Where is the {thing}?", stay.room, supporting, f"The {thing} is in the {stay.room}.")

    return _until_asked(PEOPLE, (_move, _get, _drop), ask, 3, rng)


def _qa3(rng: random.Random) -> FactsAndQuestion:
    """Three supporting facts: where an object was before the room in which it is."""

    def ask(world: World, rng: random.Random) -> Question | None:
        moved = sorted(thing for thing, stays in world.stays.items() if len(stays) > 1)
        if not moved:
            return None
        thing = rng.choice(moved)
        before, last = world.stays[thing][-2:]
        supporting = tuple(sorted({before.arrival, last.arrival, last.held}))
        question = f"Where was the {thing} before the {last.room}?"
        sentence = f"Before the {last.room} the {thing} was in the {before.room}."
        return Question(question, before.room, supporting, sentence)

    return _until_asked(PEOPLE, (_move, _get, _drop), ask, 8, rng)


def _qa4(rng: random.Random) -> FactsAndQuestion:
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
    return tuple(facts), Question(question, answer, (pairs.index(pair),), answer)


def _qa5(rng: random.Random) -> FactsAndQuestion:
    """Three-argument relations: who gave what to whom. If several gifts fit a question, the last one is its answer."""

    def ask(world: World, rng: random.Random) -> Question | None:
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
        return Question(question, answer, (index,), answer) if index == fitting[-1] else None

    return _until_asked(GIVERS, (_move, _get, _drop, _give, _give), ask, 3, rng)


TASKS: dict[str, Callable[[random.Random], FactsAndQuestion]] = {
    "qa1": _qa1,
    "qa2": _qa2,
    "qa3": _qa3,
    "qa4": _qa4,
    "qa5": _qa5,
}
