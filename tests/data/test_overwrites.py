"""Overwrites: the label is the latest value of the key, found here by reading the writes one by one."""

import pytest
import torch

from lucid_attention.data.overwrites import IGNORED, overwrites

CASES = {
    "one key": (4, 1, 5),
    "few keys": (16, 3, 20),
    "as many writes as keys": (16, 8, 16),
    "many": (8, 16, 64),
    "one write": (2, 1, 2),
}


def made(case: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    batch, keys, length = CASES[case]
    return overwrites(batch, keys, length, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("case", CASES)
def test_the_answer_is_the_latest_value_of_the_key(case: str) -> None:
    batch, keys, length = CASES[case]
    inputs, labels = made(case)
    assert inputs.shape == (batch, length, 2)
    assert labels.shape == (batch, length)
    for tokens, answers in zip(inputs.tolist(), labels.tolist(), strict=True):
        memory: dict[int, int] = {}
        asked = []
        for position, (key, value) in enumerate(tokens):
            if position < length - keys:
                assert answers[position] == IGNORED
                assert 0 <= value < 64
                memory[key] = value
            else:
                assert value == 64
                assert answers[position] == memory[key]
                asked.append(key)
        assert len(memory) == keys
        assert sorted(asked) == sorted(memory)


def test_a_seed_gives_the_same_sequences_and_another_one_others() -> None:
    first, again, other = made("many"), made("many"), made("many", seed=1)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])


def test_keys_values_and_places_are_spread_evenly() -> None:
    inputs, labels = overwrites(2000, 4, 20, torch.Generator().manual_seed(0))
    keys = inputs[:, 16:, 0].flatten().bincount(minlength=64)
    assert keys.min() > 70  # 125 expected
    assert labels[:, 16:].flatten().bincount(minlength=64).min() > 70
    # The last write of the key that is asked first is as often for any of the four names that the context begins with.
    latest = (inputs[:, :16, 0] == inputs[:, 16, None, 0]).float()
    assert (latest.mean(0) - 0.25).abs().max() < 0.05


def test_counting_without_order_does_not_find_the_answer() -> None:
    inputs, labels = overwrites(500, 4, 64, torch.Generator().manual_seed(0))
    right = 0
    for tokens, answers in zip(inputs.tolist(), labels.tolist(), strict=True):
        key = tokens[60][0]
        values = [value for name, value in tokens[:60] if name == key]
        right += max(set(values), key=values.count) == answers[60]
    assert right / 500 < 0.25


@pytest.mark.parametrize(("keys", "length", "most"), [(0, 10, 9), (6, 10, 4), (65, 200, 64), (10, 10, 0)])
def test_numbers_of_keys_that_do_not_fit_are_refused(keys: int, length: int, most: int) -> None:
    with pytest.raises(ValueError, match=rf"keys must be 1 to .*, got {keys}"):
        overwrites(1, keys, length, torch.Generator())
    if most:
        inputs, _ = overwrites(1, min(most, length // 2), length, torch.Generator())
        assert len(inputs) == 1


def test_sizes_of_the_vocabularies_can_be_chosen() -> None:
    inputs, labels = overwrites(50, 3, 12, torch.Generator().manual_seed(0), values=5, key_tokens=4)
    assert inputs[..., 0].max() == 3
    assert inputs[:, 9:, 1].eq(5).all()
    assert inputs[:, :9, 1].max() == 4
    assert labels.max() == 4
