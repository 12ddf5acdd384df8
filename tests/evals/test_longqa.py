"""LongBench and SCROLLS on local files: prompts, splits and metrics, compared with the harness's."""

import importlib
import json
import random
import sys
import types
from pathlib import Path
from typing import Any

import lm_eval.tasks
import pytest
import torch
from jinja2 import Template
from lm_eval.tasks._yaml_loader import load_yaml
from rouge_score.rouge_scorer import RougeScorer
from transformers import AutoModelForCausalLM

from lucid_lab.evals import longqa
from lucid_lab.evals.evaluate import EvaluatedModel
from lucid_lab.evals.longqa import HALVED, TASKS, cut_middle, documents
from lucid_lab.evals.tokens import count_tokens, load_tokenizer

from .checkpoints import write_checkpoint, write_tokenizer
from .stub_models import AnswerKey, Mute, ask, leaves

HARNESS = Path(lm_eval.tasks.__file__).parent
LONGBENCH = [name for name, task in TASKS.items() if task.suite == "longbench"]
WORDS = ["river", "stone", "cloud", "lamp", "winter", "garden", "letter", "bridge", "copper", "violin"]


def text(seed: object, words: int = 60) -> str:
    return " ".join(random.Random(f"{seed}").choices(WORDS, k=words))


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def longbench_row(name: str, number: int) -> dict[str, Any]:
    question = f"Which {WORDS[number % 10]} is number {number}?"
    # A line separator of Unicode must not end a row.
    context = f"{text((name, number))}\u2028{{braces}} {number}"
    answers = [f"the {WORDS[number % 10]} {number}", "another"]
    return {"_id": f"{name}-{number}", "input": question, "context": context, "answers": answers, "length": 60}


def scrolls_row(name: str, split: str, number: int, output: str) -> dict[str, Any]:
    source = f"What about {number}?\n\n{text((name, split, number))}\n\nA second paragraph."
    return {"id": f"{split}-{number}", "pid": f"{split}-{number}-0", "input": source, "output": output}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data")
    for name in LONGBENCH:
        rows = [longbench_row(name, number) for number in range(11)]
        # Two questions about one text, and one question twice in the file.
        rows += [{**rows[0], "_id": "again", "input": "And what else?"}, {**rows[1]}]
        write(folder / f"{name}.jsonl", rows)
    for name in ("qasper", "qmsum"):
        for split in ("train", "validation"):
            rows = [scrolls_row(name, split, number, f"{text((number, 'out'), 8)} {number}") for number in range(4)]
            rows += [scrolls_row(name, split, 0, "a second answer"), scrolls_row(name, split, 9, "Yes")]
            write(folder / name / f"{split}.jsonl", rows)
    return str(folder)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    texts = [" ".join(WORDS), *(task.prompt for task in TASKS.values())]
    return str(write_tokenizer(tmp_path_factory.mktemp("tokenizer"), texts))


def tasks(data: str, tokenizer: str, names: str = "longbench,scrolls", **options: Any) -> dict[str, Any]:
    return {task.task_name: task for task in leaves(names, tokenizer, data_dir=data, **options)}


@pytest.mark.parametrize("name", LONGBENCH)
def test_prompts_and_room_of_longbench_are_the_harness_s(name: str, data: str) -> None:
    config = load_yaml(HARNESS / "longbench" / f"{name}.yaml", resolve_func=False)
    row = longbench_row(name, 3)
    expected = Template(config["doc_to_text"]).render(context=row["context"], question=row["input"])
    assert expected in {document["prompt"] for document in documents(name, "all", data)}
    assert TASKS[name].answer_tokens == config["generation_kwargs"]["max_gen_toks"]


