"""A masked token is as good as dropped, whatever stands there; a packed document is as good as alone."""

import pytest
import torch

from .cases import assert_exact
from .linear_cases import OPERATORS, Sizes, call, evaluate, truth

T = 90
POSITIONS = torch.arange(T)
MASKS = {
    "left": torch.stack([POSITIONS >= 70, POSITIONS >= 3]),
    "right": torch.stack([POSITIONS < 66, POSITIONS < 1]),
    "holes": torch.stack([POSITIONS % 3 > 0, (POSITIONS // 20) % 2 == 0]),
    "none": torch.stack([POSITIONS < 0, POSITIONS >= 0]),
}
BORDERS = {
    "one": [0, T],
    "short": [0, 1, 2, 33, 40, T],
    "empty": [0, 0, 10, 10, 75, T, T, T],
    "at a chunk": [0, 64, 65, T],
}


def spoilt(tensors: dict[str, torch.Tensor], key_mask: torch.Tensor) -> dict[str, torch.Tensor]:
    hidden = ~key_mask[:, None]
    return {
        name: x if name.startswith("state") else x.masked_fill(hidden if x.ndim == 3 else hidden[..., None], torch.nan)
        for name, x in tensors.items()
    }


@pytest.mark.parametrize("impl", ["chunkwise", "reference"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_masked_tokens_are_dropped_whatever_stands_there(operator, mask, impl):
    key_mask = MASKS[mask]
    tensors = Sizes(T=T, B=2, H=1, G=2, keys="close").tensors(operator, state=True)
    expected = evaluate(truth, operator, tensors, key_mask=key_mask)
    assert_exact(evaluate(call, operator, spoilt(tensors, key_mask), key_mask=key_mask, impl=impl), expected)


@pytest.mark.parametrize("impl", ["chunkwise", "reference"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_one_masked_token_leaves_the_state(operator, impl):
    tensors = Sizes(T=1, B=2).tensors(operator, state=True)
    key_mask = torch.tensor([[True], [False]])
    o, *state = call(operator, spoilt(tensors, key_mask), key_mask=key_mask, impl=impl)
    assert (o[1] == 0).all()
    for name, x in zip(sorted(name for name in tensors if name.startswith("state")), state, strict=True):
        torch.testing.assert_close(x[1], tensors[name][1], rtol=0, atol=0)
        assert not torch.allclose(x[0], tensors[name][0])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("borders", BORDERS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_documents_do_not_see_each_other(operator, borders, dtype):
    cu_seqlens = torch.tensor(BORDERS[borders], dtype=dtype)
    tensors = Sizes(T=T, G=2, keys="close").tensors(operator)
    expected = evaluate(truth, operator, tensors, cu_seqlens=cu_seqlens)
    for impl in ("chunkwise", "reference"):
        assert_exact(evaluate(call, operator, tensors, cu_seqlens=cu_seqlens, impl=impl), expected)


@pytest.mark.parametrize("operator", OPERATORS)
def test_documents_with_padding(operator):
    """Among them a document that begins with a masked token, and one that is masked throughout."""
    cu_seqlens = torch.tensor([0, 20, 30, 70, T])
    key_mask = ((POSITIONS >= 30) | (POSITIONS < 20)) & (POSITIONS % 7 > 0) & (POSITIONS != 30) & (POSITIONS < 85)
    tensors = Sizes(T=T).tensors(operator)
    options = {"key_mask": key_mask[None], "cu_seqlens": cu_seqlens}
    expected = evaluate(truth, operator, tensors, **options)
    for impl in ("chunkwise", "reference"):
        assert_exact(evaluate(call, operator, spoilt(tensors, key_mask[None]), **options, impl=impl), expected)
