"""Lists of files, here or on a server; limits, seeds and long documents. The server is one on this machine."""

import functools
import gzip
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import zstandard

from lucid_lab.cli import main
from lucid_lab.data import DataError, remote
from lucid_lab.data.shards import open_folder, read_ends, read_ids
from lucid_lab.data.shuffling import BUFFER, ShuffledSource
from lucid_lab.data.sources import open_source
from lucid_lab.data.tokenize import tokenize
from lucid_lab.data.tokenizer import Encoder

from .folders import contents, text, write_tokenizer

NAMES = ["books/books-0000.json.gz", "cc/cc_en-0000.json.gz", "cc/cc_en-0001.json.gz", "wiki/wiki-0000.jsonl.zst"]


@pytest.fixture
def dolma(tmp_path: Path) -> dict[str, list[str]]:
    """Files in Dolma's layout under tmp_path/dolma, and their documents. A document is a line with more fields."""
    documents = {}
    for number, name in enumerate(NAMES):
        file = tmp_path / "dolma" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        documents[name] = [text(100 * number + i, words=20 + 30 * i) for i in range(12)]
        lines = "".join(
            json.dumps({"id": f"{name}-{i}", "text": content, "source": "x", "metadata": {}}) + "\n"
            for i, content in enumerate(documents[name])
        ).encode()
        packed = zstandard.ZstdCompressor().compress(lines) if file.suffix == ".zst" else gzip.compress(lines, mtime=0)
        file.write_bytes(packed)
    (tmp_path / "dolma" / "list.txt").write_text("# Dolma\n\n" + "\n".join(NAMES) + "\n")
    return documents


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder. The first `breaks` answers with a body break off after half of it."""

    breaks = 0
    asked: ClassVar[list[str]] = []

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        type(self).asked.append(self.path)
        content = Path(self.translate_path(self.path))
        if not content.is_file() or not type(self).breaks:
            super().do_GET()
            return
        type(self).breaks -= 1
        body = content.read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2])
        self.wfile.flush()
        self.connection.close()


@pytest.fixture
def address(tmp_path: Path, dolma: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Handler, "breaks", 0)
    monkeypatch.setattr(Handler, "asked", [])
    monkeypatch.setattr(remote, "WAITS", (0, 0, 0))
    handler = functools.partial(Handler, directory=str(tmp_path / "dolma"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        (tmp_path / "dolma" / "urls.txt").write_text("".join(f"{address}/{name}\n" for name in NAMES))
        yield address
        server.shutdown()
        thread.join()


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer"))
    return {"tokenizer": tokenizer, "workers": 1, "validation": 0.2, "shard_tokens": 700}


def stored(folder: Path) -> list[list[int]]:
    """All documents of a folder, in the order of its shards."""
    opened = open_folder(folder)
    documents = []
    for shard in opened.shards:
        ids = read_ids(folder, shard, opened.dtype, 0, shard.tokens)
        documents += [part.tolist() for part in np.split(ids, np.asarray(read_ends(folder, shard))[:-1])]
    return documents


def shards(folder: Path) -> dict[str, bytes]:
    return {name: content for name, content in contents(folder).items() if name.startswith(("train", "validation"))}


def test_a_list_of_compressed_files_is_read_in_its_order_and_counted(
    tmp_path: Path, dolma: dict[str, list[str]], options: dict[str, Any]
) -> None:
    manifest, _ = tokenize(f"@{tmp_path}/dolma/list.txt", tmp_path / "out", **options)
    encoder = Encoder.of(tmp_path / "out")
    expected = {name: [encoder(document) for document in dolma[name]] for name in NAMES}
    assert manifest["files"] == {
        name: {"documents": 12, "tokens": sum(map(len, documents))} for name, documents in expected.items()
    }
    assert list(manifest["files"]) == NAMES
    assert sorted(stored(tmp_path / "out")) == sorted(ids for documents in expected.values() for ids in documents)
    total = sum(counts["tokens"] for counts in manifest["splits"].values())
    assert total == sum(counts["tokens"] for counts in manifest["files"].values())


@pytest.mark.parametrize("breaks", [0, 3])
def test_a_server_gives_the_same_tokens_even_if_it_breaks_off(
    tmp_path: Path, address: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, breaks: int
) -> None:
    Handler.breaks = breaks
    manifest, _ = tokenize(f"@{address}/urls.txt", tmp_path / "remote", **options)
    assert Handler.breaks == 0
    assert list(manifest["files"]) == [f"{address}/{name}" for name in NAMES]
    # Each file is a part of its own: also those of one process.
    for name in NAMES:
        tokenize(str(tmp_path / "dolma" / name), tmp_path / Path(name).stem, **options | {"validation": 0})
    alone = [document for name in NAMES for document in stored(tmp_path / Path(name).stem)]
    assert sorted(stored(tmp_path / "remote")) == sorted(alone)


def test_a_limit_of_tokens_reads_no_file_beyond_it(tmp_path: Path, address: str, options: dict[str, Any]) -> None:
    manifest, _ = tokenize(f"@{address}/urls.txt", tmp_path / "out", **options, limit_tokens=300)
    assert list(manifest["files"]) == [f"{address}/{NAMES[0]}"]
    assert not any(name in path for name in NAMES[1:] for path in Handler.asked)


def test_an_address_that_is_not_there_is_named(tmp_path: Path, address: str, options: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"cc/none.json.gz cannot be read: FileNotFoundError.*run the same command"):
        tokenize(f"{address}/cc/none.json.gz", tmp_path / "out", **options)


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("limit", [1, 900, 2500, 10_000_000])
def test_a_limit_of_tokens_takes_the_first_documents_that_reach_it(
    tmp_path: Path, dolma: dict[str, list[str]], options: dict[str, Any], limit: int, seed: int | None
) -> None:
    source = f"@{tmp_path}/dolma/list.txt"
    manifest, _ = tokenize(source, tmp_path / "out", **options, limit_tokens=limit, seed=seed)
    whole, _ = tokenize(source, tmp_path / "whole", **options, seed=seed)
    tokens = sum(counts["tokens"] for counts in manifest["splits"].values())
    documents = stored(tmp_path / "out")
    if limit > 1_000_000:
        assert shards(tmp_path / "out") == shards(tmp_path / "whole")
        return
    assert limit <= tokens < limit + max(map(len, stored(tmp_path / "whole")))
    # Whole files, then a part of one: all in the order of the source.
    order = list(whole["files"])
    assert list(manifest["files"]) == order[: len(manifest["files"])]
    assert all(manifest["files"][name] == whole["files"][name] for name in list(manifest["files"])[:-1])
    assert len(documents) == sum(counts["documents"] for counts in manifest["files"].values())


def test_a_seed_changes_the_order_of_files_and_documents(
    tmp_path: Path, dolma: dict[str, list[str]], options: dict[str, Any]
) -> None:
    source = f"@{tmp_path}/dolma/list.txt"
    results = {}
    for seed in (None, 0, 1):
        manifest, _ = tokenize(source, tmp_path / f"{seed}", **options, seed=seed)
        results[seed] = (list(manifest["files"]), stored(tmp_path / f"{seed}"))
    assert results[0][0] != results[None][0] or results[1][0] != results[None][0]
    assert len({str(documents) for _, documents in results.values()}) == 3
    assert len({str(sorted(documents)) for _, documents in results.values()}) == 1
    tokenize(source, tmp_path / "again", **options, seed=1)
    assert contents(tmp_path / "again") == contents(tmp_path / "1")
    with pytest.raises(DataError, match="seed was 1, is 0"):
        tokenize(source, tmp_path / "again", **options, seed=0)


def test_short_documents_are_left_out_and_counted(
    tmp_path: Path, dolma: dict[str, list[str]], options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if name != "shard_tokens"]
    source = f"@{tmp_path}/dolma/list.txt"
    assert main(["tokenize", source, str(tmp_path / "out"), *words, "--min-document-tokens=400"]) == 0
    encoder = Encoder.of(tmp_path / "out")
    lengths = [len(encoder(document)) for documents in dolma.values() for document in documents]
    kept = sorted(length for length in lengths if length >= 400)
    assert 0 < len(kept) < len(lengths)
    assert sorted(map(len, stored(tmp_path / "out"))) == kept
    assert f"0 bad documents, {len(lengths) - len(kept)} short ones" in capsys.readouterr().out


def test_many_files_are_counted_by_folder(
    tmp_path: Path, dolma: dict[str, list[str]], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lucid_lab.data.tokenize.LISTED_FILES", 3)
    manifest, _ = tokenize(f"@{tmp_path}/dolma/list.txt", tmp_path / "out", **options)
    assert {name: counts["documents"] for name, counts in manifest["files"].items()} == {
        "books/": 12,
        "cc/": 24,
        "wiki/": 12,
    }


BAD_LISTS = {
    "none.gz\n": r"line 1: 'none.gz' is no file, and no address",
    "# only this\n": "the list holds no files",
    "wiki/wiki-0000.jsonl.zst\n\nwiki/wiki-0000.jsonl.zst": r"line 3: wiki/wiki-0000.jsonl.zst is listed twice",
    "https://example.org/a.parquet": "Parquet is read from this machine or the hub only",
}


@pytest.mark.parametrize("content", BAD_LISTS)
def test_a_bad_list_is_refused(tmp_path: Path, dolma: dict[str, list[str]], content: str) -> None:
    (tmp_path / "dolma/bad.txt").write_text(content)
    with pytest.raises(DataError, match=BAD_LISTS[content]):
        open_source(f"@{tmp_path}/dolma/bad.txt")


def test_a_configuration_is_for_the_hub(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="must be @LIST"):
        open_source(f"@{tmp_path}/none.txt")
    with pytest.raises(DataError, match=r"--config is for a data set of the hub \(hf:NAME\), got 'a'"):
        open_source("stdlib", config="a")
    with pytest.raises(DataError, match="--config must be that of SOURCE, 'a', got 'b'"):
        open_source("hf:x/y:a", config="b")


@pytest.mark.slow
def test_the_number_of_workers_does_not_change_a_byte_of_a_limited_list(
    tmp_path: Path, address: str, options: dict[str, Any]
) -> None:
    limits = {"limit_tokens": 2500, "seed": 5, "min_document_tokens": 100}
    for workers in (1, 3):
        tokenize(f"@{address}/urls.txt", tmp_path / f"{workers}", **options | limits | {"workers": workers})
    assert contents(tmp_path / "1") == contents(tmp_path / "3")


def test_a_part_that_its_own_limit_cut_is_cut_again_where_the_whole_ends(
    tmp_path: Path, address: str, options: dict[str, Any]
) -> None:
    small, large = [text(seed) for seed in range(3)], [text(seed) for seed in range(10, 40)]
    for name, documents in (("small", small), ("large", large)):
        lines = "".join(json.dumps({"text": document}) + "\n" for document in documents)
        (tmp_path / "dolma" / f"{name}.jsonl").write_text(lines)
    (tmp_path / "dolma/two.txt").write_text(f"{address}/small.jsonl\n{address}/large.jsonl\n")
    encoder = Encoder.of(Path(options["tokenizer"]))
    lengths = [len(encoder(document)) for document in small + large]
    limit = sum(lengths[:10])
    manifest, _ = tokenize(f"@{address}/two.txt", tmp_path / "out", **options, limit_tokens=limit)
    assert sorted(map(len, stored(tmp_path / "out"))) == sorted(lengths[:10])
    assert [counts["documents"] for counts in manifest["files"].values()] == [3, 7]


def test_a_file_that_breaks_off_is_read_on_where_it_broke_off(tmp_path: Path, address: str) -> None:
    body = b"".join(number.to_bytes(4, "big") for number in range(3_500_000))
    (tmp_path / "dolma/large.txt").write_bytes(body)
    Handler.breaks = 2
    with remote.RemoteFile(f"{address}/large.txt").open("rb") as stream:
        # Not the contents themselves, which pytest would show.
        assert hash(stream.read()) == hash(body)
    assert Handler.breaks == 0


@pytest.mark.parametrize("count", [5, BUFFER, 3 * BUFFER])
def test_a_seed_shuffles_the_documents_of_a_file(tmp_path: Path, count: int) -> None:
    texts = [str(number) for number in range(count)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": content}) + "\n" for content in texts))
    orders = []
    for seed in (0, 0, 1):
        source = ShuffledSource(open_source(str(tmp_path / "a.jsonl")), seed)
        (part,) = source.parts(1 << 30)
        orders.append([document.text for document in source.documents(part)])
        assert sorted(orders[-1]) == sorted(texts)
    assert orders[0] == orders[1]
    assert texts not in orders
    assert orders[1] != orders[2]
