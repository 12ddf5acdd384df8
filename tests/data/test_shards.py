"""Opening a folder finds and names every shard that differs from the manifest."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lucid_lab.data import DataError, shards
from lucid_lab.data.datasets import PackedTokens
from lucid_lab.data.shards import HEADER, MANIFEST, VERIFIED, id_type, open_folder, read_ids
from lucid_lab.data.tokenizer import tokenizer_hash

from .folders import write_tokenizer, write_tokens

DOCUMENTS = [[[5, 6, 7, 1], [8, 1]], [[9, 10, 11, 12, 1]]]
SECOND = "train-000000-001"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tokens(tmp_path / "tokens", {"train": DOCUMENTS, "validation": [[[3, 1]]]})


def truncate(folder: Path) -> None:
    file = folder / f"{SECOND}.bin"
    file.write_bytes(file.read_bytes()[:-1])


def cut_to(size: int) -> Callable[[Path], None]:
    return lambda folder: (
        (folder / f"{SECOND}.bin").write_bytes((folder / f"{SECOND}.bin").read_bytes()[:size]) and None
    )


def lengthen(folder: Path) -> None:
    with (folder / f"{SECOND}.bin").open("ab") as file:
        file.write(b"\0\0")


def alter(folder: Path) -> None:
    file = folder / f"{SECOND}.bin"
    content = bytearray(file.read_bytes())
    content[HEADER + 3] ^= 1
    file.write_bytes(content)


def alter_ends(folder: Path) -> None:
    file = folder / "train-000000-000.ends.npy"
    content = bytearray(file.read_bytes())
    content[-16] ^= 1
    file.write_bytes(content)


def shorten_ends(folder: Path) -> None:
    file = folder / "train-000000-000.ends.npy"
    np.save(file, np.load(file)[1:])


def swap_ends(folder: Path) -> None:
    shutil.copy(folder / "train-000000-000.ends.npy", folder / f"{SECOND}.ends.npy")


def from_another_tokenizer(folder: Path) -> None:
    """Change the hash in the header; ids and size stay the same."""
    file = folder / f"{SECOND}.bin"
    content = bytearray(file.read_bytes())
    content[16:48] = bytes(32)
    file.write_bytes(content)


def write_manifest(folder: Path, **changes: object) -> None:
    file = folder / MANIFEST
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


# What is done to the folder, the message, and whether only `verify` finds the damage.
DAMAGE: dict[str, tuple[Callable[[Path], object], str, bool]] = {
    "truncated": (truncate, rf"{SECOND}.bin is truncated.*expected 74 bytes of <u2, got 73", False),
    "header cut": (cut_to(20), rf"{SECOND}.bin is truncated", False),
    "emptied": (cut_to(0), rf"{SECOND}.bin is truncated", False),
    "lengthened": (lengthen, rf"{SECOND}.bin is truncated or altered", False),
    "missing": (lambda folder: (folder / f"{SECOND}.bin").unlink(), rf"{SECOND}.bin is missing", False),
    "ends missing": (lambda folder: (folder / f"{SECOND}.ends.npy").unlink(), rf"{SECOND}.ends.npy is missing", False),
    "ends shortened": (shorten_ends, r"000.ends.npy must have 2 documents, got 1", False),
    "ends of another shard": (swap_ends, rf"{SECOND}.ends.npy does not belong to", False),
    "foreign": (from_another_tokenizer, rf"{SECOND}.bin is of another tokenizer: expected hash .*, got 000000", False),
    "another file": (
        lambda folder: (folder / f"{SECOND}.bin").write_bytes(b"x" * 74),
        rf"{SECOND}.bin is not a token shard",
        False,
    ),
    "tokenizer replaced": (lambda folder: write_tokenizer(folder, 290), r"tokenizer.json is not the one of", False),
    "tokenizer missing": (lambda folder: (folder / "tokenizer.json").unlink(), r"tokenizer.json is missing", False),
    "no manifest": (lambda folder: (folder / MANIFEST).unlink(), r"no manifest.json: .*lucid tokenize", False),
    "half a manifest": (lambda folder: (folder / MANIFEST).write_text('{"format'), r"manifest.json is damaged", False),
    "a manifest of noise": (
        lambda folder: (folder / MANIFEST).write_bytes(b"{" + bytes(range(128, 256)) * 20),
        r"manifest.json is damaged: .{1,300}$",
        False,
    ),
    "newer": (lambda folder: write_manifest(folder, version=9), r"format lucid-tokens 1, got lucid-tokens 9", False),
    "one bit": (alter, rf"{SECOND}.bin was altered: expected checksum", True),
    "one bit of the ends": (alter_ends, r"000.ends.npy was altered", True),
}


@pytest.mark.parametrize(("damage", "complaint", "needs_verify"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_found_and_named(
    damage: Callable[[Path], object], complaint: str, needs_verify: bool, folder: Path
) -> None:
    open_folder(folder, verify=True)
    damage(folder)
    with pytest.raises(DataError, match=complaint) as caught:
        open_folder(folder, verify=needs_verify)
    assert str(folder) in str(caught.value)


def test_a_verified_file_is_read_again_only_if_it_has_changed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    file_hash = shards.file_hash
    monkeypatch.setattr(shards, "file_hash", lambda path: read.append(path.name) or file_hash(path))
    open_folder(folder, verify=True)
    assert len(read) == 7  # Two files of three shards, and the tokenizer.
    open_folder(folder, verify=True)
    assert read[7:] == ["tokenizer.json"]
    (folder / f"{SECOND}.bin").touch()
    open_folder(folder, verify=True)
    assert read[8:] == ["tokenizer.json", f"{SECOND}.bin"]
    (folder / VERIFIED).write_text("[[[")
    open_folder(folder, verify=True)
    assert len(read) == 10 + 7


def test_ids_beyond_the_vocabulary_are_refused_when_they_are_read(tmp_path: Path) -> None:
    folder = write_tokens(tmp_path / "t", {"train": [[[5, 6]], [[7, 999]]]}, 300)
    data = PackedTokens(folder, 2)
    with pytest.raises(DataError, match=rf"{SECOND}.bin was altered: expected ids below 300, the vocabulary, got 999"):
        [data[i] for i in range(2)]


def test_ends_that_do_not_rise_are_refused(folder: Path) -> None:
    np.save(folder / "train-000000-000.ends.npy", np.array([9, 6]))
    with pytest.raises(DataError, match=r"000.ends.npy was altered: its ends must rise"):
        PackedTokens(folder, 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer": []},
        {"tokenizer": {"sha256": "00", "vocab_size": 300}},
        {"tokenizer": {"sha256": "00" * 32, "vocab_size": "many"}},
        {"dtype": "<f8"},
        {"shards": None},
        {"shards": [{"name": "../x"}]},
        {"shards": [["x"]]},
        {"shards": [[]]},
    ],
    ids=str,
)
def test_a_manifest_with_other_types_is_damaged(changes: dict[str, object], folder: Path) -> None:
    write_manifest(folder, **changes)
    with pytest.raises(DataError, match=r"manifest.json is damaged"):
        open_folder(folder)


def test_an_unfinished_folder_is_refused_with_what_to_do(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    (folder / "unfinished").mkdir()
    with pytest.raises(DataError, match="is not finished: run the same `lucid tokenize` again to resume it"):
        open_folder(folder)
    with pytest.raises(DataError, match="not a folder"):
        open_folder(folder / "nothing")


def test_tokens_of_another_tokenizer_than_expected_are_refused(folder: Path) -> None:
    own = tokenizer_hash(folder)
    assert open_folder(folder, expect_tokenizer_hash=own).tokenizer_hash == own
    with pytest.raises(DataError, match=r"another tokenizer: expected hash abc…, got"):
        open_folder(folder, expect_tokenizer_hash="abc")


@pytest.mark.parametrize(("vocabulary", "dtype"), [(65536, "<u2"), (65537, "<u4")])
def test_the_largest_id_fits(vocabulary: int, dtype: str, tmp_path: Path) -> None:
    assert id_type(vocabulary) == dtype
    opened = open_folder(write_tokens(tmp_path / "t", {"train": [[[7, vocabulary - 1, 1]]]}, vocabulary))
    assert read_ids(opened.path, opened.shards[0], opened.dtype, 1, 3).tolist() == [vocabulary - 1, 1]
