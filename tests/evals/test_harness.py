"""Our tasks in the harness: a perfect model scores 100, a mute one 0, and batches change no answer."""

import json
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from lucid_attention import enable_lucid
from lucid_lab.data.synthetic import MemoryUpdate
from lucid_lab.evals.benchmarks import needles, recall, ruler
from lucid_lab.evals.cells import Cell, EvalError, Options
from lucid_lab.evals.checkpoint import Checkpoint
from lucid_lab.evals.harness import HarnessCell, HarnessModel
from lucid_lab.evals.tokens import load_tokenizer

from .stub_models import Mute, PromptReader


def cells(tokenizer: Path) -> list[Cell]:
    options = Options(tokenizer=str(tokenizer), samples=3, lengths=(1024,))
    return [
        *needles.single(options),
        *needles.multiple(replace(options, needles=(1, 4), variants=("multikey_1",))),
        *needles.multiple(replace(options, needles=(4,), lengths=(2048,))),
        *ruler.cells(replace(options, lengths=(2048,))),
    ]


@pytest.fixture(scope="module")
def loaded(tokenizer_folder: Path) -> list[HarnessCell]:
    return [HarnessCell(cell, None) for cell in cells(tokenizer_folder)]


def ask(loaded: HarnessCell, lm: Any, batch_size: int = 2, indices: tuple[int, ...] = (0, 1, 2)) -> dict[int, Any]:
    """The records by their ids."""
    loaded.lm = lm
    return {record["id"]: record for record in loaded(indices, batch_size)}


def test_a_perfect_model_scores_100(loaded: list[HarnessCell]) -> None:
    for cell in loaded:
        records = ask(cell, PromptReader())
        assert [records[index]["score"] for index in range(3)] == [1.0] * 3, cell.cell.labels


def test_a_mute_model_scores_0(loaded: list[HarnessCell]) -> None:
    for cell in loaded:
        records = ask(cell, Mute())
        assert [records[index]["score"] for index in range(3)] == [0.0] * 3, cell.cell.labels


def test_a_model_that_names_every_needle_but_the_right_one_scores_0(loaded: list[HarnessCell]) -> None:
    class Distracted(PromptReader):
        def read(self, prompt: str) -> str:
            key = re.findall(r"for (\S+) mentioned", prompt)[-1]
            return " ".join(value for name, value in re.findall(r"for (\S+) is: (\S+)\.", prompt) if name != key)

    four_needles = next(
        cell for cell in loaded if cell.cell.labels == {"task": "multikey_1", "needles": 4, "length": 1024}
    )
    assert {record["score"] for record in ask(four_needles, Distracted()).values()} == {0.0}


def test_the_harness_asks_the_prompts_that_were_measured(loaded: list[HarnessCell], tokenizer_folder: Path) -> None:
    tokenizer = load_tokenizer(str(tokenizer_folder))
    for cell in loaded:
        ask(cell, Mute())
        for instance in cell.task.instances:
            prompt, settings = instance.args
            tokens = len(tokenizer(prompt)["input_ids"])
            assert tokens + settings["max_gen_toks"] <= cell.cell.length, cell.cell.labels
            assert settings["do_sample"] is False
            if "needles" in cell.cell.keep:
                assert tokens == instance.doc["tokens"]
                ids = tokenizer(prompt)["input_ids"]
                for needle in instance.doc["needles"]:
                    assert tokenizer.decode(ids[slice(*needle["span"])]).strip() == needle["text"]


def test_a_sample_asked_alone_has_the_same_record(loaded: list[HarnessCell]) -> None:
    cell = loaded[3]
    records = ask(cell, PromptReader())
    assert ask(cell, PromptReader(), indices=(2,)) == {2: records[2]}
    assert ask(cell, PromptReader(), 1, indices=(2, 0)) == {index: records[index] for index in (0, 2)}
    assert {"tokens", "needles", "answer_spans", "output", "target", "score"} <= records[0].keys()


@pytest.fixture(scope="module")
def short(tokenizer_folder: Path) -> HarnessCell:
    options = Options(tokenizer=str(tokenizer_folder), samples=5, lengths=(320,), needles=(2,), answer_tokens=12)
    return HarnessCell(needles.multiple(replace(options, variants=("multikey_2",)))[0], None)


@pytest.mark.parametrize("kind", ["lucid", "llama", "dropin"])
def test_batches_and_padding_do_not_change_an_answer(
    kind: str, short: HarnessCell, lucid_folder: Path, llama_folder: Path, tokenizer_folder: Path
) -> None:
    enable_lucid()
    model = AutoModelForCausalLM.from_pretrained(lucid_folder if kind == "lucid" else llama_folder)
    if kind == "dropin":
        enable_lucid(model)
    tokenizer = load_tokenizer(str(tokenizer_folder))
    outputs = []
    for batch_size, side in ((1, "left"), (3, "left"), (5, "right")):
        tokenizer.padding_side = side
        records = ask(short, HarnessModel(model, tokenizer, batch_size), batch_size, tuple(range(5)))
        outputs.append([records[index]["output"] for index in range(5)])
    assert outputs[0] == outputs[1] == outputs[2]
    assert len(set(outputs[0])) == 5
    # Without prompts of several lengths, nothing would have been padded.
    assert len({instance.doc["tokens"] for instance in short.task.instances}) > 1


