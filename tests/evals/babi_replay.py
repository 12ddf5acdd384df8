"""Answers to questions of bAbI from the sentences alone, by looking backwards through them: no use of the simulator."""

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
        found = MOVE.fullmatch(sentence)
        if found and found[1] == person:
            return found[2]
    return None


def place_of(thing: str, sentences: Sequence[str]) -> str | None:
    """Where a thing is after these sentences: with who has it, or where it was put down."""
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
    """The room one step from another on a map that is drawn from the sentences."""
    told = [SIDE.fullmatch(sentence) for sentence in sentences]
    at = {room: (0, 0)}
    for _ in told:
        for each in told:
            assert each
            (x, y), one, other = STEP[each[2]], each[1], each[3]
            if other in at:
                at[one] = (at[other][0] + x, at[other][1] + y)
            elif one in at:
                at[other] = (at[one][0] - x, at[one][1] - y)
    wanted = [name for name, place in at.items() if place == STEP[way]]
    return wanted[0] if wanted else None


def gift(question: str, sentences: Sequence[str]) -> str | None:
    forms = {
        r"What did (?P<a>\w+) give to (?P<c>\w+)\?": 2,
        r"Who did (?P<a>\w+) give the (?P<b>\w+) to\?": 3,
        r"Who gave the (?P<b>\w+) to (?P<c>\w+)\?": 1,
        r"Who gave the (?P<b>\w+)\?": 1,
        r"Who received the (?P<b>\w+)\?": 3,
    }
    for form, wanted in forms.items():
        asked = re.fullmatch(form, question)
        if not asked:
            continue
        known = {"abc".index(name) + 1: value for name, value in asked.groupdict().items()}
        gifts = [found for found in map(GIVE.fullmatch, sentences) if found]
        fitting = [found for found in gifts if all(found[number] == value for number, value in known.items())]
        return fitting[-1][wanted] if fitting else None
    return None


def replayed(task: str, sentences: Sequence[str], question: str) -> str | None:
    """The answer, None if the sentences do not tell it."""
    if task == "qa5":
        return gift(question, sentences)
    if found := re.fullmatch(r"Where is (\w+)\?", question):
        return room_of(found[1], sentences)
    if found := re.fullmatch(r"Where is the (\w+)\?", question):
        return place_of(found[1], sentences)
    if found := re.fullmatch(r"Where was the (\w+) before the (\w+)\?", question):
        places = places_of(found[1], sentences)
        return places[-2] if len(places) > 1 and places[-1] == found[2] else None
    if found := re.fullmatch(r"What is (\w+) of the (\w+)\?", question):
        return beside(found[2], found[1], sentences)
    if found := re.fullmatch(r"What is the (\w+) (\w+) of\?", question):
        opposite = {"north": "south", "south": "north", "east": "west", "west": "east"}
        return beside(found[1], opposite[found[2]], sentences)
    return None


def contradictions(sentences: Sequence[str]) -> list[str]:
    """What cannot have happened: a thing that two people have, a thing that is not where it is taken, ..."""
    found: list[str] = []
    holder: dict[str, str] = {}
    for at, sentence in enumerate(sentences):
        before = sentences[:at]
        if move := MOVE.fullmatch(sentence):
            if room_of(move[1], before) == move[2]:
                found.append(f"{sentence} {move[1]} was there")
        elif got := GET.fullmatch(sentence):
            here, there = room_of(got[1], before), place_of(got[2], before)
            if got[2] in holder or (here and there and here != there):
                found.append(f"{sentence} It was elsewhere")
            holder[got[2]] = got[1]
        elif dropped := DROP.fullmatch(sentence):
            if holder.pop(dropped[2], None) != dropped[1]:
                found.append(f"{sentence} {dropped[1]} did not have it")
        elif given := GIVE.fullmatch(sentence):
            giver, taker = room_of(given[1], before), room_of(given[3], before)
            if holder.get(given[2]) != given[1] or given[1] == given[3] or (giver and taker and giver != taker):
                found.append(f"{sentence} That could not be given")
            holder[given[2]] = given[3]
    return found
