"""`lucid tokenize` and data that cannot be read, were mended, or are few."""

import json
import os
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from lucid_lab.data import DataError
from lucid_lab.data.datasets import PackedTokens
from lucid_lab.data.encoding import document_hash
from lucid_lab.data.shards import ShardWriter
from lucid_lab.data.tokenize import tokenize

from .folders import contents, text, write_texts, write_tokenizer
from .test_tokenize import documents, run

SMALL: dict[str, Any] = {"tokenizer": "train:300", "workers": 1, "validation": 0.2, "shard_tokens": 1000}


@pytest.mark.parametrize("tokenizer", ["train:300", "saved"])
def test_a_mended_file_is_accepted_and_the_result_is_that_of_a_new_run(
    tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tokenizer == "saved":
        tokenizer = str(write_tokenizer(tmp_path / "tokenizer"))
    write_texts(tmp_path / "in", 6)
    lines = [json.dumps({"text": text(seed)}) + "\n" for seed in range(10)]
    (tmp_path / "in/b.jsonl").write_text("".join(lines[:5]) + "{oops\n" + "".join(lines[5:]))
    options = SMALL | {"tokenizer": tokenizer}
    with pytest.raises(DataError, match=r"b.jsonl, line 6: not JSON.*Mend it and run.*or leave.*with --skip-bad"):
        tokenize(str(tmp_path / "in"), tmp_path / "out", **options)
    (tmp_path / "in/b.jsonl").write_text("".join(lines))
    added: list[int] = []
    add = ShardWriter.add
    monkeypatch.setattr(ShardWriter, "add", lambda self, ids: added.append(1) or add(self, ids))
    tokenize(str(tmp_path / "in"), tmp_path / "out", **options)
    # The text files before the bad line are kept, unless the tokenizer had not been trained yet.
    assert len(added) == (16 if tokenizer == "train:300" else 10)
    tokenize(str(tmp_path / "in"), tmp_path / "whole", **options)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_after_a_bad_line_the_same_out_is_accepted_with_skip_bad(tmp_path: Path) -> None:
    write_texts(tmp_path / "in", 6)
    (tmp_path / "in/b.jsonl").write_text("{oops\n")
    options = SMALL | {"tokenizer": str(write_tokenizer(tmp_path / "tokenizer"))}
    with pytest.raises(DataError, match="--skip-bad"):
        tokenize(str(tmp_path / "in"), tmp_path / "out", **options)
    manifest, _ = tokenize(str(tmp_path / "in"), tmp_path / "out", **options | {"skip_bad": True})
    assert manifest["skipped"]["bad"] == 1
    tokenize(str(tmp_path / "in"), tmp_path / "whole", **options | {"skip_bad": True})
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_parts_with_bad_documents_are_read_again_without_skip_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_texts(tmp_path / "in", 6)
    (tmp_path / "in/b.jsonl").write_text("{oops\n")
    options = SMALL | {"tokenizer": str(write_tokenizer(tmp_path / "tokenizer"))}

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("lucid_lab.data.tokenize._finish", stop)
        with pytest.raises(KeyboardInterrupt):
            tokenize(str(tmp_path / "in"), tmp_path / "out", **options | {"skip_bad": True})
    with pytest.raises(DataError, match=r"b.jsonl, line 1: not JSON"):
        tokenize(str(tmp_path / "in"), tmp_path / "out", **options)


def test_a_file_edited_without_a_change_of_size_is_encoded_again(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "in", 6)
    (tmp_path / "in/z.txt").write_bytes(b"\0")
    options = SMALL | {"tokenizer": str(write_tokenizer(tmp_path / "tokenizer")), "validation": 0}
    with pytest.raises(DataError, match=r"z.txt is binary"):
        tokenize(str(tmp_path / "in"), tmp_path / "out", **options)
    (tmp_path / "in/z.txt").write_text("z")
    texts[2] = texts[2].replace("document", "DOCUMENT")
    (tmp_path / "in/a002.txt").write_text(texts[2], newline="")
    tokenize(str(tmp_path / "in"), tmp_path / "out", **options)
    assert documents(tmp_path / "out", "train") == [*texts, "z"]


def test_another_source_in_an_unfinished_folder_is_refused(tmp_path: Path) -> None:
    write_texts(tmp_path / "in", 3)
    write_texts(tmp_path / "other", 4)
    (tmp_path / "in/z.txt").write_bytes(b"\0")
    with pytest.raises(DataError, match="is binary"):
        tokenize(str(tmp_path / "in"), tmp_path / "out", **SMALL)
    with pytest.raises(DataError, match=r"begun with other settings \(source"):
        tokenize(str(tmp_path / "other"), tmp_path / "out", **SMALL)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"source": 3}', "[" * 10_000])
