"""From text to packed sequences of tokens: nothing is lost, runs resume, damaged folders are refused."""

import os
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from lucid_lab import cli
from lucid_lab.data import IGNORED, DataError
from lucid_lab.data import tokenize as room
from lucid_lab.data.datasets import PackedTokens
from lucid_lab.data.tokenize import EOS, MANIFEST, Encoder, load, load_tokens, tokenize, train

TEXTS = [f"Document {i}. " + "The latest value wins. " * (1 + i % 7) for i in range(40)]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for i, text in enumerate(TEXTS):
        (folder / f"{i:02}.txt").write_text(text)
    return folder


def decoded(folder: Path) -> list[str]:
    """All documents of a folder of tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [row["input_ids"] for part in load_tokens(folder).values() for row in part]
    assert all(row[-1] == tokenizer.eos_token_id for row in rows)
    return [tokenizer.decode(row[:-1]) for row in rows]


def test_every_document_is_in_one_split_and_the_manifest_counts_them(texts: Path, tmp_path: Path) -> None:
    manifest, is_new = tokenize(str(texts), tmp_path / "tokens", tokenizer="train:300", validation=0.2)
    assert is_new
    assert sorted(decoded(tmp_path / "tokens")) == sorted(TEXTS)
    splits = manifest["splits"]
    assert splits["train"]["documents"] + splits["validation"]["documents"] == len(TEXTS)
    assert 0 < splits["validation"]["documents"] < 20
    parts = load_tokens(tmp_path / "tokens")
    sizes = {split: sum(map(len, part["input_ids"])) for split, part in parts.items()}
    assert sizes == {split: counts["tokens"] for split, counts in splits.items()}
    again, is_new = tokenize(str(texts), tmp_path / "tokens", tokenizer="train:300", validation=0.2)
    assert not is_new
    assert again == manifest
    with pytest.raises(DataError, match="holds tokens of other settings"):
        tokenize(str(texts), tmp_path / "tokens", tokenizer="train:300", validation=0.1)
    shared, _ = tokenize(str(texts), tmp_path / "shared", tokenizer="train:300", validation=0.2, share=0.7)
    kept = sum(split["documents"] for split in shared["splits"].values())
    assert 0.4 * len(TEXTS) < kept < 0.95 * len(TEXTS)
    # Who is read and who is held out are drawn independently.
    assert shared["splits"]["validation"]["documents"] > 0


def test_limits_and_lengths_choose_documents(texts: Path, tmp_path: Path) -> None:
    train(TEXTS, 300).save_pretrained(tmp_path / "tokenizer")
    options: dict[str, Any] = {"tokenizer": str(tmp_path / "tokenizer"), "validation": 0}
    manifest, _ = tokenize(str(texts), tmp_path / "tokens", limit_tokens=100, **options)
    documents = decoded(tmp_path / "tokens")
    assert documents == TEXTS[: len(documents)]
    lengths = [len(ids) for ids in Encoder(load(tmp_path / "tokenizer"))(documents)]
    assert sum(lengths[:-1]) < 100 <= sum(lengths) == manifest["splits"]["train"]["tokens"]
    manifest, _ = tokenize(str(texts), tmp_path / "long", min_document_tokens=30, **options)
    assert manifest["left_out"]["short"] + manifest["splits"]["train"]["documents"] == len(TEXTS)
    assert manifest["left_out"]["short"] > 0


def test_a_small_corpus_holds_one_document_out(texts: Path, tmp_path: Path) -> None:
    manifest, _ = tokenize(str(texts), tmp_path / "tokens", tokenizer="train:300", validation=1e-9)
    assert manifest["splits"]["validation"]["documents"] == 1
    assert sorted(decoded(tmp_path / "tokens")) == sorted(TEXTS)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_stopped_run_resumes_to_the_same_tokens_unless_a_source_was_replaced(
    is_replaced: bool, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "BLOCK", 50)
    monkeypatch.setattr(room, "BATCH", 4)
    arguments: dict[str, Any] = {"tokenizer": "train:300", "validation": 0.2}
    save, calls = room._save_block, []

    def interrupted(*args: Any) -> None:
        calls.append(args[1].name)
        if len(calls) == 3:
            raise KeyboardInterrupt
        save(*args)

    monkeypatch.setattr(room, "_save_block", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tokenize(str(texts), tmp_path / "tokens", **arguments)
    with pytest.raises(DataError, match="is not finished: run the same `lucid tokenize` again"):
        PackedTokens(tmp_path / "tokens", 8)
    if is_replaced:
        (texts / "00.txt").write_text(TEXTS[0].swapcase())
    tokenize(str(texts), tmp_path / "tokens", **arguments)
    # Of a stopped run, the third block is the first that is encoded again.
    assert calls[2:4] == ["block-000002", "block-000000" if is_replaced else "block-000002"]
    tokenize(str(texts), tmp_path / "whole", **arguments)
    assert decoded(tmp_path / "tokens") == decoded(tmp_path / "whole")
    assert not (tmp_path / "tokens" / "unfinished").exists()


def test_the_text_of_a_special_token_is_text(tmp_path: Path) -> None:
    tokenizer = train([*TEXTS, EOS], 400)
    (ids,) = Encoder(tokenizer)([f"a{EOS}b"])
    assert ids.count(tokenizer.eos_token_id) == 1
    assert tokenizer.decode(ids[:-1]) == f"a{EOS}b"


def test_a_long_document_is_encoded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = train(TEXTS, 300)
    whole = Encoder(tokenizer)(TEXTS[:1])
    monkeypatch.setattr("lucid_lab.data.tokenize.LONGEST", 7)
    assert tokenizer.decode(Encoder(tokenizer)(TEXTS[:1])[0]) == tokenizer.decode(whole[0])


@pytest.mark.parametrize("separate", [True, False])
def test_packed_items_hold_every_token_once_with_borders_between_documents(
    separate: bool, texts: Path, tmp_path: Path
) -> None:
    tokenize(str(texts), tmp_path / "tokens", tokenizer="train:300", validation=0.2)
    data = PackedTokens(tmp_path / "tokens", 16, seed=3, separate_documents=separate)
    items = [data[i] for i in range(len(data))]
    stream = torch.cat([item["input_ids"] for item in items])
    tokens = Counter(token for row in load_tokens(tmp_path / "tokens")["train"]["input_ids"] for token in row)
    assert 0 <= (tokens - Counter(stream.tolist())).total() < 16
    assert not Counter(stream.tolist()) - tokens
    ends = stream == AutoTokenizer.from_pretrained(tmp_path / "tokens").eos_token_id
    positions = torch.cat([item["position_ids"] for item in items])
    starts = torch.arange(stream.numel()) % 16 == 0
    if separate:
        starts[1:] |= ends[:-1]
    assert torch.equal(positions == 0, starts)
    labels = torch.cat([item["labels"] for item in items])
    assert torch.equal(labels, torch.where(starts, IGNORED, stream) if separate else stream)
    other = PackedTokens(tmp_path / "tokens", 16, seed=4)
    assert not all(torch.equal(other[i]["input_ids"], items[i]["input_ids"]) for i in range(len(data)))
    copied = pickle.loads(pickle.dumps(data))
    assert torch.equal(copied[len(data) - 1]["input_ids"], items[-1]["input_ids"])
    with pytest.raises(IndexError):
        data[len(data)]


def test_a_damaged_folder_of_tokens_is_refused(texts: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tokens"
    tokenize(str(texts), folder, tokenizer="train:300", validation=0.2)
    file = next((folder / "train").glob("*.arrow"))
    content, status = file.read_bytes(), file.stat()
    altered = bytearray(content)
    altered[len(content) // 2] ^= 1
    for damaged in (content[:-100], bytes(altered)):
        file.write_bytes(damaged)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        with pytest.raises(DataError, match="is missing, cut or altered"):
            PackedTokens(folder, 16)
    file.unlink()
    with pytest.raises(DataError, match="is missing, cut or altered"):
        PackedTokens(folder, 16)
    (folder / MANIFEST).write_text('{"format"')
    with pytest.raises(ValueError, match=MANIFEST):
        PackedTokens(folder, 16)


def test_a_split_that_is_too_short_is_refused(texts: Path, tmp_path: Path) -> None:
    tokenize(str(texts), tmp_path / "tokens", tokenizer="train:300", validation=0)
    with pytest.raises(DataError, match=r"split 'validation' must have at least 16 tokens, got 0"):
        PackedTokens(tmp_path / "tokens", 16, split="validation")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tokenizer", "train:10"], "needs a number N from 259 on, got 'train:10'"),
        (["--tokenizer", "./nowhere"], "--tokenizer './nowhere' cannot be loaded"),
        (["--validation", "1"], "--validation must be from 0 to below 1"),
        (["--limit-tokens", "0"], "--limit-tokens must be at least 1"),
    ],
)
def test_wrong_options_are_one_line(
    words: list[str], message: str, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["tokenize", str(texts), str(tmp_path / "tokens"), *words]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "tokens" / MANIFEST).exists()


def test_the_command_prints_what_it_wrote_and_leaves_other_folders_alone(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["tokenize", str(texts), str(tmp_path / "tokens"), "--tokenizer", "train:300", "--validation", "0.2"]
    assert cli.main(words) == 0
    assert "written" in capsys.readouterr().out
    assert cli.main(words) == 0
    assert "finished before, nothing to do" in capsys.readouterr().out
    words[2] = str(texts)
    assert cli.main(words) == 1
    assert "must be new or empty" in capsys.readouterr().err
