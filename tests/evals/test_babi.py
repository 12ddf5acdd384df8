"""Stories of bAbI: they use its words, could happen, and answer their questions."""

import random
from collections import Counter

import pytest

from lucid_lab.evals.babi import TASKS, Fact, Stay, Story, World, make_story
from lucid_lab.evals.babilong import LABELS

from .babi_replay import DROP, FORMS, GET, MOVE, contradictions, replay

STORIES = 150


def stories(task: str) -> list[Story]:
    return [make_story(task, random.Random(f"{task}/{number}")) for number in range(STORIES)]


@pytest.mark.parametrize("task", TASKS)
def test_the_answer_follows_from_the_sentences(task: str) -> None:
    for story in stories(task):
        assert replay(task, story.facts, story.question) == story.answer, story


@pytest.mark.parametrize("task", TASKS)
def test_sentences_are_those_of_babi_and_could_happen(task: str) -> None:
    for story in stories(task):
        for fact in story.facts:
            assert any(form.fullmatch(fact) for form in FORMS[task]), fact
        assert contradictions(story.facts) == []


@pytest.mark.parametrize(("task", "number"), [("qa1", 1), ("qa2", 2), ("qa4", 1), ("qa5", 1)])
def test_the_supporting_facts_suffice(task: str, number: int) -> None:
    for story in stories(task):
        assert len(story.supporting) == number
        assert list(story.supporting) == sorted(set(story.supporting))
        supporting = [story.facts[index] for index in story.supporting]
        assert replay(task, supporting, story.question) == story.answer, story


def test_three_facts_tell_where_a_thing_was_before() -> None:
    for story in stories("qa3"):
        assert len(story.supporting) == 3
        supporting = [story.facts[index] for index in story.supporting]
        *_, thing, _, _, room = story.question.removesuffix("?").split()
        assert {move[2] for move in map(MOVE.fullmatch, supporting) if move} == {story.answer, room}
        touched = [match[2] for form in (GET, DROP) for match in map(form.fullmatch, supporting) if match]
        assert touched == [thing]


@pytest.mark.parametrize("task", TASKS)
def test_every_label_is_an_answer_and_no_other_word_is(task: str) -> None:
    answers = Counter(story.answer for story in stories(task))
    assert set(answers) == set(LABELS[task])
    assert max(answers.values()) < STORIES / 2
    for story in stories(task):
        assert story.answer in story.sentence


@pytest.mark.parametrize("task", TASKS)
def test_a_story_depends_on_its_seed_alone(task: str) -> None:
    random.seed(1)
    first = make_story(task, random.Random(5))
    random.seed(2)
    assert make_story(task, random.Random(5)) == first
    assert make_story(task, random.Random(6)) != first


def test_a_reader_knows_where_a_thing_is_from_who_moves_and_who_touches_it() -> None:
    world = World({"John": "garden", "Mary": "kitchen"}, {"milk": "kitchen"})
    facts = [
        ("move", "John", "", "kitchen"),  # 0
        ("get", "John", "milk", ""),
        ("drop", "John", "milk", ""),
        ("get", "Mary", "milk", ""),  # 3: no fact says that Mary is in the kitchen
        ("move", "Mary", "", "office"),
        ("drop", "Mary", "milk", ""),
    ]
    stays = []
    for kind, person, thing, room in facts:
        world.add(Fact("", kind, person, thing, room))
        stays.append(list(world.stays.get("milk", [])))
    assert stays[0] == []
    assert stays[1] == [Stay("kitchen", arrival=0, held=1)]
    assert stays[2] == stays[3] == [Stay("kitchen", arrival=0, held=2)]
    assert stays[4] == [*stays[3], Stay("office", arrival=4, held=3)]
    assert stays[5] == [*stays[3], Stay("office", arrival=4, held=5)]
    assert world.place == {"milk": "office"}
    assert world.carrier == {}
