"""Documents of every kind of file are read back unchanged, and an error names file and place."""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from lucid_lab.data import DataError, readers
from lucid_lab.data.readers import require
from lucid_lab.data.sources import open_source

from .folders import text, write_texts

TEXTS = [text(seed, 5 + 40 * seed) for seed in range(12)]


def read_all(name: str | Path, largest: int = 1 << 30, **options: str) -> list[str]:
    source = open_source(str(name), **options)
    return [document.text for part in source.parts(largest) for document in source.documents(part)]


def lines(texts: list[str], field: str = "text") -> bytes:
    return b"".join(json.dumps({"id": i, field: content}).encode() + b"\n" for i, content in enumerate(texts))


def write_parquet(path: Path, texts: list[str | None], column: str = "text", rows: int = 3) -> None:
    pq.write_table(pa.table({column: pa.array(texts, pa.string())}), path, row_group_size=rows)


def two_frames(content: bytes) -> bytes:
    half = len(content) // 2
    return b"".join(zstandard.ZstdCompressor().compress(part) for part in (content[:half], content[half:]))


PACKERS: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zst": two_frames}


@pytest.mark.parametrize("packed", PACKERS)
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_json_lines_are_read_back(suffix: str, packed: str, tmp_path: Path) -> None:
    file = tmp_path / f"a{suffix}{packed}"
    file.write_bytes(PACKERS[packed](lines(TEXTS)))
    assert read_all(file) == TEXTS
    assert read_all(tmp_path) == TEXTS


@pytest.mark.parametrize("packed", PACKERS)
def test_text_files_are_read_back(packed: str, tmp_path: Path) -> None:
    for number, content in enumerate(TEXTS):
        (tmp_path / f"{number:02d}.md{packed}").write_bytes(PACKERS[packed](content.encode()))
    (tmp_path / ".hidden").write_bytes(b"\0")
    assert read_all(tmp_path) == TEXTS
    assert read_all(tmp_path / f"*.md{packed}") == TEXTS
    assert read_all(tmp_path, largest=2000) == TEXTS


