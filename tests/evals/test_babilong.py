"""BABILong: prompts, lengths, splits and scores."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import lm_eval.tasks
import pytest
import torch
from datasets import Dataset
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.tasks.babilong.common_utils import process_results as harness_score

from lucid_attention.models.decoder.modeling import LucidForCausalLM
from lucid_attention.models.decoder.presets import tiny
from lucid_lab.evals.benchmarks import haystacks
from lucid_lab.evals.benchmarks.babi import TASKS, Story, make_story
from lucid_lab.evals.benchmarks.babilong import (
    NAMES,
    Babilong,
    cells,
    draw,
    make_sample,
    process_results,
    render_prompt,
    score_strict,
    split_of,
)
from lucid_lab.evals.cells import EvalError, Options
from lucid_lab.evals.harness import HarnessModel
from lucid_lab.evals.tokens import count_tokens, load_tokenizer

from .babi_replay import FORMS, replay
from .checkpoints import write_tokenizer
from .stub_models import AnswerKey, Mute, ask, mean

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
        settings = Babilong(task, length, background=prose)
        for index in range(3):
            sample = make_sample(settings, tokenizer, index)
            tokens = len(tokenizer(sample["prompt"])["input_ids"])
            assert tokens == sample["tokens"]
            assert length - 32 - 16 < tokens <= length - 32
            text = sample["prompt"].split("\n")[-2]
            places = [text.find(fact) for fact in sample["facts"]]
            assert all(place >= 0 for place in places)
            matches = [match for form in FORMS[task] for match in form.finditer(text)]
            facts = [match[0] for match in sorted(matches, key=lambda match: match.start())]
            # "Mary left." in the prose would look like a fact: such sentences are left out.
            assert facts == sample["facts"]
            assert replay(task, facts, sample["question"]) == sample["target"]
            rest = text
            for fact in sample["facts"]:
                rest = rest.replace(fact, "", 1)
            assert not NAMES.search(rest)


def test_facts_are_spread_over_the_text(folder: str) -> None:
    settings = Babilong("qa1", 4096, background="noise")
    depths = []
    for index in range(20):
        sample = make_sample(settings, load_tokenizer(folder), index)
        text = sample["prompt"].split("\n")[-2]
        depths += [text.find(fact) / len(text) for fact in sample["facts"]]
    quarters = [sum(low <= depth < low + 0.25 for depth in depths) / len(depths) for low in (0, 0.25, 0.5, 0.75)]
    assert min(quarters) > 0.1


def test_without_a_length_there_are_only_facts(folder: str) -> None:
    sample = make_sample(Babilong("qa2", 0), load_tokenizer(folder), 0)
    assert sample["prompt"] == render_prompt("qa2", " ".join(sample["facts"]), sample["question"])


def test_a_sample_depends_on_its_place_alone(folder: str, prose: str) -> None:
    tokenizer, settings = load_tokenizer(folder), Babilong("qa1", 1024, background=prose)
    sample = make_sample(settings, tokenizer, 4)
    random.seed(7)
    assert make_sample(settings, tokenizer, 4) == sample
    others = [make_sample(settings, tokenizer, 5), make_sample(replace(settings, seed=1), tokenizer, 4)]
    assert all(other["prompt"] != sample["prompt"] for other in others)


@pytest.mark.parametrize("task", TASKS)
def test_no_story_is_in_training_and_in_evaluation(task: str) -> None:
    # Stories of these tasks are short, so that different seeds draw the same ones.
    draws = 300 if task in ("qa1", "qa4") else 60
    drawn = {
        split: {
            (story.facts, story.question)
            for story in (draw(Babilong(task, 0, split), random.Random(number)) for number in range(draws))
        }
        for split in ("train", "test")
    }
    assert not drawn["train"] & drawn["test"]


def test_without_the_split_by_content_stories_would_be_in_both() -> None:
    # QA4 has few different stories: different seeds alone would draw the same ones.
    both = [{make_story("qa4", random.Random(f"{side}/{i}")).facts for i in range(2000)} for side in "ab"]
    assert both[0] & both[1]
    sides = [split_of(make_story("qa4", random.Random(i))) for i in range(500)]
    assert 0.1 < sides.count("test") / 500 < 0.3


def test_the_side_of_a_story_is_the_same_in_every_release() -> None:
    facts = ("Mary went to the office.",)
    sides = [split_of(Story("qa1", facts, f"Where is {name}?", "office", (0,), "")) for name in "ABCDEFGHIJ"]
    assert [i for i, side in enumerate(sides) if side == "test"] == [6]


SCORES = {
    # output: strict, lax
    " The most recent location of Mary is bathroom.": (1, 1),
    "BATHROOM": (1, 1),
    "bathroom. Then the kitchen.": (1, 1),
    "bathroom or kitchen": (0, 1),
    "kitchen. No, bathroom.": (0, 1),
    "kitchen": (0, 0),
    "": (0, 0),
    "the bathroom <example> kitchen": (1, 1),
    "nowhere": (0, 0),
}


@pytest.mark.parametrize(("output", "scores"), SCORES.items(), ids=SCORES)
def test_strict_scoring_wants_one_label_in_the_first_sentence(output: str, scores: tuple[int, int]) -> None:
    doc = {"task": "qa1", "question": "Where is Mary?", "target": "bathroom"}
    given = process_results(doc, [output])
    assert (given["strict"], given["lax"]) == scores
    assert given["lax"] == harness_score(doc, [output])["acc"]


def test_labels_of_the_question_do_not_count() -> None:
    question = "Where was the apple before the kitchen?"
    assert score_strict("qa3", question, "office", "Before the kitchen the apple was in the office.") == 1
    assert score_strict("qa3", question, "office", "Before the garden the apple was in the office.") == 0
    assert score_strict("qa5", "Who gave the milk to Bill?", "Fred", "Fred gave the milk to Bill.") == 1


def options(folder: str, **changes: Any) -> Options:
    given = {"tokenizer": folder, "lengths": (0, 1500), "samples": 2, "haystack": "noise"}
    return Options(**{**given, **changes})


def test_a_model_that_knows_the_answers_scores_1_and_a_mute_one_0(folder: str) -> None:
    for scoring in ("strict", "lax"):
        table = cells(options(folder, scoring=scoring))
        assert [tuple(cell.labels.values()) for cell in table] == [(task, n) for task in TASKS for n in (0, 1500)]
        for cell in table[:: 1 if scoring == "strict" else 5]:
            assert mean(ask(cell, AnswerKey("answer"))) == 1
            assert mean(ask(cell, AnswerKey("target"))) == 1
            assert mean(ask(cell, Mute())) == 0
            lm = AnswerKey("answer")
            ask(cell, lm)
            longest = max(count_tokens(load_tokenizer(folder), prompt) for prompt in lm.prompts)
            assert not cell.length or longest + cell.answer_tokens <= cell.length


def test_scores_do_not_depend_on_the_batch(folder: str) -> None:
    (cell,) = cells(options(folder, qa=("qa2",), lengths=(0,), samples=5, answer_tokens=8))
    tokenizer = load_tokenizer(folder)
    model = LucidForCausalLM(tiny(vocab_size=len(tokenizer), max_position_embeddings=2048)).eval()
    with torch.no_grad():
        # With fresh weights attention is almost uniform: larger weights make distant tokens matter.
        for weight in model.parameters():
            weight.mul_(8 if weight.ndim == 2 else 1)
    alone, batched = (
        [(record["id"], record["output"], record["score"]) for record in records]
        for records in (ask(cell, HarnessModel(model, tokenizer, size), size) for size in (1, 3))
    )
    assert alone == batched
    assert len({output for _, output, _ in alone}) > 1


def test_a_length_that_is_too_short_is_refused_at_once(folder: str) -> None:
    with pytest.raises(EvalError, match=r"qa3 with its prompt takes \d+ tokens .* more than --lengths 300"):
        cells(options(folder, qa=("qa3",), lengths=(300,)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qa": ("qa6",)}, "task must be one of qa1"),
        ({"lengths": (-1,)}, "--lengths must not be negative, got -1"),
        ({"scoring": "soft"}, "--scoring must be one of strict, lax, got 'soft'"),
        ({"haystack": "needles"}, "--haystack must be noise"),
    ],
)
def test_a_wrong_option_is_named(changes: dict[str, Any], message: str, folder: str) -> None:
    with pytest.raises(EvalError, match=message):
        cells(options(folder, **changes))


def test_stories_of_the_hub_get_the_same_prompts(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"input": "Mary went to the office.", "question": "Where is Mary? ", "target": "office"}
    loaded = []

    def load_dataset(*names: str, split: str) -> list[dict[str, str]]:
        loaded.append((*names, split))
        return [row] * 3

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    (cell,) = cells(options(folder, qa=("qa1",), lengths=(4096,), babilong_hub="some/stories"))
    lm = AnswerKey("target")
    assert mean(ask(cell, lm)) == 1
    assert loaded == [("some/stories", "4k", "qa1")]
    assert lm.prompts == [render_prompt("qa1", row["input"], row["question"])] * 2


def test_an_unreachable_hub_gives_one_message(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: str, **__: str) -> None:
        raise ConnectionError("no route\nand a long trace")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    (cell,) = cells(options(folder, qa=("qa1",), lengths=(0,), babilong_hub="some/stories"))
    with pytest.raises(EvalError, match=r"'some/stories' .* cannot be read: no route\. Leave out --babilong-hub"):
        ask(cell, Mute())


def test_another_text_under_the_same_name_makes_other_cells(folder: str, tmp_path: Path) -> None:
    hay = tmp_path / "hay.txt"
    options = Options(tokenizer=folder, lengths=(0, 1500), samples=1, haystack=str(hay), qa=("qa1",))
    hashes = []
    for text in ("The sky is blue. The grass is green.", "The sky is grey. The grass is wet."):
        hay.write_text(text)
        # Another run of the command reads the file again.
        haystacks.read_prose.cache_clear()
        haystacks.prose_sha256.cache_clear()
        hashes.append([cell.metadata.get("haystack_sha256") for cell in cells(options)])
    (without, first), (still_without, second) = hashes
    assert without is still_without is None
    assert first != second
