"""`lucid tokenize`: the folder it writes, and its settings, limits and workers."""

import gzip
import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from lucid_lab import cli
from lucid_lab.data import DataError
from lucid_lab.data.datasets import PackedTokens
from lucid_lab.data.encoding import is_validation
from lucid_lab.data.shards import open_folder, read_ends, read_ids
from lucid_lab.data.tokenize import tokenize
from lucid_lab.data.tokenizer import tokenizer_hash
from lucid_lab.locks import FolderInUse, locked

from .folders import contents, text, write_texts, write_tokenizer

SMALL: dict[str, Any] = {"tokenizer": "train:300", "workers": 1, "validation": 0.2, "shard_tokens": 1000}


def documents(folder: Path, split: str) -> list[str]:
    """The texts of a folder, decoded with its own tokenizer."""
    opened = open_folder(folder, verify=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = []
    for shard in opened.shards:
        if shard.split == split:
            for start, stop in pairwise([0, *read_ends(folder, shard)]):
                ids = read_ids(folder, shard, opened.dtype, start, stop).tolist()
                assert ids[-1] == tokenizer.eos_token_id
                texts.append(tokenizer.decode(ids[:-1]))
    return texts


def test_every_document_is_in_one_split_whole_and_ended(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "in", 40)
    manifest, written = tokenize(str(tmp_path / "in"), tmp_path / "out", **SMALL)
    assert written
    train, validation = documents(tmp_path / "out", "train"), documents(tmp_path / "out", "validation")
    assert train == [content for content in texts if not is_validation(content, 0.2)]
    assert validation == [content for content in texts if is_validation(content, 0.2)]
    assert 2 < len(validation) < 16
    assert manifest["splits"]["train"]["documents"] == len(train)
    assert manifest["text_bytes"] == sum(len(content.encode()) for content in texts)
    assert manifest["tokenizer"]["sha256"] == tokenizer_hash(tmp_path / "out")
    assert max(shard["tokens"] for shard in manifest["shards"]) <= 1000
    assert len(manifest["shards"]) > 10
    assert not (tmp_path / "out/unfinished").exists()
    assert not list((tmp_path / "out").glob("*.partial"))
    data = PackedTokens(tmp_path / "out", 64)
    assert len(data) == manifest["splits"]["train"]["tokens"] // 64


def test_the_number_of_workers_does_not_change_a_byte(tmp_path: Path) -> None:
    write_texts(tmp_path / "in", 40)
    (tmp_path / "in/b.jsonl").write_text("".join(json.dumps({"text": text(seed)}) + "\n" for seed in range(40, 60)))
    tokenize(str(tmp_path / "in"), tmp_path / "one", **SMALL)
    tokenize(str(tmp_path / "in"), tmp_path / "two", **SMALL | {"workers": 2})
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_an_error_in_a_worker_is_reported_and_the_run_can_be_resumed(tmp_path: Path) -> None:
    write_texts(tmp_path / "in", 20)
    tokenize(str(tmp_path / "in"), tmp_path / "whole", **SMALL)
    good = (tmp_path / "in/a013.txt").read_bytes()
    (tmp_path / "in/a013.txt").write_bytes(b"\0" * len(good))
    options = SMALL | {"tokenizer": str(tmp_path / "whole")}
    with pytest.raises(DataError, match=r"a013.txt is binary"):
        tokenize(str(tmp_path / "in"), tmp_path / "out", **options | {"workers": 2})
    (tmp_path / "in/a013.txt").write_bytes(good)
    tokenize(str(tmp_path / "in"), tmp_path / "out", **options)
    assert documents(tmp_path / "out", "train") == documents(tmp_path / "whole", "train")
    assert not list((tmp_path / "out").glob("*.partial"))


def test_a_second_run_has_nothing_to_do_and_other_settings_are_refused(tmp_path: Path) -> None:
    write_texts(tmp_path / "in", 10)
    out = tmp_path / "out"
    first, _ = tokenize(str(tmp_path / "in"), out, **SMALL)
    before = contents(out)
    assert tokenize(str(tmp_path / "in" / "..") + "/in", out, **SMALL | {"workers": 2}) == (first, False)
    with pytest.raises(DataError, match=r"validation was 0.2, is 0.1\): choose another OUT"):
        tokenize(str(tmp_path / "in"), out, **SMALL | {"validation": 0.1})
    with pytest.raises(DataError, match=r"tokenizer was train:300, is train:301"):
        tokenize(str(tmp_path / "in"), out, **SMALL | {"tokenizer": "train:301"})
    (tmp_path / "in/a003.txt").write_text("shorter")
    with pytest.raises(DataError, match=r"source.bytes was \d+, is \d+"):
        tokenize(str(tmp_path / "in"), out, **SMALL)
    (out / "verified.json").unlink()
    assert contents(out) == before


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "train-000000-000.bin", "train-000000-000.ends.npy", "manifest.json"]
)
def test_a_finished_folder_that_was_altered_is_not_called_finished(name: str, tmp_path: Path) -> None:
    write_texts(tmp_path / "in", 10)
    out = tmp_path / "out"
    tokenize(str(tmp_path / "in"), out, **SMALL)
    content = (out / name).read_bytes()
    # In the manifest, a digit of a count.
    at = content.index(b'"tokens": ') + 10 if name == "manifest.json" else len(content) - 2
    (out / name).write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    with pytest.raises(DataError, match=name):
        tokenize(str(tmp_path / "in"), out, **SMALL)


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    write_texts(tmp_path / "in", 3)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.tex").write_text("precious")
    with pytest.raises(DataError, match="OUT must be new, an empty folder"):
        tokenize(str(tmp_path / "in"), tmp_path / "out", **SMALL)
    with pytest.raises(DataError, match="OUT must not lie inside SOURCE"):
        tokenize(str(tmp_path / "in"), tmp_path / "in/out", **SMALL)
    assert contents(tmp_path / "out") == {"thesis.tex": b"precious"}