def test_parquet_is_read_back(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", list(TEXTS), "body")
    assert read_all(tmp_path, field="body") == TEXTS
    source = open_source(str(tmp_path), field="body")
    assert len(source.parts(1)) == 4  # one per row group


@pytest.mark.parametrize("largest", [1, 7, 100, 333, 5000])
def test_a_file_cut_into_ranges_gives_every_line_once(largest: int, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"\n" + lines(TEXTS).rstrip(b"\n"))
    assert read_all(file, largest) == TEXTS
    parts = open_source(str(file)).parts(largest)
    assert len(parts) == -(-file.stat().st_size // largest)
    assert sum(part.size for part in parts) == file.stat().st_size


def test_sizes_of_documents_add_up_to_the_source(tmp_path: Path) -> None:
    write_texts(tmp_path / "in", 4)
    (tmp_path / "in/b.jsonl").write_bytes(lines(TEXTS))
    (tmp_path / "in/c.jsonl.gz").write_bytes(gzip.compress(lines(TEXTS)))
    source = open_source(str(tmp_path / "in"))
    parts = source.parts(1000)
    read = sum(document.size for part in parts for document in source.documents(part))
    assert read == sum(part.size for part in parts) == source.describe()["bytes"]


def test_the_standard_library_is_a_corpus() -> None:
    source = open_source("stdlib")
    description = source.describe()
    assert description["files"] > 300
    assert description["bytes"] > 4_000_000
    first = next(iter(source.documents(source.parts(1 << 30)[0])))
    assert "import" in first.text


def test_the_hub_is_read_with_datasets(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_bytes(lines([f"{name}: {content}" for content in TEXTS]))
    source = open_source(f"hf:{tmp_path}")
    assert [len(list(source.documents(part))) for part in source.parts(1)] == [12, 12]
    assert sorted(read_all(f"hf:{tmp_path}")) == sorted(f"{name}: {content}" for name in "ab" for content in TEXTS)
    with pytest.raises(DataError, match=r"no column 'body', got 'id', 'text'.*--field"):
        read_all(f"hf:{tmp_path}", field="body")


def bad_gzip(path: Path) -> None:
    path.write_bytes(gzip.compress(lines(TEXTS))[:-20])


def bad_zstd(path: Path) -> None:
    path.write_bytes(two_frames(lines(TEXTS * 50))[:-50])


# Name of the file, its content, and the message without the name.
BAD: dict[str, tuple[str, bytes | Callable[[Path], None], str]] = {
    "binary": ("a.txt", b"abc\0def", r"binary, not text: zero byte at offset 3"),
    "picture in a folder": ("a.png", b"\x89PNG\r\n\x1a\n\0\0", r"binary"),
    "latin-1": ("a.txt", "größer".encode("latin-1"), r"not UTF-8: byte 0xf6 at offset 2"),
    "utf-16": ("a.txt", "text".encode("utf-16"), r"UTF-16"),
    "latin-1 in the second line": ("a.jsonl", lines(["x"]) + b'{"text": "\xff"}\n', r"line 2: .* 0xff at offset 33"),
    "not JSON": ("a.jsonl", lines(["x", "y"]) + b"{'text': 3}\n", r"line 3: not JSON: .* column 2"),
    "a long number": ("a.jsonl", b'{"text": "a", "n": %s}' % (b"1" * 5000), r"line 1: not JSON.*digits"),
    "deep": ("a.jsonl", lines(["x"]) + b"[" * 100_000, r"line 2: not JSON: nested too deeply"),
    "a list": ("a.json", b"[1, 2]\n", r"line 1: expected one JSON object a line, got list"),
    "another field": ("a.jsonl", lines(["x"], "body"), r"line 1: no field 'text', got 'id', 'body': .*--field"),
    "a number": ("a.jsonl", b'{"text": 3}\n', r"line 1: .*'text' must be a string, got int"),
    "half a pair": ("a.jsonl", b'{"text": "ab\\ud800"}\n', r"line 1: .*surrogate pair at character 2"),
    "truncated gzip": ("a.jsonl.gz", bad_gzip, r"damaged"),
    "no gzip": ("a.txt.gz", b"plain text", r"damaged"),
    "truncated zstd": ("a.jsonl.zst", bad_zstd, r"damaged: the file ends before"),
    "no zstd": ("a.txt.zst", b"plain text", r"damaged"),
    "empty parquet": ("a.parquet", lambda path: write_parquet(path, []), r"is empty: it has no rows"),
    "no parquet": ("a.parquet", b"plain text", r"not a Parquet file"),
    "null": ("a.parquet", lambda path: write_parquet(path, ["x", None]), r"row 2: .*must be a string, got NoneType"),
    "another column": ("a.parquet", lambda path: write_parquet(path, ["x"], "body"), r"no column 'text', got 'body'"),
}


@pytest.mark.parametrize(("name", "content", "complaint"), BAD.values(), ids=BAD)
def test_bad_data_is_refused_with_its_place(
    name: str, content: bytes | Callable[[Path], None], complaint: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    content(file) if callable(content) else file.write_bytes(content)
    with pytest.raises(DataError, match=complaint) as caught:
        read_all(tmp_path)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_line_numbers_count_from_the_start_of_the_file_in_every_range(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(lines(TEXTS) + b"{}\n" + lines(TEXTS))
    with pytest.raises(DataError, match=f"a.jsonl, line {len(TEXTS) + 1}: no field"):
        read_all(file, 100)


def test_bad_documents_can_be_skipped_and_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(["one"]) + b"{oops\n" + lines(["two"]) + b'{"text": 1}\n')
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "c.txt").write_bytes(b"three")
    source = open_source(str(tmp_path))
    errors: list[DataError] = []
    texts = [document.text for part in source.parts(1 << 30) for document in source.documents(part, errors.append)]
    assert texts == ["one", "two", "three"]
    assert len(errors) == 3


def test_a_source_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="folder without files"):
        open_source(str(tmp_path))
    with pytest.raises(DataError, match="matches no file"):
        open_source(str(tmp_path / "*.txt"))
    with pytest.raises(DataError, match="does not exist: expected a file, a folder, a glob"):
        open_source(str(tmp_path / "nothing"))
    with pytest.raises(DataError, match="hf:NAME"):
        open_source("hf:")


def test_parts_are_the_same_every_time_and_cover_every_file_once(tmp_path: Path) -> None:
    write_texts(tmp_path, 30)
    parts = open_source(str(tmp_path)).parts(4000)
    assert parts == open_source(str(tmp_path)).parts(4000)
    assert len(parts) > 5
    assert [part.number for part in parts] == list(range(len(parts)))
    names = [piece.path.name for part in parts for piece in part.pieces]
    assert names == [f"a{number:03d}.txt" for number in range(30)]
    assert max(part.size for part in parts) <= 4000


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone.txt cannot be read"):
        list(readers.read(readers.Piece(tmp_path / "gone.txt"), "text"))


def test_a_missing_package_is_named_with_the_extra() -> None:
    with pytest.raises(DataError, match=r"reading tea needs the package 'tea_leaves'.*lucid-attention\[train\]"):
        require("tea_leaves", "reading tea")


HUB = """
import sys
from lucid_lab.data import DataError
from lucid_lab.data.sources import open_source
try:
    open_source("hf:allenai/dolma")
except DataError as error:
    print(error)
"""


def test_an_unreachable_hub_gives_one_message_that_names_the_alternative() -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", HUB], capture_output=True, text=True, env=environment, check=True)
    (line,) = done.stdout.splitlines()
    assert "allenai/dolma" in line
    assert "local file, folder or glob" in line
    assert "stdlib" in line
    assert not done.stderr