def test_the_model_gets_whole_prompts(
    short: HarnessCell, llama_folder: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[list[int]] = []

    def generate(self: Any, context: Any, attention_mask: Any, **_: Any) -> Any:
        received.extend(row[mask.bool()].tolist() for row, mask in zip(context, attention_mask, strict=True))
        return context

    monkeypatch.setattr(HarnessModel, "_model_generate", generate)
    tokenizer = load_tokenizer(str(tokenizer_folder))
    lm = HarnessModel(AutoModelForCausalLM.from_pretrained(llama_folder), tokenizer, 3)
    ask(short, lm, 3, tuple(range(5)))
    prompts = [tokenizer(instance.args[0])["input_ids"] for instance in short.task.instances]
    assert sorted(received) == sorted(prompts)


def test_a_prompt_that_is_too_long_is_refused_and_not_cut(
    short: HarnessCell, llama_folder: Path, tokenizer_folder: Path
) -> None:
    lm = HarnessModel(AutoModelForCausalLM.from_pretrained(llama_folder), load_tokenizer(str(tokenizer_folder)))
    cell = short.cell
    short.cell = replace(cell, length=200)
    try:
        with pytest.raises(EvalError, match=r"a prompt has \d+ tokens, which with 12 .* more than the 200"):
            ask(short, lm, 1, (0,))
    finally:
        short.cell = cell


def test_rulers_samples_depend_on_the_seed_alone(tokenizer_folder: Path) -> None:
    for cell in ruler.cells(Options(tokenizer=str(tokenizer_folder), samples=2, lengths=(2048,))):
        before = random.getstate()
        first = ruler.dataset(**cell.metadata)["test"].to_list()
        assert random.getstate() == before
        random.random()
        assert ruler.dataset(**cell.metadata)["test"].to_list() == first
        assert ruler.dataset(**{**cell.metadata, "seed": 1})["test"].to_list() != first


def test_rulers_tasks_that_cannot_fit_are_refused_at_once(tokenizer_folder: Path) -> None:
    with pytest.raises(EvalError, match=r"ruler vt needs \d+ tokens with this tokenizer, more than --lengths 512"):
        ruler.cells(Options(tokenizer=str(tokenizer_folder), lengths=(512,)))


def test_settings_that_cannot_fit_are_refused_before_anything_is_made(tokenizer_folder: Path) -> None:
    with pytest.raises(EvalError, match="200 needles"):
        needles.multiple(Options(tokenizer=str(tokenizer_folder), needles=(2, 200), lengths=(2048,)))
    with pytest.raises(EvalError, match="--samples must be at least 1"):
        needles.single(Options(tokenizer=str(tokenizer_folder), samples=0))


class Solver:
    """A model that solves a token task; with right=False it always predicts token 0."""

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
    for cell in family(Options(samples=5, needles=(2, 8), lengths=(40,))):
        assert cell.evaluate is not None
        task = cell.evaluate.args[0]
        for right in (True, False):
            records = list(cell.evaluate(Solver(task, right), None, range(5), 2))
            assert [record["score"] for record in records] == [float(right)] * 5
            assert [record["id"] for record in records] == list(range(5))
            assert all(len(record["target"]) == cell.labels["needles"] for record in records)


def test_recall_needs_a_checkpoint_of_its_own_vocabulary() -> None:
    cell = recall.needles(Options(samples=1, needles=(2,)))[0]
    assert cell.evaluate is not None
    with pytest.raises(EvalError, match=r"vocabulary of Needles, 161 tokens, .* got 129"):
        list(cell.evaluate(Solver(MemoryUpdate(), True), None, [0], 1))


def test_settings_of_generation_in_a_checkpoint_do_not_change_its_answers(
    llama_folder: Path, tokenizer_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(llama_folder, tmp_path / "copy")
    settings = {"max_new_tokens": 2, "repetition_penalty": 9.0, "num_beams": 3, "no_repeat_ngram_size": 1}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    cell = HarnessCell(cells(tokenizer_folder)[0], None)
    tokenizer = load_tokenizer(str(tokenizer_folder))
    models = [AutoModelForCausalLM.from_pretrained(path) for path in (llama_folder, folder)]
    plain, changed = (ask(cell, HarnessModel(model, tokenizer), indices=(0, 1)) for model in models)
    assert changed == plain
    # The tokens that end an answer do count: results of another generation_config.json are of another checkpoint.
    assert Checkpoint(folder).sha256 != Checkpoint(llama_folder).sha256
