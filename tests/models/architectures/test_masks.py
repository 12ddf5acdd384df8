"""Masks of Transformers and of its users, read into the form that the operators take."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    or_masks,
    packed_sequence_mask_function,
    sliding_window_causal_mask_function,
)

from lucid_attention.models import masks
from lucid_attention.models.masks import Visibility, dense_mask, lucid_mask, read_mask
from tests.models.architectures.cases import lucid_model, relative_error, tokens

CAUSAL = torch.ones(12, 12, dtype=torch.bool).tril()
DOCUMENT = torch.tensor([[0] * 5 + [1] * 4 + [2] * 3, [0] * 9 + [1, 2, 2]])
KEEP = torch.tensor([[0] * 3 + [1] * 9, [1] * 12]).bool()


def padding_mask():
    return CAUSAL & KEEP[:, None, None]


def packing_mask():
    return CAUSAL & (DOCUMENT[:, None, None] == DOCUMENT[:, None, :, None])


def additive(mask, lowest):
    return torch.zeros(mask.shape).masked_fill(~mask, lowest)


LOWEST = {"finfo.min": torch.finfo(torch.float32).min, "-inf": float("-inf"), "-1e9": -1e9, "half": -65504.0}


@pytest.mark.parametrize(
    ("name", "form"),
    # Gemma 2 uses eager attention in its sliding layers, where a row of −∞ gives NaN.
    [*(("llama", form) for form in ("bool", *LOWEST)), *(("gemma2", form) for form in ("bool", "finfo.min", "half"))],
)
@torch.no_grad()
@pytest.mark.shows("4-D causal masks", model="drop-in")
def test_a_dense_mask_of_padding_means_the_same_as_a_flat_one(name, form):
    model, ids = lucid_model(name, layers=[1]), tokens(2)
    mask = padding_mask() if form == "bool" else additive(padding_mask(), LOWEST[form])
    if name == "gemma2":
        # Sliding layers take a dense mask unchanged, without their window: make the window longer than the text.
        model.config.sliding_window = 100
        for module in model.modules():
            if getattr(module, "sliding_window", None) is not None:
                module.sliding_window = 100
    for use_cache in (False, True):
        flat = model(ids, attention_mask=KEEP.long(), use_cache=use_cache).logits
        found = model(ids, attention_mask=mask, use_cache=use_cache).logits
        assert relative_error(found[KEEP], flat[KEEP]) < 1e-5
        assert relative_error(model(ids).logits[KEEP], flat[KEEP]) > 0.01


@pytest.mark.parametrize("form", ["bool", *LOWEST])
@torch.no_grad()
def test_a_dense_mask_of_documents_means_the_same_as_positions(form):
    model, ids = lucid_model("llama"), tokens(2)
    mask = packing_mask() if form == "bool" else additive(packing_mask(), LOWEST[form])
    positions = torch.tensor([[*range(5), *range(4), *range(3)], [*range(9), 0, 0, 1]])
    flat = model(ids, position_ids=positions, use_cache=False).logits
    for use_cache in (False, True):
        found = model(ids, attention_mask=mask, position_ids=positions, use_cache=use_cache).logits
        assert relative_error(found, flat) < 1e-5


@torch.no_grad()
def test_a_dense_mask_may_hide_the_rows_of_padding_as_well():
    model, ids = lucid_model("llama"), tokens(2)
    for keep in (KEEP, KEEP.flip(1)):
        mask = CAUSAL & keep[:, None, None] & keep[:, None, :, None]
        flat = model(ids, attention_mask=keep.long()).logits
        assert relative_error(model(ids, attention_mask=mask).logits[keep], flat[keep]) < 1e-5


@pytest.mark.parametrize("lowest", LOWEST.values(), ids=LOWEST)
@torch.no_grad()
def test_a_dense_mask_of_one_row_decodes_as_the_flat_one_does(lowest):
    model, ids = lucid_model("llama"), tokens(2)
    logits = []
    for dense in (False, True):
        cache = DynamicCache(config=model.config)
        model(ids[:, :11], attention_mask=KEEP[:, :11].long(), past_key_values=cache)
        mask = additive(KEEP[:, None, None], lowest) if dense else KEEP.long()
        logits.append(model(ids[:, 11:], attention_mask=mask, past_key_values=cache).logits)
    assert relative_error(logits[1], logits[0]) < 1e-5


def bidirectional_prefix():
    return (CAUSAL | (torch.arange(12) < 4)).expand(2, 1, 12, 12)


def window():
    return (CAUSAL & ~CAUSAL.tril(-4)).expand(2, 1, 12, 12)


def hole():
    """A causal mask in which one token of the first row does not see a key that later tokens see."""
    mask = CAUSAL.expand(2, 1, 12, 12).clone()
    mask[0, 0, 7, 2] = False
    return mask


def backwards():
    return CAUSAL.T.expand(2, 1, 12, 12)


def tree():
    """Two continuations of the same eight tokens."""
    mask = CAUSAL.expand(2, 1, 12, 12).clone()
    mask[..., 10:, 8:10] = False
    return mask


@pytest.mark.parametrize("mask", [bidirectional_prefix, window, hole, backwards, tree])
@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.shows("bidirectional masks, windows in LUCID layers", model="drop-in", refused=True)
def test_a_mask_that_is_not_causal_is_refused(mask, use_cache):
    with pytest.raises(ValueError, match=r"attention_mask must be causal, with padding or packed documents"):
        lucid_model("llama")(tokens(2), attention_mask=mask(), use_cache=use_cache)


def test_an_additive_bias_is_refused():
    bias = (torch.arange(12.0) - torch.arange(12.0)[:, None]) * 0.1
    mask = bias.masked_fill(~CAUSAL, torch.finfo(torch.float32).min).expand(2, 1, 12, 12)
    with pytest.raises(ValueError, match="no additive bias"):
        lucid_model("llama")(tokens(2), attention_mask=mask)


@pytest.mark.parametrize(
    "shape", [(2, 1, 11, 12), (2, 1, 12, 11), (2, 4, 12, 12), (2, 12, 12)], ids=["rows", "columns", "per head", "3-D"]
)
def test_a_mask_of_another_shape_is_refused(shape):
    with pytest.raises(ValueError, match=r"attention_mask must be \[B, S \+ T\] or \[B, 1, T, S \+ T\]"):
        read_mask(torch.ones(shape, dtype=torch.bool), 2, 12, 12)


def test_nothing_hidden_is_no_mask():
    assert lucid_mask(2, 5, 5) is None
    assert lucid_mask(2, 5, 5, attention_mask=torch.ones(2, 5)) is None
    assert read_mask(None, 2, 5, 5) == Visibility()


def test_room_in_a_static_cache_is_hidden():
    expected = torch.tensor([[True] * 5 + [False] * 3] * 2)
    assert torch.equal(lucid_mask(2, 2, 8, q_offset=3), expected)
    assert torch.equal(lucid_mask(2, 2, 8, q_offset=torch.tensor(3)), expected)
    padding = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    assert torch.equal(lucid_mask(2, 2, 8, q_offset=3, attention_mask=padding)[:, :5], padding.bool())


def test_documents_are_borders_of_all_rows_one_behind_the_other():
    packed = and_masks(causal_mask_function, packed_sequence_mask_function(DOCUMENT))
    borders = lucid_mask(2, 12, 12, mask_function=packed)
    assert borders.dtype == torch.int32
    assert borders.tolist() == [0, 5, 9, 12, 21, 22, 24]


def test_layers_that_keep_their_attention_get_the_mask_of_sdpa():
    sliding = sliding_window_causal_mask_function(3)
    mask = lucid_mask(2, 8, 8, mask_function=sliding, local_size=3)
    expected = CAUSAL[:8, :8] & ~CAUSAL[:8, :8].tril(-3)
    assert torch.equal(mask, expected.expand(2, 1, 8, 8))


def test_a_bidirectional_mask_is_not_taken_for_a_causal_one():
    mask = lucid_mask(2, 8, 8, mask_function=bidirectional_mask_function, attention_mask=KEEP[:, :8])
    assert torch.equal(mask, KEEP[:, None, None, :8].expand(2, 1, 8, 8))


def test_tokens_of_an_image_that_see_each_other_are_refused():
    image = torch.tensor([0, 0, 0, 1, 1, 1, 0, 0])
    together = or_masks(causal_mask_function, lambda b, h, q, k: (image[q] == 1) & (image[k] == 1))
    with pytest.raises(ValueError, match="attention_mask must be causal"):
        lucid_mask(2, 8, 8, mask_function=together)


@given(data=st.data(), rows=st.integers(1, 5))
def test_a_dense_mask_is_the_same_after_reading_and_writing(data, rows):
    B, T, past = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9)), data.draw(st.integers(0, 3))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    total = past + T
    key = torch.arange(total)
    mask = (key <= key[past:, None]).expand(B, 1, T, total)
    if past or data.draw(st.booleans()):
        mask = mask & (torch.rand(B, 1, 1, total, generator=generator) < 0.7)
    else:
        document = (torch.rand(B, T, generator=generator) < 0.4).long().cumsum(1)
        mask = mask & (document[:, None, None] == document[:, None, :, None])
    before, masks.ROWS = masks.ROWS, rows
    try:
        visible = read_mask(mask, B, T, total)
    finally:
        masks.ROWS = before
    assert torch.equal(dense_mask(visible, B, T, total, past, mask.device), mask)
