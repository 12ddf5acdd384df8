"""Stories of bAbI: they use its words, could happen, and answer their questions."""

import random
from collections import Counter

import pytest

from lucid_lab.evals.babi import TASKS, Story, make_story
from lucid_lab.evals.babilong import LABELS

from .babi_replay import DROP, FORMS, GET, MOVE, contradictions, replay

STORIES = 150


def stories(task: str) -> list[Story]:
    return [make_story(task, random.Random(f"{task}/{number}")) for number in range(STORIES)]


@pytest.mark.parametrize("task", TASKS)
def test_the_answer_follows_from_sentences_of_babi_that_could_happen(task: str) -> None:
    for story in stories(task):
        assert replay(task, story.facts, story.question) == story.answer, story
        assert all(any(form.fullmatch(fact) for form in FORMS[task]) for fact in story.facts), story
        assert contradictions(story.facts) == []
        assert story.answer in story.sentence
    answers = Counter(story.answer for story in stories(task))
    assert set(answers) == set(LABELS[task])
    assert max(answers.values()) < STORIES / 2


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
