"""`ShortConvolution` against `torch.nn.functional.conv1d` on the tokens without padding."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lucid_attention.nn.short_convolution import ShortConvolution

B, T, C = 3, 9, 5
SIZES = pytest.mark.parametrize("size", [1, 2, 4, 12])
LENGTHS = torch.tensor([[T], [T - 4], [1]])
MASKS = {
    "left": torch.arange(T) >= T - LENGTHS,
    "right": torch.arange(T) < LENGTHS,
    "holes": torch.rand(B, T, generator=torch.Generator().manual_seed(3)) < 0.6,
    "a row without tokens": torch.arange(T) < torch.tensor([[0], [2], [T]]),
}


def build(size: int, activation: bool = True) -> ShortConvolution:
    torch.manual_seed(1)
    return ShortConvolution(C, size, activation).double()


def inputs() -> Tensor:
    return torch.randn(B, T, C, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def by_torch(module: ShortConvolution, x: Tensor) -> Tensor:
    """One row [T, C]."""
    if len(x) == 0:
        return x
    y = F.conv1d(F.pad(x.T[None], (module.size - 1, 0)), module.weight[:, None], groups=C)[0].T
    return F.silu(y) if module.activation else y


def gradients(module: ShortConvolution, output: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    weight = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return torch.autograd.grad((output * weight).sum(), (module.weight, x), retain_graph=True)


@SIZES
@pytest.mark.parametrize("activation", [True, False])
def test_it_is_a_causal_depthwise_convolution(size: int, activation: bool) -> None:
    module, x = build(size, activation), inputs().requires_grad_()
    output, tail = module(x)
    expected = torch.stack([by_torch(module, row) for row in x])
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(gradients(module, output, x), gradients(module, expected, x))
    torch.testing.assert_close(tail, F.pad(x, (0, 0, size, 0))[:, T + 1 :])


@SIZES
@pytest.mark.parametrize("mask", MASKS)
def test_padding_is_skipped_even_if_it_is_nan(size: int, mask: str) -> None:
    module, key_mask = build(size), MASKS[mask]
    x = inputs().masked_fill(~key_mask[..., None], torch.nan).requires_grad_()
    output, tail = module(x, key_mask=key_mask)
    expected = torch.cat([by_torch(module, row[real]) for row, real in zip(x, key_mask, strict=True)])
    torch.testing.assert_close(output[key_mask], expected)
    assert not output[~key_mask].any()
    torch.testing.assert_close(gradients(module, output[key_mask], x), gradients(module, expected, x))
    for row, real, last in zip(x, key_mask, tail, strict=True):
        kept = F.pad(row[real], (0, 0, size - 1, 0))
        torch.testing.assert_close(last, kept[len(kept) - (size - 1) :])


@SIZES
@pytest.mark.parametrize("mask", [None, *MASKS])
def test_portions_equal_the_whole(size: int, mask: str | None) -> None:
    module, x, key_mask = build(size), inputs().requires_grad_(), None if mask is None else MASKS[mask]
    whole, end = module(x, key_mask=key_mask)
    for sizes in ([4, 1, 1, 3], [1] * T, [2, 7]):
        outputs, tail, start = [], None, 0
        for chunk in x.split(sizes, 1):
            stop = start + chunk.shape[1]
            output, tail = module(chunk, tail, None if key_mask is None else key_mask[:, start:stop])
            outputs.append(output)
            start = stop
        torch.testing.assert_close(torch.cat(outputs, 1), whole)
        torch.testing.assert_close(tail, end)
        torch.testing.assert_close(gradients(module, torch.cat(outputs, 1), x), gradients(module, whole, x))


@SIZES
@pytest.mark.parametrize("padded", [False, True])
def test_documents_do_not_see_each_other(size: int, padded: bool) -> None:
    module, x = build(size), inputs()[:1].requires_grad_()
    key_mask = torch.ones(1, T, dtype=torch.bool)
    if padded:
        key_mask[0, [0, 2, 7]] = False
    borders = torch.tensor([0, 3, 3, 4, 9, 9])
    output, tail = module(x, key_mask=key_mask if padded else None, cu_seqlens=borders)
    documents = [x[0, a:b][key_mask[0, a:b]] for a, b in ((0, 3), (3, 4), (4, 9))]
    expected = torch.cat([by_torch(module, each) for each in documents])
    torch.testing.assert_close(output[key_mask], expected)
    torch.testing.assert_close(gradients(module, output[key_mask], x), gradients(module, expected, x))
    last = F.pad(documents[-1], (0, 0, size - 1, 0))
    torch.testing.assert_close(tail[0], last[len(last) - (size - 1) :])


def test_another_document_full_of_nan_does_no_harm() -> None:
    module, x = build(4), inputs()[:1]
    x[:, :5] = torch.nan
    output, tail = module(x, cu_seqlens=torch.tensor([0, 5, T]))
    torch.testing.assert_close(output[0, 5:], by_torch(module, x[0, 5:]))
    assert tail.isfinite().all()


def test_the_tail_does_not_hold_on_to_the_sequence() -> None:
    tail = build(4)(inputs())[1]
    assert tail.untyped_storage().nbytes() == tail.numel() * tail.element_size()


def test_weights_start_as_those_of_torch() -> None:
    torch.manual_seed(0)
    ours, theirs = ShortConvolution(20_000, 4).weight, torch.nn.Conv1d(20_000, 20_000, 4, groups=20_000).weight
    assert ours.abs().max() <= 0.5
    assert abs(ours.std().item() / theirs.std().item() - 1) < 0.02


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ShortConvolution(0), "channels must be a positive integer, got 0"),
        (lambda: ShortConvolution(4, 0), "size must be a positive integer, got 0"),
        (lambda: build(4)(inputs(), inputs()), r"tail must be \[B, size − 1, C\] = \[3, 3, 5\], got shape \[3, 9, 5\]"),
    ],
)
def test_bad_arguments_are_explained(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]
