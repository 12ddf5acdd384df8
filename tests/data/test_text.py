"""Documents of every kind of source, in order; resuming in the middle; what cannot be read is refused by name."""

import gzip
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from lucid_lab.data import DataError
from lucid_lab.data.text import documents, find_files, open_text

DOCUMENTS = ["one\ntwo\n", "compressed", "a", "b\u2028c", "d", "e", "f"]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder with every format, a hidden file, and a name that is a pattern."""
    folder = tmp_path / "corpus" / "inner"
    folder.mkdir(parents=True)
    (folder / "a[1].txt").write_text("one\r\ntwo\n")
    (folder / "b.txt.gz").write_bytes(gzip.compress(b"compressed"))
    # The metadata of the lines have different types.
    (folder / "c.jsonl").write_text('{"text": "a", "id": 1}\n{"text": "b\\u2028c", "id": ["x"]}\n')
    (folder / "d.jsonl.zst").write_bytes(zstandard.compress(b'{"text": "d"}\n'))
    pq.write_table(pa.table({"text": ["e", "f"], "id": [1, 2]}), folder / "e.parquet")
    (folder / ".hidden").write_text("hidden")
    return tmp_path / "corpus"


def test_a_folder_gives_the_documents_of_all_formats(corpus: Path) -> None:
    assert list(documents(str(corpus))) == DOCUMENTS
    assert list(documents(f"{corpus}/**/*.jsonl*")) == DOCUMENTS[2:5]
    assert list(documents(str(corpus / "inner" / "a[1].txt"))) == DOCUMENTS[:1]


def test_a_stream_continues_after_any_document(corpus: Path) -> None:
    text = open_text(str(corpus))
    states = [json.loads(json.dumps(text.state_dict())) for _ in text]
    assert len(states) == len(DOCUMENTS)
    for index, state in enumerate(states):
        resumed = open_text(str(corpus))
        resumed.load_state_dict(state)
        assert [row["text"] for row in resumed] == DOCUMENTS[index + 1 :]


def test_a_seed_shuffles_the_files_the_same_way_every_time(tmp_path: Path) -> None:
    for i in range(20):
        (tmp_path / f"{i:02}.txt").write_text(str(i))
    orders = [list(documents(str(tmp_path), seed=seed)) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[2], key=int) == list(documents(str(tmp_path)))


def test_another_field_is_read_and_a_missing_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"content": "x"}\n')
    assert list(documents(str(tmp_path), field="content")) == ["x"]
    with pytest.raises(DataError, match=r"a JSON object with text for the key 'text', got .*--field"):
        list(documents(str(tmp_path)))


def test_bad_lines_are_refused_or_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"text": \n{"text": 3}\n{"text": "y"}\n')
    with pytest.raises(DataError, match="must be a JSON object"):
        list(documents(str(tmp_path)))
    assert list(documents(str(tmp_path), skip_bad=True)) == ["x", None, None, "y"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\xff\xfe", "cannot be read: .*'utf-8' codec"),
        ("a.txt.gz", gzip.compress(b"x" * 10_000)[:30], "cannot be read: Compressed file ended"),
        ("a.parquet", b"PAR1 cut", "cannot be read: .*Parquet"),
    ],
    ids=["not UTF-8", "cut gzip", "cut parquet"],
)
def test_damaged_files_are_refused(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(documents(str(tmp_path)))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing", "'missing' does not exist: expected a file, a folder"),
        ("@missing", "there is no such file"),
    ],
)
def test_a_source_that_does_not_exist_is_refused(source: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(documents(source))


def test_an_unreachable_hub_names_the_local_alternative() -> None:
    program = "from lucid_lab.data.text import documents; print(*documents('hf:allenai/c4'))"
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True
    )
    assert "SOURCE 'hf:allenai/c4' cannot be read" in done.stderr
    assert "Without the network, give a local file, folder or glob" in done.stderr


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """The address of a server that serves tmp_path."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(tmp_path))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_lists_name_files_and_addresses_and_those_of_the_network_addresses_only(tmp_path: Path, address: str) -> None:
    (tmp_path / "a.txt").write_text("local")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "remote"}\n'))
    (tmp_path / "list").write_text(f"# comment\n\na.txt\n{address}/b.jsonl.gz\n")
    (tmp_path / "remote").write_text(f"{address}/b.jsonl.gz\n")
    assert find_files(f"@{tmp_path}/list") == [str(tmp_path / "a.txt"), f"{address}/b.jsonl.gz"]
    program = f"from lucid_lab.data.text import documents; print(*documents('@{address}/remote'))"
    environment = os.environ | {"HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "remote", done.stderr
    for entry in ("a.txt", f"file://{tmp_path}/a.txt", f"{address}::file://{tmp_path}/a.txt", "/etc/hostname"):
        (tmp_path / "evil").write_text(f"{entry}\n")
        with pytest.raises(DataError, match=r"line 1: expected an address"):
            find_files(f"@{address}/evil")
