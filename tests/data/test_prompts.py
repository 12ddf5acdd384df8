"""Only answers have labels, and a long prompt keeps its beginning and its question."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lucid_lab.data.datasets import PromptAnswers
from lucid_lab.data.tokenize import train


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train([line["prompt"] + line["answer"] for line in LINES], 300)


def write_lines(path: Path, lines: list[dict[str, str]], **options: Any) -> Path:
    path.write_text("".join(json.dumps(line, **options) + "\n" for line in lines), encoding="utf-8")
    return path


LINES = [{"prompt": f"document {i}: the key reads ", "answer": f"value {i}"} for i in range(100)]


def item_of(path: Path, tokenizer: Any, T: int, prompt: str, answer: str) -> dict[str, torch.Tensor]:
    """The item of a file of one line."""
    data = PromptAnswers(write_lines(path, [{"prompt": prompt, "answer": answer}]), tokenizer, T, validation=0)
    assert len(data) == 1
    return data[0]


def test_labels_are_the_answer_and_its_end_and_padding_is_masked(tokenizer: Any, tmp_path: Path) -> None:
    item = item_of(tmp_path / "a.jsonl", tokenizer, 50, "the key reads ", "value 12")
    prompt = tokenizer.encode("the key reads ")
    answer = [*tokenizer.encode("value 12", add_special_tokens=False), tokenizer.eos_token_id]
    used = len(prompt) + len(answer)
    assert used < 50
    assert all(tensor.dtype == torch.int64 and tensor.shape == (50,) for tensor in item.values())
    assert item["input_ids"][:used].tolist() == prompt + answer
    assert item["labels"].tolist() == [-100] * len(prompt) + answer + [-100] * (50 - used)
    assert item["attention_mask"].tolist() == [1] * used + [0] * (50 - used)


@pytest.mark.parametrize("T", [20, 21])
def test_a_prompt_that_is_too_long_loses_its_middle(T: int, tokenizer: Any, tmp_path: Path) -> None:
    prompt, answer = "first words. " + "filler " * 200 + "which is the question?", "value 3"
    item = item_of(tmp_path / "a.jsonl", tokenizer, T, prompt, answer)
    learned = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
    read = item["input_ids"][: T - len(learned)].tolist()
    whole = tokenizer.encode(prompt)
    half = len(read) // 2
    assert read == whole[:half] + whole[-(len(read) - half) :]
    assert item["labels"].tolist() == [-100] * len(read) + learned
    assert item["attention_mask"].all()


def test_an_answer_that_is_too_long_keeps_its_beginning_and_one_token_of_the_prompt(
    tokenizer: Any, tmp_path: Path
) -> None:
    prompt, answer = "the key reads ", "value " * 50
    item = item_of(tmp_path / "a.jsonl", tokenizer, 10, prompt, answer)
    assert item["labels"].tolist() == [-100, *tokenizer.encode(answer, add_special_tokens=False)[:9]]
    assert item["input_ids"][0] == tokenizer.encode(prompt)[-1]


def test_every_line_is_in_one_split_for_any_order_of_the_file(tokenizer: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"validation": 0.3}
    forward, backward = write_lines(tmp_path / "a.jsonl", LINES), write_lines(tmp_path / "b.jsonl", LINES[::-1])
    splits = []
    for path in (forward, backward):
        parts = [PromptAnswers(path, tokenizer, 40, split=split, **options).lines for split in ("train", "validation")]
        splits.append([{line["prompt"] for line in part} for part in parts])
        assert sum(map(len, parts)) == 100
    assert splits[0] == splits[1]
    assert not splits[0][0] & splits[0][1]
    assert 15 < len(splits[0][1]) < 45


def test_unicode_line_separators_do_not_split_a_line(tokenizer: Any, tmp_path: Path) -> None:
    prompts = ["a\u2028b", "a\u2029b", "a\x85b", "漢字 é", "a\nb", "a\x1eb"]
    path = write_lines(
        tmp_path / "a.jsonl", [{"prompt": prompt, "answer": "b"} for prompt in prompts], ensure_ascii=False
    )
    data = PromptAnswers(path, tokenizer, 40, validation=0)
    assert sorted(line["prompt"] for line in data.lines) == sorted(prompts)


WRONG = {
    "not JSON": ('{"prompt": "a", "answer": "b"}\n\n{"prompt"\n', r"a\.jsonl, line 3: not JSON"),
    "no answer": ('{"prompt": "a"}', r"line 1: expected .*, got no 'answer'"),
    "a list": ('["prompt", "answer"]', r"line 1: expected an object, got a list"),
    "deep": ("\n" + "[" * 100_000, r"a\.jsonl, line 2: not JSON.*nested too deeply"),
    "nothing": ("\n \n", r"a\.jsonl: holds no lines"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_line_that_is_wrong_is_named(kind: str, tokenizer: Any, tmp_path: Path) -> None:
    text, complaint = WRONG[kind]
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(ValueError, match=complaint):
        PromptAnswers(tmp_path / "a.jsonl", tokenizer, 40)
