"""LongBench and SCROLLS on local files: prompts, splits and metrics, held against the harness's."""

import importlib
import json
import random
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import lm_eval.tasks
import pytest
import torch
from jinja2 import Template
from lm_eval.tasks._yaml_loader import load_yaml
from rouge_score.rouge_scorer import RougeScorer

from lucid_attention.evals.benchmarks import longqa, longqa_scores
from lucid_attention.evals.benchmarks.longqa import HALVED, TASKS, documents, fitted
from lucid_attention.evals.runs import EvalError, Options, Run
from lucid_attention.evals.spans import count, load_tokenizer
from lucid_attention.models.decoder.modeling import LucidForCausalLM
from lucid_attention.models.decoder.presets import tiny

from .speakers import Mute, Perfect, ask, mean, write_tokenizer

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
    # The end of a line that only Unicode knows must not end a row.
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
        # Two questions about one text, and one question twice.
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
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), [" ".join(WORDS), *(t.prompt for t in TASKS.values())])


def cells(data: str, tokenizer: str, **changes: Any) -> dict[str, Run]:
    options = Options(tokenizer=tokenizer, data_dir=data, **changes)
    return {str(run.labels["task"]): run for run in longqa.longbench(options) + longqa.scrolls(options)}


@pytest.mark.parametrize("name", LONGBENCH)
def test_prompts_and_room_of_longbench_are_the_harness_s(name: str, data: str, tokenizer: str) -> None:
    config = load_yaml(HARNESS / "longbench" / f"{name}.yaml", resolve_func=False)
    row = longbench_row(name, 3)
    expected = Template(config["doc_to_text"]).render(context=row["context"], question=row["input"])
    assert expected in {each["prompt"] for each in documents(name, "all", data)}
    assert cells(data, tokenizer)[name].answer_tokens == config["generation_kwargs"]["max_gen_toks"]


