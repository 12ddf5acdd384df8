"""Packing sees every token once, keeps documents apart, and depends on its arguments alone."""

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

from lucid_lab.data import DataError
from lucid_lab.data.datasets import PackedTokens, _order
from lucid_lab.data.shards import HEADER

from .folders import write_tokens

# The lengths of the documents of each shard.
LENGTHS = st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=6), min_size=1, max_size=3)


def numbered(lengths: list[list[int]]) -> list[list[list[int]]]:
    """Documents without a repeated id: token t of document d is 100 * (d + 1) + t."""
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
            with pytest.raises(DataError, match=f"must have at least {T} tokens, got {total}"):
                PackedTokens(folder, T, seed=seed)
            return
        data = PackedTokens(folder, T, seed=seed, separate_documents=separate)
        items = [data[i] for i in range(len(data))]
    assert len(items) == total // T
    for item in items:
        assert set(item) == {"input_ids", "labels", "position_ids"}
        assert all(tensor.dtype == torch.int64 and tensor.shape == (T,) for tensor in item.values())
    stream = torch.cat([item["input_ids"] for item in items]).tolist()
    assert len(set(stream)) == len(stream)
    # The stream is a sequence of whole documents; only the last may be cut off.
    unseen = {document[0]: document for shard in shards for document in shard}
    position = 0
    while position < len(stream):
        document = unseen.pop(stream[position])
        assert stream[position : position + len(document)] == document[: len(stream) - position]
        position += len(document)
    assert sum(map(len, unseen.values())) <= total - len(stream)
    for item in items:
        ids, labels, positions = (item[name].tolist() for name in ("input_ids", "labels", "position_ids"))
        if not separate:
            assert labels == ids
            assert positions == list(range(T))
            continue
        for t in range(T):
            is_first = t == 0 or ids[t] % 100 == 0
            assert positions[t] == (0 if is_first else positions[t - 1] + 1)
            assert labels[t] == (-100 if is_first else ids[t])


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


def test_the_order_of_a_seed_never_changes() -> None:
    # Never change this order: a run resumed with a newer release of ours or of numpy must see the same data.
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
        # The shards have 40, 40 and 10 documents: the first half of a pass has about half of each.
        assert 10 < (first <= 40).sum() < 30
        assert 10 < ((first > 40) & (first <= 80)).sum() < 30
        assert 10 > (first > 80).sum() > 0


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_of_a_loader_read_the_same_items(start: str, folder: Path) -> None:
    data = PackedTokens(folder, 16)
    workers = 2 if start == "fork" else 1
    loader = DataLoader(data, batch_size=4, num_workers=workers, multiprocessing_context=start, drop_last=False)
    loaded = torch.cat([batch["input_ids"] for batch in loader])
    assert loaded.flatten().tolist() == stream(data)


def test_a_split_holds_its_own_documents(folder: Path) -> None:
    assert stream(PackedTokens(folder, 2, split="validation")) == [4, 1]
    with pytest.raises(DataError, match="split 'validation' must have at least 3 tokens, got 2"):
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


def test_reading_all_items_needs_little_memory(tmp_path: Path) -> None:
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
