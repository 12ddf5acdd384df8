"""Our tasks in the harness: a perfect model scores 100, a mute one 0, and how samples are asked for changes nothing."""

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from lucid_attention import enable_lucid
from lucid_attention.evals.benchmarks import niah, recall, ruler
from lucid_attention.evals.harness import Asked, Prompted, quiet
from lucid_attention.evals.runs import EvalError, Options, Run
from lucid_attention.evals.spans import load_tokenizer

from .solvers import Mute, Perfect


def cells(tokenizer: Path) -> list[Run]:
    options = Options(tokenizer=str(tokenizer), samples=3, lengths=(1024,))
    many = replace(options, needles=(3, 6), queries=2, values=2, kind="words")
    lines = replace(options, needles=(4,), haystack="needles", keys="uuids", kind="uuids", lengths=(2048,))
    return [
        *niah.single(options),
        *niah.multiple(replace(options, needles=(1, 4))),
        *niah.multiple(replace(many, lengths=(2048,))),
        *niah.multiple(lines),
        *ruler.runs(replace(options, lengths=(2048,))),
    ]


@pytest.fixture(scope="module")
def asked(tokenizer_folder: Path) -> list[Asked]:
    return [Asked(run, None) for run in cells(tokenizer_folder)]


def records(run: Asked, lm: Any, batch_size: int = 2, indices: tuple[int, ...] = (0, 1, 2)) -> dict[int, Any]:
    run.lm = lm
    return {record["id"]: record for record in run(indices, batch_size)}


def test_a_perfect_model_scores_100(asked: list[Asked]) -> None:
    for run in asked:
        found = records(run, Perfect())
        assert [found[index]["score"] for index in range(3)] == [1.0] * 3, run.run.labels


def test_a_mute_model_scores_0(asked: list[Asked]) -> None:
    for run in asked:
        found = records(run, Mute())
        assert [found[index]["score"] for index in range(3)] == [0.0] * 3, run.run.labels


def test_a_model_that_names_every_needle_but_the_right_one_scores_0(asked: list[Asked]) -> None:
    class Distracted(Mute):
        def answer(self, prompt: str) -> str:
            key = re.findall(r"for (\S+) mentioned", prompt)[-1]
            return " ".join(value for name, value in re.findall(r"for (\S+) is: (\S+)\.", prompt) if name != key)

    run = next(each for each in asked if each.run.labels == {"needles": 4, "length": 1024})
    assert {record["score"] for record in records(run, Distracted()).values()} == {0.0}


def test_the_harness_asks_what_was_measured(asked: list[Asked], tokenizer_folder: Path) -> None:
    tokenizer = load_tokenizer(str(tokenizer_folder))
    for run in asked:
        records(run, Mute())
        for instance in run.task.instances:
            prompt, settings = instance.args
            tokens = len(tokenizer(prompt)["input_ids"])
            assert tokens + settings["max_gen_toks"] <= run.run.length, run.run.labels
            assert settings["do_sample"] is False
            if "needles" in run.run.keep:
                assert tokens == instance.doc["tokens"]
                ids = tokenizer(prompt)["input_ids"]
                for needle in instance.doc["needles"]:
                    assert tokenizer.decode(ids[slice(*needle["span"])]).strip() == needle["text"]


def test_some_samples_alone_are_the_same_as_among_all(asked: list[Asked]) -> None:
    run = asked[3]
    everything = records(run, Perfect())
    assert records(run, Perfect(), indices=(2,)) == {2: everything[2]}
    assert records(run, Perfect(), 1, indices=(2, 0)) == {index: everything[index] for index in (0, 2)}
    assert {"tokens", "needles", "answer_spans", "output", "target", "score"} <= everything[0].keys()


@pytest.fixture(scope="module")
def short(tokenizer_folder: Path) -> Asked:
    options = Options(tokenizer=str(tokenizer_folder), samples=5, lengths=(320,), needles=(2,), answer_tokens=12)
    return Asked(niah.multiple(replace(options, haystack="needles"))[0], None)


@pytest.mark.parametrize("kind", ["lucid", "llama", "dropin"])
def test_batches_and_padding_do_not_change_an_answer(
    kind: str, short: Asked, lucid_folder: Path, llama_folder: Path, tokenizer_folder: Path
) -> None:
    enable_lucid()
    model = AutoModelForCausalLM.from_pretrained(lucid_folder if kind == "lucid" else llama_folder)
    if kind == "dropin":
        enable_lucid(model)
    tokenizer = load_tokenizer(str(tokenizer_folder))
    outputs = []
    for batch_size, side in ((1, "left"), (3, "left"), (5, "right")):
        tokenizer.padding_side = side
        with quiet():
            lm = Prompted(model, tokenizer, batch_size)
        found = records(short, lm, batch_size, tuple(range(5)))
        outputs.append([found[index]["output"] for index in range(5)])
    assert outputs[0] == outputs[1] == outputs[2]
    assert len(set(outputs[0])) == 5
    # Prompts of several lengths, or nothing was padded.
    assert len({instance.doc["tokens"] for instance in short.task.instances}) > 1