def test_two_runs_do_not_write_the_same_folder(tmp_path: Path) -> None:
    write_texts(tmp_path / "in", 3)
    with (
        locked(tmp_path / "out/unfinished", "lucid tokenize"),
        pytest.raises(FolderInUse, match="is being written by another `lucid tokenize`"),
    ):
        tokenize(str(tmp_path / "in"), tmp_path / "out", **SMALL)
    tokenize(str(tmp_path / "in"), tmp_path / "out", **SMALL)


@pytest.mark.parametrize("limit", [1, 7, 19, 20, 21, 100])
def test_a_limit_takes_the_first_documents(limit: int, tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "in", 20)
    tokenizer = str(write_tokenizer(tmp_path / "t"))
    tokenize(
        str(tmp_path / "in"), tmp_path / "out", **SMALL | {"limit": limit, "tokenizer": tokenizer, "validation": 0}
    )
    assert documents(tmp_path / "out", "train") == texts[:limit]
    listed = {shard["name"] for shard in json.loads((tmp_path / "out/manifest.json").read_text())["shards"]}
    assert {file.name.partition(".")[0] for file in (tmp_path / "out").glob("*.bin")} == listed


def test_a_limit_inside_a_large_part_stops_there(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "in", 20)
    options = SMALL | {"limit": 7, "validation": 0, "shard_tokens": 10_000_000}
    tokenize(str(tmp_path / "in"), tmp_path / "out", **options)
    assert documents(tmp_path / "out", "train") == texts[:7]


