"""Packing: every token once, documents kept apart, everything a function of its arguments."""

import os
import pickle
import tempfile
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lucid_attention.data.datasets import PackedTokens, _order
from lucid_attention.data.errors import DataError
from lucid_attention.data.shards import HEADER

from .folders import write_tokens

# Lengths of documents, by shard.
LENGTHS = st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=6), min_size=1, max_size=3)


def numbered(lengths: list[list[int]]) -> list[list[list[int]]]:
    """Documents in which every token is another id: token t of document d is 100 * (d + 1) + t."""
    count = 0
    shards: list[list[list[int]]] = []
    for shard in lengths:
        shards.append([])
        for length in shard:
            count += 1
            shards[-1].append([100 * count + t for t in range(length)])
    return shards


@given(LENGTHS, st.integers(2, 9), st.integers(0, 3), st.booleans())
def test_items_hold_every_token_once_and_keep_documents_apart(
    lengths: list[list[int]], T: int, seed: int, separate: bool
) -> None:
    shards = numbered(lengths)
    total = sum(map(sum, lengths))
    with tempfile.TemporaryDirectory() as name:
        folder = write_tokens(Path(name), {"train": shards, "validation": [[[1, 2, 3]]]})
        if total < T:
            with pytest.raises(DataError, match=f"has {total} tokens, too few for one of {T}"):
                PackedTokens(folder, T, seed=seed)
            return
        data = PackedTokens(folder, T, seed=seed, separate_documents=separate)
        items = [data[i] for i in range(len(data))]
    assert len(items) == total // T
    for item in items:
        assert set(item) == {"input_ids", "labels", "position_ids"}
        assert all(each.dtype == torch.int64 and each.shape == (T,) for each in item.values())
    stream = torch.cat([item["input_ids"] for item in items]).tolist()
    assert len(set(stream)) == len(stream)
    # Document for document, whole and in order, but for the last.
    whole = {document[0]: document for shard in shards for document in shard}
    at = 0
    while at < len(stream):
        document = whole.pop(stream[at])
        assert stream[at : at + len(document)] == document[: len(stream) - at]
        at += len(document)
    assert sum(map(len, whole.values())) <= total - len(stream)
    for item in items:
        ids, labels, positions = (item[name].tolist() for name in ("input_ids", "labels", "position_ids"))
        if not separate:
            assert labels == ids
            assert positions == list(range(T))
            continue
        for t in range(T):
            new = t == 0 or ids[t] % 100 == 0
            assert positions[t] == (0 if new else positions[t - 1] + 1)
            assert labels[t] == (-100 if new else ids[t])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tokens(tmp_path / "t", {"train": numbered([[3] * 40, [5] * 40, [20] * 10]), "validation": [[[4, 1]]]})


def stream(data: PackedTokens) -> list[int]:
    return torch.cat([data[i]["input_ids"] for i in range(len(data))]).tolist()


def test_an_item_depends_on_its_arguments_alone(folder: Path) -> None:
    data = PackedTokens(folder, 16, seed=3)
    first = stream(data)
    assert stream(PackedTokens(folder, 16, seed=3)) == first
    assert torch.equal(PackedTokens(folder, 16, seed=3)[7]["input_ids"], torch.tensor(first[7 * 16 : 8 * 16]))
    assert stream(pickle.loads(pickle.dumps(data))) == first
    assert len(pickle.dumps(data)) < 1000
    assert torch.equal(data[-1]["input_ids"], data[len(data) - 1]["input_ids"])
    with pytest.raises(IndexError):
        data[len(data)]
    # The order of the items is the same at another length.
    assert stream(PackedTokens(folder, 8, seed=3))[: len(first)] == first


def test_the_order_is_the_one_that_was_written_down() -> None:
    # Fixed for ever: a run that is resumed with a newer release, ours or numpy's, reads on where it stopped.
    assert _order(10, 0).tolist() == [5, 7, 1, 4, 2, 8, 0, 6, 3, 9]
    assert _order(10, 1).tolist() == [8, 6, 7, 9, 0, 5, 1, 3, 2, 4]


def test_seeds_give_different_orders_that_mix_the_shards(folder: Path) -> None:
    orders = []
    for seed in range(4):
        ids = np.array(stream(PackedTokens(folder, 4, seed=seed)))
        orders.append(tuple(ids[ids % 100 == 0] // 100))
    assert len(set(orders)) == 4
    for order in orders:
        first = np.array(order[:45])
        # 40, 40 and 10 documents in three shards: the first half of a pass has about half of each.
        assert 10 < (first <= 40).sum() < 30
        assert 10 < ((first > 40) & (first <= 80)).sum() < 30
        assert 10 > (first > 80).sum() > 0


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_of_a_loader_read_the_same(start: str, folder: Path) -> None:
    data = PackedTokens(folder, 16)
    workers = 2 if start == "fork" else 1
    loader = DataLoader(data, batch_size=4, num_workers=workers, multiprocessing_context=start, drop_last=False)
    loaded = torch.cat([batch["input_ids"] for batch in loader])
    assert loaded.flatten().tolist() == stream(data)


def test_splits_are_read_apart(folder: Path) -> None:
    assert stream(PackedTokens(folder, 2, split="validation")) == [4, 1]
    with pytest.raises(DataError, match="split 'validation' has 2 tokens, too few for one of 3"):
        PackedTokens(folder, 3, split="validation")
    with pytest.raises(ValueError, match="split must be one of train, validation, got 'test'"):
        PackedTokens(folder, 4, split="test")


def test_wrong_arguments_and_foreign_tokens_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="sequence_length must be at least 2, got 1"):
        PackedTokens(folder, 1)
    with pytest.raises(DataError, match="another tokenizer"):
        PackedTokens(folder, 4, expect_tokenizer_hash="0" * 64)
    file = folder / "train-000000-000.bin"
    content = bytearray(file.read_bytes())
    content[HEADER] ^= 1
    file.write_bytes(content)
    PackedTokens(folder, 4)
    with pytest.raises(DataError, match="was altered"):
        PackedTokens(folder, 4, verify=True)


def test_reading_everything_does_not_take_the_memory_of_everything(tmp_path: Path) -> None:
    document = np.arange(50_000) % 60_000
    folder = write_tokens(tmp_path / "t", {"train": [[document] * 100] * 6})
    size = sum(file.stat().st_size for file in folder.glob("*.bin"))
    assert size == 60_000_000 + 6 * HEADER
    process = psutil.Process(os.getpid())
    data = PackedTokens(folder, 1 << 15)
    data[0]
    before = process.memory_info().rss
    seen = 0
    grown = 0
    for i in range(len(data)):
        seen += data[i]["input_ids"].numel()
        grown = max(grown, process.memory_info().rss - before)
    assert seen * 2 > 0.99 * 60_000_000
    assert grown < 15_000_000