@pytest.fixture
def their_scrolls(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The harness's module, which wants a part of Transformers that is gone."""
    gone = types.ModuleType("transformers.data.metrics")
    gone.squad_metrics = types.SimpleNamespace(  # type: ignore[attr-defined]
        normalize_answer=lambda said: " ".join(longqa_scores.normalized(said))
    )
    monkeypatch.setitem(sys.modules, "transformers.data.metrics", gone)
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
    closed = documents("qasper", "held_out", data)[-1]
    assert closed["answers"] == ["Yes"]
    assert closed["choices"] == ["yes", "no"]
    assert their_scrolls.Qasper._process_doc(None, {**row, "outputs": ["Yes"]})[0]["is_yes_no"]
    assert not documents("qmsum", "held_out", data)[-1]["choices"]


def test_answers_of_several_people_are_one_question(data: str) -> None:
    found = documents("qasper", "held_out", data)
    assert len(found) == 5
    assert len(found[0]["answers"]) == 2
    assert found[0]["answers"][1] == "a second answer"


PAIRS = [
    ("the river stone", "River, stone!"),
    ("a river", "the river and the stone"),
    ("", "river"),
    ("the", "a"),
    ("stone stone river", "stone"),
    ("nothing", "river"),
]


def test_f1_is_the_harness_s(monkeypatch: pytest.MonkeyPatch) -> None:
    # Packages for Chinese and for code, which these tasks do not use.
    for module, name in {"jieba": "cut", "fuzzywuzzy": "fuzz", "rouge": "Rouge"}.items():
        made = types.ModuleType(module)
        setattr(made, name, None)
        monkeypatch.setitem(sys.modules, module, made)
    monkeypatch.delitem(sys.modules, "lm_eval.tasks.longbench.metrics", raising=False)
    theirs = importlib.import_module("lm_eval.tasks.longbench.metrics")
    for output, answer in PAIRS:
        doc = {"answers": [answer, "copper violin"]}
        expected = theirs.get_qa_f1_score(doc, [output])["qa_f1_score"]
        assert longqa_scores.longbench(doc, [output])["qa_f1_score"] == pytest.approx(expected)
        if output:
            assert longqa_scores.qasper(doc, [output])["f1"] == pytest.approx(100 * expected)
    assert longqa_scores.qasper({"answers": ["unanswerable"]}, [" "])["f1"] == 100


def test_rouge_is_of_the_summary_that_fits_best() -> None:
    doc = {"answers": ["the river and the stone bridges", "a lamp in winter"]}
    found = longqa_scores.qmsum(doc, ["A lamp in the winters"])
    plain = RougeScorer(["rouge1", "rouge2", "rougeL"]).score(doc["answers"][1], "A lamp in the winters")
    assert found == {name: pytest.approx(100 * score.fmeasure) for name, score in plain.items()}
    # Without stemming "winters" is not "winter": 3 of 4 and 3 of 5 words.
    assert found["rouge1"] == pytest.approx(100 * 2 * 3 / (4 + 5))


@pytest.mark.parametrize("name", HALVED)
def test_no_text_is_in_both_halves(name: str, data: str) -> None:
    halves = [documents(name, split, data) for split in ("train", "held_out")]
    texts = [{each["prompt"].split("\u2028")[0] for each in half} for half in halves]
    assert not texts[0] & texts[1]
    assert abs(len(texts[0]) - len(texts[1])) <= 1
    everything = documents(name, "all", data)
    assert sorted(each["id"] for half in halves for each in half) == sorted(each["id"] for each in everything)


def test_halves_are_the_same_in_every_release() -> None:
    # Who trained on a half with one release must not be evaluated on it with the next.
    assert longqa._half(set("abcdefghij"), "2wikimqa") == set("abfhj")
    assert longqa._half(set("abcdefghij"), "multifieldqa_en") == set("abceg")


def test_halves_do_not_depend_on_the_order_of_the_file(data: str, tmp_path: Path) -> None:
    lines = (Path(data) / "2wikimqa.jsonl").read_text().split("\n")
    (tmp_path / "2wikimqa.jsonl").write_text("\n".join(reversed(lines)))
    halves = [{each["prompt"] for each in documents("2wikimqa", "train", folder)} for folder in (data, str(tmp_path))]
    assert halves[0] == halves[1]


def test_hotpotqa_is_evaluated_whole_and_never_trained_on(data: str, tokenizer: str) -> None:
    assert len(ask(cells(data, tokenizer)["hotpotqa"], Mute())) == 13
    assert len(ask(cells(data, tokenizer, part="all")["2wikimqa"], Mute())) == 13
    assert len(ask(cells(data, tokenizer)["2wikimqa"], Mute())) < 9
    with pytest.raises(EvalError, match="hotpotqa is for evaluation only"):
        documents("hotpotqa", "train", data)


def test_training_and_validation_of_scrolls_are_apart(data: str) -> None:
    for name in ("qasper", "qmsum"):
        train, held_out = ({each["prompt"] for each in documents(name, split, data)} for split in ("train", "held_out"))
        assert train
        assert held_out
        assert not train & held_out


def test_who_knows_the_answers_scores_all_and_who_is_mute_nothing(data: str, tokenizer: str) -> None:
    for name, cell in cells(data, tokenizer).items():
        assert cell.out_of == (1 if name in LONGBENCH else 100)
        for size in (1, 3):
            assert mean(ask(cell, Perfect("answers"), size)) == pytest.approx(cell.out_of)
            assert mean(ask(cell, Mute(), size)) == 0


def test_of_yes_and_no_the_likelier_counts_whatever_the_batch(data: str, tokenizer: str) -> None:
    cell, loaded = cells(data, tokenizer, answer_tokens=4)["qasper"], load_tokenizer(tokenizer)
    model = LucidForCausalLM(tiny(vocab_size=len(loaded), max_position_embeddings=1024)).eval()
    assert cell.evaluate is not None
    assert cell.samples == 5
    found = [sorted(cell.evaluate(model, loaded, range(5), size), key=lambda each: each["id"]) for size in (1, 3)]
    assert [(each["id"], each["output"], each["score"]) for each in found[0]] == [
        (each["id"], each["output"], each["score"]) for each in found[1]
    ]
    closed = documents("qasper", "held_out", data)[-1]
    losses = {}
    for choice in closed["choices"]:
        prompt = loaded(closed["prompt"], return_tensors="pt")["input_ids"]
        ids = loaded(f"{closed['prompt']} {choice}", return_tensors="pt")["input_ids"]
        with torch.no_grad():
            likely = model(ids).logits.log_softmax(-1)[0, prompt.shape[1] - 1 : -1]
        losses[choice] = -likely.gather(1, ids[0, prompt.shape[1] :, None]).sum().item()
    assert found[0][-1]["output"] == min(losses, key=lambda choice: losses[choice])
    assert found[0][-1]["score"] == (100 if found[0][-1]["output"] == "yes" else 0)


def test_the_metrics_of_a_summary_are_all_recorded(data: str, tokenizer: str) -> None:
    record = ask(cells(data, tokenizer)["qmsum"], Perfect("answers"))[0]
    assert set(record["metrics"]) == {"rouge1", "rouge2", "rougeL"}


def test_a_long_prompt_loses_its_middle(tokenizer: str) -> None:
    loaded = load_tokenizer(tokenizer)
    prompt = f"The beginning. {text(1, 2000)} Question: what? Answer:"
    for room in (64, 333):
        cut = fitted(prompt, loaded, room)
        assert room - 8 <= count(loaded, cut) <= room
        assert cut.startswith("The beginning. ")
        assert cut.endswith("Question: what? Answer:")
    assert fitted(prompt, loaded, 10**6) == prompt


def test_prompts_and_answers_have_the_given_length(data: str, tokenizer: str) -> None:
    cell = cells(data, tokenizer, max_length=160, answer_tokens=20)["hotpotqa"]
    lm = Perfect("answers")
    assert mean(ask(cell, lm)) == 1
    assert max(count(load_tokenizer(tokenizer), prompt) for prompt in lm.asked) in range(130, 141)
    limited = replace(cell, metadata={**cell.metadata, "samples": 3})
    assert len(ask(limited, Mute())) == 3


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (None, "there is no file"),
        ("{", "line 1: no JSON"),
        ('{"context": "", "answers": []}', "line 1: expected a field 'question' or 'input', got none"),
        ("\n", "holds no rows"),
    ],
)
def test_a_broken_file_is_named(lines: str | None, said: str, tmp_path: Path) -> None:
    if lines is not None:
        (tmp_path / "hotpotqa.jsonl").write_text(lines)
    with pytest.raises(EvalError, match=said):
        documents("hotpotqa", "all", str(tmp_path))