@pytest.fixture
def their_scrolls(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The harness's module, which imports a part of Transformers that no longer exists."""
    missing = types.ModuleType("transformers.data.metrics")
    missing.squad_metrics = types.SimpleNamespace(  # type: ignore[attr-defined]
        normalize_answer=lambda answer: " ".join(longqa.normalized_words(answer))
    )
    monkeypatch.setitem(sys.modules, "transformers.data.metrics", missing)
    monkeypatch.delitem(sys.modules, "lm_eval.tasks.scrolls.task", raising=False)
    return importlib.import_module("lm_eval.tasks.scrolls.task")


@pytest.mark.parametrize(("name", "kind"), [("qasper", "Qasper"), ("qmsum", "QMSum")])
def test_prompts_of_scrolls_are_the_harness_s(name: str, kind: str, data: str, their_scrolls: Any) -> None:
    theirs = getattr(their_scrolls, kind)
    for split in ("train", "held_out"):
        for number, ours in enumerate(documents(name, split, data)[:4]):
            row = scrolls_row(name, "train" if split == "train" else "validation", number, "")
            (doc,) = theirs._process_doc(None, {**row, "outputs": ours["answers"]})
            assert theirs.doc_to_text(None, doc) == ours["prompt"]
    yes_no = documents("qasper", "held_out", data)[-1]
    assert yes_no["answers"] == ["Yes"]
    assert yes_no["choices"] == ["yes", "no"]
    assert their_scrolls.Qasper._process_doc(None, {**row, "outputs": ["Yes"]})[0]["is_yes_no"]
    assert not documents("qmsum", "held_out", data)[-1]["choices"]


def test_answers_of_several_people_are_one_question(data: str) -> None:
    questions = documents("qasper", "held_out", data)
    assert len(questions) == 5
    assert len(questions[0]["answers"]) == 2
    assert questions[0]["answers"][1] == "a second answer"


PAIRS = [
    ("the river stone", "River, stone!"),
    ("a river", "the river and the stone"),
    ("", "river"),
    ("the", "a"),
    ("stone stone river", "stone"),
    ("nothing", "river"),
]


def test_f1_is_the_harness_s(monkeypatch: pytest.MonkeyPatch) -> None:
    # The harness imports packages for Chinese and for code, which these tasks do not use.
    for package, name in {"jieba": "cut", "fuzzywuzzy": "fuzz", "rouge": "Rouge"}.items():
        module = types.ModuleType(package)
        setattr(module, name, None)
        monkeypatch.setitem(sys.modules, package, module)
    monkeypatch.delitem(sys.modules, "lm_eval.tasks.longbench.metrics", raising=False)
    theirs = importlib.import_module("lm_eval.tasks.longbench.metrics")
    for output, answer in PAIRS:
        doc = {"answers": [answer, "copper violin"], "choices": []}
        expected = theirs.get_qa_f1_score(doc, [output])["qa_f1_score"]
        assert longqa.score_longbench(doc, [output])["qa_f1_score"] == pytest.approx(expected)
        if output:
            assert longqa.score_qasper(doc, [output])["f1"] == pytest.approx(100 * expected)
    assert longqa.score_qasper({"answers": ["unanswerable"], "choices": []}, [" "])["f1"] == 100


def test_rouge_is_of_the_summary_that_fits_best() -> None:
    doc = {"answers": ["the river and the stone bridges", "a lamp in winter"]}
    scores = longqa.score_qmsum(doc, ["A lamp in the winters"])
    expected = RougeScorer(["rouge1", "rouge2", "rougeL"]).score(doc["answers"][1], "A lamp in the winters")
    assert scores == {name: pytest.approx(100 * score.fmeasure) for name, score in expected.items()}
    # Without stemming "winters" is not "winter": 3 of 4 and 3 of 5 words.
    assert scores["rouge1"] == pytest.approx(100 * 2 * 3 / (4 + 5))


@pytest.mark.parametrize("name", HALVED)
def test_no_text_is_in_both_halves(name: str, data: str) -> None:
    halves = [documents(name, split, data) for split in ("train", "held_out")]
    texts = [{document["prompt"].split("\u2028")[0] for document in half} for half in halves]
    assert not texts[0] & texts[1]
    assert abs(len(texts[0]) - len(texts[1])) <= 1
    whole = documents(name, "all", data)
    assert sorted(document["id"] for half in halves for document in half) == sorted(
        document["id"] for document in whole
    )


def test_halves_are_the_same_in_every_release() -> None:
    # A model that was trained on a half by one release must not be evaluated on it by the next.
    assert longqa._half(set("abcdefghij"), "2wikimqa") == set("abfhj")
    assert longqa._half(set("abcdefghij"), "multifieldqa_en") == set("abceg")


def test_hotpotqa_is_evaluated_whole_and_never_trained_on(data: str, tokenizer: str) -> None:
    held_out = tasks(data, tokenizer, "longbench")
    assert len(held_out["longbench-hotpotqa"].eval_docs) == 13
    assert len(held_out["longbench-2wikimqa"].eval_docs) < 9
    assert len(tasks(data, tokenizer, "longbench", part="all")["longbench-2wikimqa"].eval_docs) == 13
    assert list(tasks(data, tokenizer, "scrolls", variants=("qasper",))) == ["scrolls-qasper"]
    with pytest.raises(ValueError, match="hotpotqa is for evaluation only"):
        documents("hotpotqa", "train", data)


def test_a_model_that_knows_the_answers_has_the_best_score_and_a_mute_one_0(data: str, tokenizer: str) -> None:
    metrics = {"scrolls-qasper": "f1", "scrolls-qmsum": "rougeL"}
    for name, task in tasks(data, tokenizer).items():
        metric, best = metrics.get(name, "qa_f1_score"), 100 if name in metrics else 1
        assert [sample[metric] for sample in ask(task, AnswerKey("answers"))] == pytest.approx(
            [best] * len(task.eval_docs)
        )
        assert {sample[metric] for sample in ask(task, Mute())} == {0}


def test_the_likelier_of_yes_and_no_counts_in_every_batch(data: str, tokenizer: str, tmp_path: Path) -> None:
    loaded = load_tokenizer(tokenizer)
    model = AutoModelForCausalLM.from_pretrained(write_checkpoint(tmp_path / "llama", Path(tokenizer), "llama"))
    alone, batched = (
        [
            (sample["doc_id"], sample["filtered_resps"], sample["f1"])
            for sample in ask(tasks(data, tokenizer, "scrolls", answer_tokens=4)["scrolls-qasper"], lm)
        ]
        for lm in (EvaluatedModel(model, loaded, size) for size in (1, 3))
    )
    assert [(number, score) for number, _, score in alone] == [(number, score) for number, _, score in batched]
    assert [answers for _, answers, _ in alone[:-1]] == [answers for _, answers, _ in batched[:-1]]
    yes_no = documents("qasper", "held_out", data)[-1]
    likelihoods = []
    for choice in yes_no["choices"]:
        prompt = loaded(yes_no["prompt"], return_tensors="pt")["input_ids"]
        ids = loaded(f"{yes_no['prompt']} {choice}", return_tensors="pt")["input_ids"]
        with torch.no_grad():
            log_probabilities = model(ids).logits.log_softmax(-1)[0, prompt.shape[1] - 1 : -1]
        likelihoods.append(log_probabilities.gather(1, ids[0, prompt.shape[1] :, None]).sum().item())
    assert [likelihood for likelihood, _ in alone[-1][1]] == pytest.approx(likelihoods, rel=1e-4)
    assert alone[-1][2] == (100 if likelihoods[0] > likelihoods[1] else 0)


def test_a_long_prompt_loses_its_middle(tokenizer: str) -> None:
    loaded = load_tokenizer(tokenizer)
    prompt = f"The beginning. {text(1, 2000)} Question: what? Answer:"
    for room in (64, 333):
        cut = cut_middle(prompt, loaded, room)
        assert room - 8 <= count_tokens(loaded, cut) <= room
        assert cut.startswith("The beginning. ")
        assert cut.endswith("Question: what? Answer:")
    assert cut_middle(prompt, loaded, 10**6) == prompt


def test_prompts_and_answers_have_the_given_length(data: str, tokenizer: str) -> None:
    task = tasks(data, tokenizer, "longbench", max_length=160, answer_tokens=20)["longbench-hotpotqa"]
    lm = AnswerKey("answers")
    assert {sample["qa_f1_score"] for sample in ask(task, lm)} == {1}
    assert max(count_tokens(load_tokenizer(tokenizer), prompt) for prompt in lm.prompts) in range(130, 141)
    assert task.config.generation_kwargs["max_gen_toks"] == 20


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (None, "there is no file"),
        ("{", "cannot be read"),
        ('{"context": "", "answers": []}', "must have a field 'question' or 'input', got context, answers"),
        ("\n", "holds no questions"),
    ],
)
def test_a_broken_file_is_named(lines: str | None, message: str, tmp_path: Path) -> None:
    if lines is not None:
        (tmp_path / "hotpotqa.jsonl").write_text(lines)
    with pytest.raises(ValueError, match=message):
        documents("hotpotqa", "all", str(tmp_path))


def test_an_unreachable_hub_names_the_files_to_give_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: str, **__: Any) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    for name, file in {"2wikimqa": "2wikimqa.jsonl", "qasper": "qasper/validation.jsonl"}.items():
        with pytest.raises(
            ValueError, match=rf"{file} cannot be read: no route\. .* a folder with {file} as --data-dir"
        ):
            documents(name, "held_out")
