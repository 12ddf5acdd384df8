"""People, rooms and objects: what is true, and what a reader can know. Every value is made once and never changed."""

from dataclasses import dataclass, field, replace

ROOMS = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
OBJECTS = ("apple", "football", "milk")
PEOPLE = ("Daniel", "John", "Mary", "Sandra")
GIVERS = ("Bill", "Fred", "Jeff", "Mary")

MOVES = ("moved to", "went to", "went back to", "journeyed to", "travelled to")
GETS = ("got", "took", "grabbed", "picked up")
DROPS = ("dropped", "discarded", "left", "put down")
GIVES = ("gave", "passed", "handed")


@dataclass(frozen=True)
class Fact:
    """One sentence of a story. other: the room of a move, the receiver of a gift."""

    text: str
    kind: str
    person: str
    thing: str = ""
    other: str = ""


@dataclass(frozen=True)
class Stay:
    """An object in a room. arrival: the fact that brought its carrier there; held: the last that was done to it."""

    room: str
    arrival: int
    held: int


@dataclass(frozen=True)
class World:
    """room, place: of people and objects, in truth; where each begins is not told.

    carrier: of the objects that are carried.
    entered: of every person whose room the reader knows, the fact that tells it.
    stays: of every object, the rooms that the reader knows it was in, one after another.
    facts: the story so far.
    """

    room: dict[str, str]
    place: dict[str, str]
    carrier: dict[str, str] = field(default_factory=dict)
    entered: dict[str, int] = field(default_factory=dict)
    stays: dict[str, tuple[Stay, ...]] = field(default_factory=dict)
    facts: tuple[Fact, ...] = ()

    def after(self, fact: Fact) -> "World":
        """The world when the fact has happened."""
        told = replace(self, facts=(*self.facts, fact))
        return {"move": told._moved, "get": told._got, "drop": told._dropped, "give": told._given}[fact.kind](fact)

    def _moved(self, fact: Fact) -> "World":
        now = len(self.facts) - 1
        carried = [thing for thing, person in self.carrier.items() if person == fact.person]
        stays = dict(self.stays)
        for thing in carried:
            stays[thing] = (*stays.get(thing, ()), Stay(fact.other, now, self._last_touched(thing)))
        return replace(
            self,
            room={**self.room, fact.person: fact.other},
            place={**self.place, **dict.fromkeys(carried, fact.other)},
            entered={**self.entered, fact.person: now},
            stays=stays,
        )

    def _got(self, fact: Fact) -> "World":
        return replace(self, carrier={**self.carrier, fact.thing: fact.person})._touched(fact.thing, fact.person)

    def _dropped(self, fact: Fact) -> "World":
        left = {thing: person for thing, person in self.carrier.items() if thing != fact.thing}
        return replace(self, carrier=left)._touched(fact.thing, fact.person)

    def _given(self, fact: Fact) -> "World":
        return replace(self, carrier={**self.carrier, fact.thing: fact.other})

    def _touched(self, thing: str, person: str) -> "World":
        """Whoever takes an object or puts it down shows where it is, if it is known where the person is."""
        if person not in self.entered:
            return self
        now, room, before = len(self.facts) - 1, self.room[person], self.stays.get(thing, ())
        stay = Stay(room, self.entered[person], now)
        kept = before[:-1] if before and before[-1].room == room else before
        # Whose move explains the room: that of the last person who touched the object there.
        return replace(self, stays={**self.stays, thing: (*kept, stay)})

    def _last_touched(self, thing: str) -> int:
        return max(i for i, fact in enumerate(self.facts) if fact.thing == thing and fact.kind != "move")
