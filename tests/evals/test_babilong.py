"""BABILong: stories that could happen and answer their questions; prompts, lengths, splits and scores."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import lm_eval.tasks
import pytest
from datasets import Dataset
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.tasks.babilong.common_utils import process_results as harness_score

from lucid_lab.evals.babilong import (
    LABELS,
    NAMES,
    TASKS,
    Story,
    draw,
    make_story,
    make_story_sample,
    process_results,
    published_samples,
    render_prompt,
    score_strict,
    split_of,
)
from lucid_lab.evals.tokens import count_tokens, load_tokenizer

from .babi_replay import DROP, FORMS, GET, MOVE, contradictions, replay
from .checkpoints import write_tokenizer
from .stub_models import AnswerKey, Mute, ask, leaves

HARNESS = Path(lm_eval.tasks.__file__).parent / "babilong"
PROSE = "The ship had come in late. Nobody was at the pier, and the lamps were out. A dog barked, far away. " * 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    texts = [" ".join(make_story(task, random.Random(0)).facts) for task in TASKS]
    prompts = [render_prompt(task, "", "") for task in TASKS]
    return str(write_tokenizer(tmp_path_factory.mktemp("tokenizer"), [*texts, *prompts, PROSE], 1000))


@pytest.fixture(scope="module")
def prose(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("prose") / "prose.txt"
    sentences = [f"{word} {what}." for word in ("A dog", "The ship", "Mary", "Some lamp") for what in ("slept", "left")]
    file.write_text(" ".join(sentences) + " " + PROSE)
    return str(file)


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


@pytest.mark.parametrize("task", TASKS)
def test_the_prompt_is_the_harness_s(task: str) -> None:
    story = make_story(task, random.Random(3))
    doc = {"input": " ".join(story.facts), "question": story.question, "target": story.answer}
    config = load_yaml(HARNESS / f"babilong_{task}.yaml")
    config["custom_dataset"] = lambda **_: {task: Dataset.from_list([doc])}
    theirs = ConfigurableTask(config=config)
    expected = theirs.fewshot_context(doc, num_fewshot=config["num_fewshot"])
    assert render_prompt(task, doc["input"], doc["question"]) == expected


@pytest.mark.parametrize("task", TASKS)
def test_facts_stand_in_their_order_in_a_text_of_the_length(task: str, folder: str, prose: str) -> None:
    tokenizer = load_tokenizer(folder)
    for length in (1500, 4096):
        for index in range(3):
            sample = make_story_sample(tokenizer, task, length, haystack=prose, index=index)
            ids = tokenizer(sample.prompt)["input_ids"]
            assert len(ids) == sample.tokens
            assert length - 32 - 16 < len(ids) <= length - 32
            spans = [tokenizer.decode(ids[slice(*span)]).strip() for span in sample.answer_spans]
            assert spans == [sample.facts[number] for number in sample.supporting]
            text = sample.prompt.split("\n")[-2]
            places = [text.find(fact) for fact in list(sample.facts)]
            assert all(place >= 0 for place in places)
            matches = [match for form in FORMS[task] for match in form.finditer(text)]
            facts = [match[0] for match in sorted(matches, key=lambda match: match.start())]
            # "Mary left." in the prose would look like a fact: such sentences are left out.
            assert facts == list(sample.facts)
            assert replay(task, facts, sample.question) == sample.target
            rest = text
            for fact in list(sample.facts):
                rest = rest.replace(fact, "", 1)
            assert not NAMES.search(rest)


def test_a_sample_depends_on_its_arguments_alone(folder: str, prose: str) -> None:
    tokenizer = load_tokenizer(folder)
    sample = make_story_sample(tokenizer, "qa1", 1024, haystack=prose, index=4)
    random.seed(7)
    assert make_story_sample(tokenizer, "qa1", 1024, haystack=prose, index=4) == sample
    for other in ({"index": 5}, {"index": 4, "seed": 1}, {"index": 4, "split": "train"}):
        how: dict[str, Any] = {"haystack": prose, **other}
        assert make_story_sample(tokenizer, "qa1", 1024, **how).prompt != sample.prompt


@pytest.mark.parametrize("task", TASKS)
def test_no_story_is_in_training_and_in_evaluation(task: str) -> None:
    # Stories of these tasks are short, so that different seeds draw the same ones.
    draws = 300 if task in ("qa1", "qa4") else 60
    drawn = {
        split: {
            (story.facts, story.question)
            for story in (draw(task, split, random.Random(number)) for number in range(draws))
        }
        for split in ("train", "test")
    }
    assert not drawn["train"] & drawn["test"]


def test_the_side_of_a_story_is_the_same_in_every_release() -> None:
    facts = ("Mary went to the office.",)
    sides = [split_of(Story(f"Where is {name}?", "office", (0,), "", facts, "qa1")) for name in "ABCDEFGHIJ"]
    assert [i for i, side in enumerate(sides) if side == "test"] == [6]


SCORES = {
    # output: strict, lax
    " The most recent location of Mary is bathroom.": (1, 1),
    "bathroom. Then the kitchen.": (1, 1),
    "bathroom or kitchen": (0, 1),
    "kitchen. No, bathroom.": (0, 1),
    "": (0, 0),
    "the bathroom <example> kitchen": (1, 1),
}


@pytest.mark.parametrize(("output", "scores"), SCORES.items(), ids=SCORES)
def test_strict_scoring_wants_one_label_in_the_first_sentence(output: str, scores: tuple[int, int]) -> None:
    doc = {"task": "qa1", "question": "Where is Mary?", "target": "bathroom"}
    given = process_results(doc, [output])
    assert (given["strict"], given["lax"]) == scores
    assert given["lax"] == harness_score(doc, [output])["acc"]
    # Labels of the question do not count.
    question = "Where was the apple before the kitchen?"
    assert score_strict("qa3", question, "office", "Before the kitchen the apple was in the office.") == 1
    assert score_strict("qa3", question, "office", "Before the garden the apple was in the office.") == 0


def test_a_model_that_knows_the_answers_scores_1_and_a_mute_one_0(folder: str) -> None:
    tokenizer = load_tokenizer(folder)
    tasks = leaves("babilong", folder, lengths=(0, 1500), samples=2, haystack="noise")
    assert [task.task_name for task in tasks] == [f"babilong-{task}-{length}" for length in (0, 1500) for task in TASKS]
    for task in tasks:
        for field in ("answer", "target"):
            samples = ask(task, lm := AnswerKey(field))
            assert [(sample["strict"], sample["lax"]) for sample in samples] == [(1, 1)] * 2
        assert [sample["strict"] for sample in ask(task, Mute())] == [0, 0]
        if task.task_name.endswith("1500"):
            longest = max(count_tokens(tokenizer, prompt) for prompt in lm.prompts)
            assert longest + task.config.generation_kwargs["max_gen_toks"] <= 1500


ROWS = [
    {"input": f"Mary went to the garden. {i}.", "question": "Where is Mary? ", "target": "garden"} for i in range(3)
]


def test_published_stories_are_read_from_a_folder_as_from_the_hub(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for task, content in (("qa1", json.dumps(ROWS)), ("qa2", "\n".join(map(json.dumps, ROWS)))):
        (tmp_path / "data" / task).mkdir(parents=True)
        (tmp_path / "data" / task / "4k.json").write_text(content)
        prompts = [sample["prompt"] for sample in published_samples(str(tmp_path), task, 4096, 2)]
        assert prompts == [render_prompt(task, row["input"], row["question"]) for row in ROWS[:2]]
    with pytest.raises(ValueError, match=r"8k, cannot be read: .*Leave out --babilong-hub"):
        published_samples(str(tmp_path), "qa1", 8192, 2)
    loaded = []

    def load_dataset(*names: str, **how: Any) -> list[dict[str, str]]:
        loaded.append((*names, how["split"]))
        return ROWS

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    (task,) = leaves("babilong", folder, qa=("qa1",), lengths=(4096,), samples=2, babilong_hub="some/stories")
    assert [sample["strict"] for sample in ask(task, AnswerKey("target"))] == [1, 1]
    assert loaded == [("some/stories", "4k", "qa1")]
