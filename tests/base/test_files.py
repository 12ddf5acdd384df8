"""A file is written whole or not at all, and read with checks."""

import json
import os
from pathlib import Path

import pytest

from lucid_attention.files import UnreadableFile, finish_folder, read_json, write_record, write_whole


def test_a_write_creates_the_folder_and_leaves_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a"
    assert write_whole(path, "é\udcff") == path
    assert path.read_text() == "é\\udcff"
    assert write_whole(path, b"bytes") == path
    assert path.read_bytes() == b"bytes"
    assert list(path.parent.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    write_whole(path, b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_gets_its_name_when_all_of_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, folder = tmp_path / "new", tmp_path / "folder"
    write_whole(written / "inner" / "a", b"new")
    write_whole(folder / "b", b"old")
    synced = []

    def fsync(handle: int) -> None:
        synced.append((os.readlink(f"/proc/self/fd/{handle}"), (folder / "b").exists()))

    monkeypatch.setattr("os.fsync", fsync)
    finish_folder(written, folder)
    assert sorted(synced) == [
        (str(tmp_path), False),
        (str(written), True),
        (str(written / "inner"), True),
        (str(written / "inner" / "a"), True),
    ]
    assert [path.name for path in folder.rglob("*")] == ["inner", "a"]
    assert not written.exists()


BAD_JSON = {
    "half": (b'{"a', dict, "not JSON: Unterminated string"),
    "a list": (b"[1]", dict, "expected an object, got a list"),
    "a number": (b"3", list, "expected a list, got a number"),
    "deep": (b"[" * 200_000, list, "nested too deeply"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), dict, "expected text in UTF-8, got the byte 0xff at 0"),
    "a number without end": (b"9" * 5000, object, "not JSON: Exceeds the limit"),
}


@pytest.mark.parametrize(("content", "expected", "message"), BAD_JSON.values(), ids=BAD_JSON)
def test_bad_json_is_named_with_what_was_expected(content: bytes, expected: type, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(UnreadableFile) as raised:
        read_json(path, expected)
    assert str(raised.value).startswith(f"{path}: ")
    assert message in str(raised.value)


def test_a_device_or_pipe_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    # A pipe: a test that failed with a device would break the machine.
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="not a regular file"):
        write_whole(pipe, "text")
    assert pipe.is_fifo()
    # Reading it would wait forever.
    with pytest.raises(UnreadableFile, match="expected a file, got a pipe"):
        read_json(pipe)


def test_a_record_comes_back_as_it_was_written_and_an_altered_one_is_named(tmp_path: Path) -> None:
    content = {"mean": 0.1, "nothing": None, "names": ("a", "ü"), "by_number": {10: 1, 9: float("inf")}}
    file = write_record(tmp_path / "record.json", content)
    as_json = json.loads(json.dumps(content))
    assert read_json(file) == as_json
    text = file.read_text()
    assert list(json.loads(text))[:-1] == list(content)
    for old, new in (("0.1", "0.2"), ("null", "0"), ("Infinity", "7"), ('"a"', '"b"')):
        file.write_text(text.replace(old, new))
        with pytest.raises(UnreadableFile, match=r"record\.json: was altered"):
            read_json(file)
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_record(file, content, allow_nan=False)
