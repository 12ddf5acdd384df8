"""Answers to questions of bAbI from the sentences alone: they are read backwards, and the simulator is not used."""

import re
from collections.abc import Sequence

ROOMS = "bathroom|bedroom|garden|hallway|kitchen|office"
MOVE = re.compile(rf"(\w+) (?:moved|went|went back|journeyed|travelled) to the ({ROOMS})\.")
GET = re.compile(r"(\w+) (?:got|took|grabbed|picked up) the (apple|football|milk)(?: there)?\.")
DROP = re.compile(r"(\w+) (?:dropped|discarded|left|put down) the (apple|football|milk)(?: there)?\.")
GIVE = re.compile(r"(\w+) (?:gave|passed|handed) the (apple|football|milk) to (\w+)\.")
SIDE = re.compile(rf"The ({ROOMS}) is (north|south|east|west) of the ({ROOMS})\.")
FORMS = {"qa1": (MOVE,), "qa2": (MOVE, GET, DROP), "qa3": (MOVE, GET, DROP), "qa4": (SIDE,)} | {
    "qa5": (MOVE, GET, DROP, GIVE)
}
STEP = {"north": (0, 1), "south": (0, -1), "east": (1, 0), "west": (-1, 0)}


def room_of(person: str, sentences: Sequence[str]) -> str | None:
    for sentence in reversed(sentences):
        move = MOVE.fullmatch(sentence)
        if move and move[1] == person:
            return move[2]
    return None


def place_of(thing: str, sentences: Sequence[str]) -> str | None:
    """Where a thing is after these sentences: with its carrier, or where it was put down."""
    for at in reversed(range(len(sentences))):
        got, dropped = GET.fullmatch(sentences[at]), DROP.fullmatch(sentences[at])
        if got and got[2] == thing:
            return room_of(got[1], sentences) or place_of(thing, sentences[:at])
        if dropped and dropped[2] == thing:
            return room_of(dropped[1], sentences[:at]) or place_of(thing, sentences[:at])
    return None


def places_of(thing: str, sentences: Sequence[str]) -> list[str]:
    """All known places, one after another."""
    places: list[str] = []
    for end in range(1, len(sentences) + 1):
        place = place_of(thing, sentences[:end])
        if place and places[-1:] != [place]:
            places.append(place)
    return places


def beside(room: str, way: str, sentences: Sequence[str]) -> str | None:
    """The room one step from `room` in the direction `way`, on a map drawn from the sentences."""
    relations = [SIDE.fullmatch(sentence) for sentence in sentences]
    places = {room: (0, 0)}
    for _ in relations:
        for relation in relations:
            assert relation
            (x, y), one, other = STEP[relation[2]], relation[1], relation[3]
            if other in places:
                places[one] = (places[other][0] + x, places[other][1] + y)
            elif one in places:
                places[other] = (places[one][0] - x, places[one][1] - y)
    rooms = [name for name, place in places.items() if place == STEP[way]]
    return rooms[0] if rooms else None


def gift(question: str, sentences: Sequence[str]) -> str | None:
    """The answer to a question of QA5."""
    # Question: the group of GIVE that it asks for; a, b and c are the groups that it names.
    forms = {
        r"What did (?P<a>\w+) give to (?P<c>\w+)\?": 2,
        r"Who did (?P<a>\w+) give the (?P<b>\w+) to\?": 3,
        r"Who gave the (?P<b>\w+) to (?P<c>\w+)\?": 1,
        r"Who gave the (?P<b>\w+)\?": 1,
        r"Who received the (?P<b>\w+)\?": 3,
    }
    for form, asked in forms.items():
        match = re.fullmatch(form, question)
        if not match:
            continue
        named = {"abc".index(name) + 1: value for name, value in match.groupdict().items()}
        gifts = [gift for gift in map(GIVE.fullmatch, sentences) if gift]
        fitting = [gift for gift in gifts if all(gift[number] == value for number, value in named.items())]
        return fitting[-1][asked] if fitting else None
    return None


def replay(task: str, sentences: Sequence[str], question: str) -> str | None:
    """The answer; None if the sentences do not tell it."""
    if task == "qa5":
        return gift(question, sentences)
    if asked := re.fullmatch(r"Where is (\w+)\?", question):
        return room_of(asked[1], sentences)
    if asked := re.fullmatch(r"Where is the (\w+)\?", question):
        return place_of(asked[1], sentences)
    if asked := re.fullmatch(r"Where was the (\w+) before the (\w+)\?", question):
        places = places_of(asked[1], sentences)
        return places[-2] if len(places) > 1 and places[-1] == asked[2] else None
    if asked := re.fullmatch(r"What is (\w+) of the (\w+)\?", question):
        return beside(asked[2], asked[1], sentences)
    if asked := re.fullmatch(r"What is the (\w+) (\w+) of\?", question):
        opposite = {"north": "south", "south": "north", "east": "west", "west": "east"}
        return beside(asked[1], opposite[asked[2]], sentences)
    return None


def contradictions(sentences: Sequence[str]) -> list[str]:
    """Sentences that cannot be true: two people have a thing, a thing is not where it is taken, and so on."""
    impossible: list[str] = []
    holder: dict[str, str] = {}
    for at, sentence in enumerate(sentences):
        before = sentences[:at]
        if move := MOVE.fullmatch(sentence):
            if room_of(move[1], before) == move[2]:
                impossible.append(f"{sentence} {move[1]} was there")
        elif got := GET.fullmatch(sentence):
            room, place = room_of(got[1], before), place_of(got[2], before)
            if got[2] in holder or (room and place and room != place):
                impossible.append(f"{sentence} It was elsewhere")
            holder[got[2]] = got[1]
        elif dropped := DROP.fullmatch(sentence):
            if holder.pop(dropped[2], None) != dropped[1]:
                impossible.append(f"{sentence} {dropped[1]} did not have it")
        elif given := GIVE.fullmatch(sentence):
            giver, taker = room_of(given[1], before), room_of(given[3], before)
            if holder.get(given[2]) != given[1] or given[1] == given[3] or (giver and taker and giver != taker):
                impossible.append(f"{sentence} That could not be given")
            holder[given[2]] = given[3]
    return impossible
