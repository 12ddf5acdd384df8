"""A file is written whole or not at all."""

from pathlib import Path

import pytest

from lucid_attention.base.files import write_whole


def test_a_write_creates_the_folder_and_leaves_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a"
    assert write_whole(path, "é") == path
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