def test_empty_documents_are_left_out_and_counted(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "in", 4)
    (tmp_path / "in/a0005.txt").write_text("")
    (tmp_path / "in/a0006.txt").write_text(" \n\t\n")
    (tmp_path / "in/b.jsonl").write_text('{"text": ""}\n\n{oops\n')
    manifest, _ = tokenize(str(tmp_path / "in"), tmp_path / "out", **SMALL | {"skip_bad": True, "validation": 0})
    assert manifest["skipped"] == {"empty": 3, "bad": 1, "short": 0}
    assert sorted(documents(tmp_path / "out", "train")) == sorted(texts)
    (tmp_path / "void").mkdir()
    (tmp_path / "void/a.txt").write_text("\n")
    with pytest.raises(DataError, match="has no text: 1 empty documents, 0 bad ones"):
        tokenize(str(tmp_path / "void"), tmp_path / "nothing", **SMALL)


def test_a_shard_of_another_tokenizer_is_named(tmp_path: Path) -> None:
    write_texts(tmp_path / "in", 10)
    for size in (290, 300):
        tokenize(str(tmp_path / "in"), tmp_path / f"{size}", **SMALL | {"tokenizer": f"train:{size}"})
    shutil.copy(tmp_path / "290/train-000001-000.bin", tmp_path / "300/train-000001-000.bin")
    with pytest.raises(DataError, match=r"300/train-000001-000.bin is of another tokenizer"):
        PackedTokens(tmp_path / "300", 16)


def test_a_large_vocabulary_takes_four_bytes(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "t")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"].append(content["added_tokens"][0] | {"id": 70_000, "content": "<|far|>"})
    content["model"]["vocab"]["<|far|>"] = 70_000
    (folder / "tokenizer.json").write_text(json.dumps(content))
    texts = write_texts(tmp_path / "in", 3)
    manifest, _ = tokenize(
        str(tmp_path / "in"), tmp_path / "out", **SMALL | {"tokenizer": str(folder), "validation": 0}
    )
    assert (manifest["dtype"], manifest["tokenizer"]["vocab_size"]) == ("<u4", 70_001)
    assert documents(tmp_path / "out", "train") == texts


def test_about_the_asked_share_of_documents_is_held_out_by_content() -> None:
    held = np.array([is_validation(text(seed, 3), 0.25) for seed in range(2000)])
    assert 0.2 < held.mean() < 0.3
    assert not any(is_validation(text(seed, 3), 0) for seed in range(50))
    more = np.array([is_validation(text(seed, 3), 0.5) for seed in range(2000)])
    assert (more >= held).all()


def run(*arguments: str) -> int:
    return cli.main(["tokenize", *arguments])


def test_the_command_prints_what_it_wrote_or_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_texts(tmp_path / "in", 5)
    (tmp_path / "in/z.jsonl.gz").write_bytes(gzip.compress(b'{"text": "zipped"}\n'))
    arguments = (str(tmp_path / "in"), str(tmp_path / "out"), "--tokenizer=train:300", "--workers=1", "--validation=0")
    assert run(*arguments) == 0
    printed = capsys.readouterr()
    assert "tokens in 6 documents" in printed.out
    assert not printed.err
    assert run(*arguments) == 0
    assert "finished before, nothing to do" in capsys.readouterr().out
    for options, complaint in (
        (("--validation", "1"), "--validation must be a share"),
        (("--workers", "0"), "--workers must be at least 1"),
        (("--shard-tokens", "1"), "--shard-tokens must be at least 100_000, got 1"),
        (("--limit", "0"), "--limit must be at least 1"),
        (("--tokenizer", "train:1"), "train:N needs a number"),
    ):
        assert run(*arguments, *options) == 1
        printed = capsys.readouterr()
        assert printed.err.startswith("lucid tokenize: error: ")
        assert complaint in printed.err
        assert len(printed.err.splitlines()) == 1


def test_a_full_disk_is_reported_in_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_texts(tmp_path / "in", 5)
    arguments = (str(tmp_path / "in"), str(tmp_path / "out"), "--tokenizer", "train:300", "--workers", "1")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        assert run(*arguments) == 1
    assert (
        "the disk is full: make room, or choose a place on another disk. Finished parts are kept"
        in capsys.readouterr().err
    )
    assert run(*arguments) == 0