def test_the_model_gets_whole_prompts(
    short: Asked, llama_folder: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []

    def generate(self: Any, context: Any, attention_mask: Any, **_: Any) -> Any:
        seen.extend(row[mask.bool()].tolist() for row, mask in zip(context, attention_mask, strict=True))
        return context

    monkeypatch.setattr(Prompted, "_model_generate", generate)
    tokenizer = load_tokenizer(str(tokenizer_folder))
    with quiet():
        lm = Prompted(AutoModelForCausalLM.from_pretrained(llama_folder), tokenizer, 3)
    records(short, lm, 3, tuple(range(5)))
    asked = [tokenizer(instance.args[0])["input_ids"] for instance in short.task.instances]
    assert sorted(seen) == sorted(asked)


def test_a_prompt_that_is_too_long_is_refused_and_not_cut(
    short: Asked, llama_folder: Path, tokenizer_folder: Path
) -> None:
    with quiet():
        lm = Prompted(AutoModelForCausalLM.from_pretrained(llama_folder), load_tokenizer(str(tokenizer_folder)))
    whole = short.run
    short.run = replace(whole, length=200)
    try:
        with pytest.raises(EvalError, match=r"a prompt has \d+ tokens, which with 12 .* more than the 200"):
            records(short, lm, 1, (0,))
    finally:
        short.run = whole


def test_rulers_samples_depend_on_the_seed_alone(tokenizer_folder: Path) -> None:
    for run in ruler.runs(Options(tokenizer=str(tokenizer_folder), samples=2, lengths=(2048,))):
        before = random.getstate()
        first = ruler.dataset(**run.metadata)["test"].to_list()
        assert random.getstate() == before
        random.random()
        assert ruler.dataset(**run.metadata)["test"].to_list() == first
        assert ruler.dataset(**{**run.metadata, "seed": 1})["test"].to_list() != first


def test_rulers_tasks_that_cannot_fit_are_refused_at_once(tokenizer_folder: Path) -> None:
    with pytest.raises(EvalError, match=r"ruler vt needs \d+ tokens with this tokenizer, more than --lengths 512"):
        ruler.runs(Options(tokenizer=str(tokenizer_folder), lengths=(512,)))


def test_settings_that_cannot_fit_are_refused_before_anything_is_made(tokenizer_folder: Path) -> None:
    with pytest.raises(EvalError, match="200 needles"):
        niah.multiple(Options(tokenizer=str(tokenizer_folder), needles=(2, 200), lengths=(2048,)))
    with pytest.raises(EvalError, match="--samples must be at least 1"):
        niah.single(Options(tokenizer=str(tokenizer_folder), samples=0))


class Solver:
    """A model that reads token by token. right: or always says the end token."""

    def __init__(self, task: Any, right: bool) -> None:
        self.task, self.right = task, right
        self.device, self.config = "cpu", self
        self.vocab_size = task.vocab_size

    def get_text_config(self, decoder: bool) -> Any:
        return self

    def __call__(self, input_ids: Any) -> Any:
        import torch

        logits = torch.zeros(*input_ids.shape, self.vocab_size)
        if self.right:
            labels = self.task.solve(input_ids)
            rows, columns = (labels >= 0).nonzero(as_tuple=True)
            logits[rows, columns - 1, labels[rows, columns]] = 1
        return type("Output", (), {"logits": logits})


@pytest.mark.parametrize("family", [recall.needles, recall.memory_update])
def test_recall_is_the_share_of_right_answers(family: Any) -> None:
    for run in family(Options(samples=5, needles=(2, 8), lengths=(40,))):
        assert run.evaluate is not None
        task = run.evaluate.args[0]
        for right in (True, False):
            found = list(run.evaluate(Solver(task, right), None, range(5), 2))
            assert [record["score"] for record in found] == [float(right)] * 5
            assert [record["id"] for record in found] == list(range(5))
            assert all(len(record["target"]) == run.labels["needles"] for record in found)


def test_recall_needs_a_checkpoint_of_its_own_vocabulary() -> None:
    run = recall.needles(Options(samples=1, needles=(2,)))[0]
    assert run.evaluate is not None
    with pytest.raises(EvalError, match=r"vocabulary of Needles, 161 tokens, .* got 129"):
        list(run.evaluate(Solver(recall.MemoryUpdate(), True), None, [0], 1))