def test_damaged_settings_of_an_unfinished_run_are_written_again(content: str, tmp_path: Path) -> None:
    write_texts(tmp_path / "in", 6)
    (tmp_path / "out/unfinished").mkdir(parents=True)
    (tmp_path / "out/unfinished/settings.json").write_text(content)
    (tmp_path / "out/unfinished/part-000000.json").write_text(content)
    tokenize(str(tmp_path / "in"), tmp_path / "out", **SMALL)
    tokenize(str(tmp_path / "in"), tmp_path / "whole", **SMALL)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_skip_bad_leaves_out_broken_parquet_files_and_names_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    texts = [text(seed) for seed in range(4)]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "in/a.parquet")
    (tmp_path / "in/b.parquet").write_bytes(b"PAR1 broken PAR1")
    pyarrow.parquet.write_table(pyarrow.table({"words": texts}), tmp_path / "in/c.parquet")
    arguments = (str(tmp_path / "in"), str(tmp_path / "out"), "--tokenizer=train:300", "--workers=1", "--validation=0")
    assert run(*arguments) == 1
    assert "b.parquet is not a Parquet file" in (err := capsys.readouterr().err)
    assert "--skip-bad" in err
    assert run(*arguments, "--skip-bad") == 0
    out = capsys.readouterr().out
    assert "left out   0 empty and 2 bad documents" in out
    assert f"such as {tmp_path / 'in/b.parquet'} is not a Parquet file" in out
    assert documents(tmp_path / "out", "train") == texts


def test_a_small_corpus_gets_a_validation_document(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "in", 5)
    (tmp_path / "in/equal.txt").write_text(min(texts, key=document_hash), newline="")
    for shard_tokens in (1000, 1_000_000):
        out = tmp_path / f"out{shard_tokens}"
        tokenize(str(tmp_path / "in"), out, **SMALL | {"validation": 1e-9, "shard_tokens": shard_tokens})
        assert documents(out, "validation") == [min(texts, key=document_hash)] * 2
        assert sorted(documents(out, "train")) == sorted(set(texts) - {min(texts, key=document_hash)})


def test_a_corpus_without_validation_names_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_texts(tmp_path / "in", 1)
    assert run(str(tmp_path / "in"), str(tmp_path / "out"), "--tokenizer=train:300", "--workers=1") == 0
    assert "No document is held out" in (out := capsys.readouterr().out)
    assert "--validation 0.1" in out
    with pytest.raises(DataError, match="tokenize again with a larger --validation"):
        PackedTokens(tmp_path / "out", 16, split="validation")


def test_a_finished_folder_of_files_that_changed_in_content_alone_is_refused(tmp_path: Path) -> None:
    write_texts(tmp_path / "in", 6)
    tokenize(str(tmp_path / "in"), tmp_path / "out", **SMALL)
    file = min((tmp_path / "in").iterdir())
    content = file.read_bytes()
    file.write_bytes(content[::-1])
    later = (tmp_path / "out/manifest.json").stat().st_mtime_ns + 1
    os.utime(file, ns=(later, later))
    with pytest.raises(DataError, match=f"{file.name} of SOURCE changed after OUT .* was finished"):
        tokenize(str(tmp_path / "in"), tmp_path / "out", **SMALL)


@pytest.mark.parametrize("number", ["99999999999999999", "9" * 5000])
def test_a_vocabulary_that_no_memory_holds_is_refused(number: str, tmp_path: Path) -> None:
    write_texts(tmp_path / "in", 2)
    with pytest.raises(DataError, match="--tokenizer train:N needs a number N from"):
        tokenize(str(tmp_path / "in"), tmp_path / "out", **SMALL | {"tokenizer": f"train:{number}"})
