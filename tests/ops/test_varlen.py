"""The read-out by torch's kernel for sequences of different lengths, which runs on GPUs only.

A dense stand-in takes the kernel's place: what is tested is that arguments arrive in its layout and under its names.
"""

import inspect

import pytest
import torch

from lucid_attention.ops.softmax import attention
from lucid_attention.ops.softmax.attention import softmax_attention

from .cases import error
from .varlen_kernel import stand_in


@pytest.fixture
def forced(monkeypatch):
    """Switch the kernel's stand-in on or off."""

    def switch(on):
        monkeypatch.setattr(attention, "varlen_can_read", lambda *arguments: on)

    monkeypatch.setattr(attention, "_varlen_kernel", lambda: stand_in)
    switch(True)
    return switch


MASKS = {
    "none": lambda B, total: None,
    "left": lambda B, total: torch.arange(total) >= 2 * torch.arange(1, B + 1)[:, None],
    "right": lambda B, total: torch.arange(total) < total - 2 * torch.arange(B)[:, None],
    "holes": lambda B, total: torch.arange(B * total).view(B, total) % 3 > 0,
    "a row of nothing": lambda B, total: (torch.arange(B) > 0)[:, None].expand(B, total),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("B", "T", "S", "borders"),
    [(1, 12, 0, [0, 5, 5, 6, 12]), (1, 7, 0, [0, 7]), (3, 4, 6, None), (3, 9, 0, None)],
    ids=["documents", "one document", "past", "rows"],
)
def test_masks_documents_and_a_past_reach_the_kernel_in_its_layout(forced, B, T, S, borders, mask):
    q = torch.randn(B, 4, T, 5, dtype=torch.float64, requires_grad=True)
    k, y = (torch.randn(B, 2, S + T, size, dtype=torch.float64, requires_grad=True) for size in (5, 3))
    key_mask, cu_seqlens = MASKS[mask](B, S + T), None if borders is None else torch.tensor(borders)
    weight = torch.randn(B, 4, T, 3, dtype=torch.float64)
    results = []
    for on in (True, False):
        forced(on)
        o = softmax_attention(q, k, y, key_mask=key_mask, cu_seqlens=cu_seqlens, scale=0.7)
        results.append((o, *torch.autograd.grad(o, (q, k, y), weight)))
    for ours, strips in zip(*results, strict=True):
        assert error(ours, strips) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [0.01, 0.125, 3.0])
def test_in_16_bit_a_masked_key_has_no_weight_at_all(forced, monkeypatch, dtype, scale):
    """Products of the kernel are float32. Scores are as low as −2e4, and what stands at masked places is NaN."""

    def in_float32(q, k, v, *rest, **options):
        return stand_in(q.float(), k.float(), v.float(), *rest, **options).to(q.dtype)

    monkeypatch.setattr(attention, "_varlen_kernel", lambda: in_float32)
    mask = MASKS["holes"](2, 9)
    q = torch.full((2, 2, 9, 8), -50.0, dtype=dtype)
    k, y = (torch.rand(2, 1, 9, 8).add(0.5).mul(size).to(dtype) for size in (100, 1))
    q, k, y = (x.requires_grad_() for x in (q, k, y))
    weight = torch.ones(2, 2, 9, 8, dtype=dtype)
    clean = softmax_attention(q, k, y, key_mask=mask, scale=scale)
    grads = torch.autograd.grad(clean, (q, k, y), weight)
    hidden = ~mask[:, None, :, None]
    dirty_k, dirty_y = (x.detach().masked_fill(hidden, torch.nan).requires_grad_() for x in (k, y))
    dirty = softmax_attention(q, dirty_k, dirty_y, key_mask=mask, scale=scale)
    assert torch.equal(clean, dirty)
    for one, two in zip(grads, torch.autograd.grad(dirty, (q, dirty_k, dirty_y), weight), strict=True):
        assert torch.equal(one, two)
    # Only what a query may see, alone.
    for row in range(2):
        for t in range(9):
            seen = mask[row, : t + 1].nonzero()[:, 0]
            scores = (q[row, :, t].float() @ k[row, 0, seen].float().mT * scale).double()
            expected = scores.softmax(-1) @ y[row, 0, seen].double()
            assert error(clean[row, :, t], expected) <= 2 * torch.finfo(dtype).eps


def test_a_query_whose_scores_may_be_as_low_as_masked_ones_reads_nan(forced):
    q, k, y = (torch.ones(1, 1, 3, 8, dtype=torch.bfloat16) for _ in range(3))
    q[:, :, 2] = -1e4
    k[:, :, 1] = 1e4
    mask = torch.tensor([[True, True, False]])
    o = softmax_attention(q, k, y, key_mask=mask, scale=1.0)
    assert o[:, :, :2].isfinite().all()
    assert o[:, :, 2].isnan().all()


def test_the_kernel_of_this_torch_has_the_arguments_that_are_used():
    kernel = attention._varlen_kernel()
    assert kernel is not None
    names = list(inspect.signature(kernel).parameters)
    assert names[:7] == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]


def test_what_the_kernel_does_not_take_stays_with_strips():
    mask = torch.ones(1, 4, dtype=torch.bool)

    class Gpu:
        device, dtype = torch.device("cuda"), torch.float16

        def __init__(self, size):
            self.shape = (1, 1, 4, size)

        def element_size(self):
            return 2

    assert not attention.varlen_can_read(torch.randn(1, 1, 4, 8, dtype=torch.bfloat16), None, 0.1)
    assert attention.varlen_can_read(Gpu(256), None, 0.1)
    assert attention.varlen_can_read(Gpu(128), mask, 0.1)
    assert not attention.varlen_can_read(Gpu(256), mask, 0.1)
    # The feature that hides would overflow.
    assert not attention.varlen_can_read(Gpu(128), mask, 1e-4)
