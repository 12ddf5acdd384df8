"""A story with one question, from a seeded generator. What a task asks, and which facts answer it, is said here."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .world import DROPS, GETS, GIVERS, GIVES, MOVES, OBJECTS, PEOPLE, ROOMS, Fact, World

OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}
# In bAbI a story is told in segments with a question after each; here one of them is asked, after 1 to 5 segments.
SEGMENTS = 5
# A story that has not come to its question after so many facts is given up: it has to fit into a prompt.
LONGEST = 70


@dataclass(frozen=True)
class Story:
    """facts: sentences in order. supporting: indices of those that the answer follows from.

    answer: a word. sentence: the answer in the form that the prompts of BABILong ask for.
    """

    task: str
    facts: tuple[str, ...]
    question: str
    answer: str
    supporting: tuple[int, ...]
    sentence: str


@dataclass(frozen=True)
class _Asked:
    question: str
    answer: str
    supporting: tuple[int, ...]
    sentence: str


def make_story(task: str, rng: random.Random) -> Story:
    """A story of a task, "qa1" to "qa5"; everything random comes from `rng`."""
    if task not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {task!r}")
    facts, asked = TASKS[task](rng)
    return Story(task, facts, asked.question, asked.answer, asked.supporting, asked.sentence)


Made = tuple[tuple[str, ...], _Asked]


def _begin(people: tuple[str, ...], rng: random.Random) -> World:
    room = {person: rng.choice(ROOMS) for person in people}
    return World(room, {thing: rng.choice(ROOMS) for thing in OBJECTS})


def _move(world: World, rng: random.Random) -> Fact:
    person = rng.choice(list(world.room))
    room = rng.choice([room for room in ROOMS if room != world.room[person]])
    return Fact(f"{person} {rng.choice(MOVES)} the {room}.", "move", person, other=room)


def _get(world: World, rng: random.Random) -> Fact | None:
    reach = [(p, t) for t in OBJECTS if t not in world.carrier for p in world.room if world.room[p] == world.place[t]]
    return _handled("get", GETS, reach, rng)


def _drop(world: World, rng: random.Random) -> Fact | None:
    return _handled("drop", DROPS, [(person, thing) for thing, person in world.carrier.items()], rng)


def _handled(kind: str, verbs: tuple[str, ...], pairs: list[tuple[str, str]], rng: random.Random) -> Fact | None:
    if not pairs:
        return None
    person, thing = rng.choice(pairs)
    there = rng.choice(("", " there"))
    return Fact(f"{person} {rng.choice(verbs)} the {thing}{there}.", kind, person, thing)


def _give(world: World, rng: random.Random) -> Fact | None:
    near = [
        (giver, thing, taker)
        for thing, giver in world.carrier.items()
        for taker in world.room
        if taker != giver and world.room[taker] == world.room[giver]
    ]
    if not near:
        return None
    giver, thing, taker = rng.choice(near)
    return Fact(f"{giver} {rng.choice(GIVES)} the {thing} to {taker}.", "give", giver, thing, taker)


Act = Callable[[World, random.Random], Fact | None]


def _told(world: World, acts: tuple[Act, ...], rng: random.Random) -> Iterator[World]:
    """The world after one fact, after two, ...: acts that cannot happen are drawn again."""
    while len(world.facts) < LONGEST:
        fact = rng.choice(acts)(world, rng)
        if fact is not None:
            world = world.after(fact)
            yield world


def _until_asked(
    people: tuple[str, ...],
    acts: tuple[Act, ...],
    ask: Callable[[World, random.Random], _Asked | None],
    segment: int,
    rng: random.Random,
) -> Made:
    """Tell a story in segments of `segment` facts or more, and ask after one of them."""
    while True:
        left, told = rng.randint(1, SEGMENTS), 0
        for world in _told(_begin(people, rng), acts, rng):
            told += 1
            if told < segment or rng.random() < 0.5:
                continue
            asked = ask(world, rng)
            if asked is None:
                continue
            left, told = left - 1, 0
            if not left:
                return tuple(fact.text for fact in world.facts), asked


def _qa1(rng: random.Random) -> Made:
    """One supporting fact: where a person is."""
    world = _begin(PEOPLE, rng)
    for _ in range(2 * rng.randint(1, SEGMENTS)):
        world = world.after(_move(world, rng))
    person = rng.choice(sorted(world.entered))
    room = world.room[person]
    asked = _Asked(
        f"Where is {person}?", room, (world.entered[person],), f"The most recent location of {person} is {room}."
    )
    return tuple(fact.text for fact in world.facts), asked


def _qa2(rng: random.Random) -> Made:
    """Two supporting facts: where an object is that somebody carries or has put down."""

    def ask(world: World, rng: random.Random) -> _Asked | None:
        if not world.stays:
            return None
        thing = rng.choice(sorted(world.stays))
        stay = world.stays[thing][-1]
        supporting = tuple(sorted((stay.arrival, stay.held)))
        return _Asked(f"Where is the {thing}?", stay.room, supporting, f"The {thing} is in the {stay.room}.")

    return _until_asked(PEOPLE, (_move, _get, _drop), ask, 3, rng)


def _qa3(rng: random.Random) -> Made:
    """Three supporting facts: where an object was before it came to where it is."""

    def ask(world: World, rng: random.Random) -> _Asked | None:
        known = sorted(thing for thing, stays in world.stays.items() if len(stays) > 1)
        if not known:
            return None
        thing = rng.choice(known)
        before, last = world.stays[thing][-2:]
        supporting = tuple(sorted({before.arrival, last.arrival, last.held}))
        question = f"Where was the {thing} before the {last.room}?"
        sentence = f"Before the {last.room} the {thing} was in the {before.room}."
        return _Asked(question, before.room, supporting, sentence)

    return _until_asked(PEOPLE, (_move, _get, _drop), ask, 8, rng)


def _qa4(rng: random.Random) -> Made:
    """Two-argument relations: three rooms in a row, and a question about the middle one."""
    first, middle, last = rng.sample(ROOMS, 3)
    direction = rng.choice(sorted(OPPOSITE))
    pairs = [(first, middle), (middle, last)]
    rng.shuffle(pairs)
    facts = []
    for one, other in pairs:
        # The same relation can be told from either side.
        a, b, way = rng.choice(((one, other, direction), (other, one, OPPOSITE[direction])))
        facts.append(f"The {a} is {way} of the {b}.")
    answer, towards = rng.choice(((first, direction), (last, OPPOSITE[direction])))
    pair = (first, middle) if answer == first else (middle, last)
    question = rng.choice((f"What is {towards} of the {middle}?", f"What is the {middle} {OPPOSITE[towards]} of?"))
    return tuple(facts), _Asked(question, answer, (pairs.index(pair),), answer)


def _qa5(rng: random.Random) -> Made:
    """Three-argument relations: who gave what to whom; of several gifts that fit, the last is meant."""

    def ask(world: World, rng: random.Random) -> _Asked | None:
        gifts = [(i, fact) for i, fact in enumerate(world.facts) if fact.kind == "give"]
        if not gifts:
            return None
        at, gift = rng.choice(gifts)
        forms = {
            f"What did {gift.person} give to {gift.other}?": ("thing", ("person", "other")),
            f"Who did {gift.person} give the {gift.thing} to?": ("other", ("person", "thing")),
            f"Who gave the {gift.thing} to {gift.other}?": ("person", ("thing", "other")),
            f"Who gave the {gift.thing}?": ("person", ("thing",)),
            f"Who received the {gift.thing}?": ("other", ("thing",)),
        }
        question = rng.choice(list(forms))
        wanted, given = forms[question]
        later = [i for i, fact in gifts if all(getattr(fact, name) == getattr(gift, name) for name in given)]
        answer = getattr(gift, wanted)
        return _Asked(question, answer, (at,), answer) if at == later[-1] else None

    return _until_asked(GIVERS, (_move, _get, _drop, _give, _give), ask, 3, rng)


TASKS: dict[str, Callable[[random.Random], Made]] = {"qa1": _qa1, "qa2": _qa2, "qa3": _qa3, "qa4": _qa4, "qa5": _qa5}