def test_other_content_is_another_cell_and_a_missing_file_is_noticed_at_once(tmp_path: Path, tokenizer: str) -> None:
    seen = set()
    for number in range(2):
        for name in LONGBENCH:
            write(tmp_path / f"{name}.jsonl", [longbench_row(name, number + each) for each in range(3)])
        runs = longqa.longbench(Options(tokenizer=tokenizer, data_dir=str(tmp_path)))
        seen |= {run.metadata["data_sha256"] for run in runs}
    assert len(seen) == 6
    with pytest.raises(EvalError, match=r"--data-dir: there is no file .*qasper/validation.jsonl"):
        longqa.scrolls(Options(tokenizer=tokenizer, data_dir=str(tmp_path)))


def test_an_unreachable_hub_names_the_files_to_give_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: str, **__: Any) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    for name, file in {"2wikimqa": "2wikimqa.jsonl", "qasper": "qasper/validation.jsonl"}.items():
        with pytest.raises(EvalError, match=rf"cannot be read: no route\. .* a folder with {file} as --data-dir"):
            documents(name, "held_out")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"part": "half"}, "--part must be one of held_out, all, got 'half'"),
        ({"max_length": 40}, "--max-length must be at least 64 for 2wikimqa, got 40"),
        ({"data_dir": "nowhere"}, "--data-dir must be a folder, got 'nowhere'"),
    ],
)
def test_a_wrong_option_is_named(changes: dict[str, Any], said: str, tokenizer: str) -> None:
    with pytest.raises(EvalError, match=said):
        longqa.longbench(Options(tokenizer=tokenizer, **changes))
