"""The read-out by torch's kernel for sequences of different lengths, which runs on GPUs only.

A dense stand-in takes the kernel's place: what is tested is that arguments arrive in its layout and under its names.
"""

import inspect

import pytest
import torch

from lucid_attention.ops.softmax import varlen
from lucid_attention.ops.softmax.attention import softmax_attention, softmax_weights

from .cases import error


def stand_in(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa):
    """What the documentation of `varlen_attn` says, for window_size=(-1, 0): causal, aligned at the end."""
    assert window_size == (-1, 0)
    assert query.shape[2] % 8 == 0
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    out = []
    for i in range(cu_seq_q.shape[0] - 1):
        (a, b), (c, d) = cu_seq_q[i : i + 2].tolist(), cu_seq_k[i : i + 2].tolist()
        assert b - a <= max_q
        assert d - c <= max_k
        if b == a:
            continue
        q, k, v = (x.transpose(0, 1)[None] for x in (query[a:b], key[c:d], value[c:d]))
        weights = softmax_weights(q, k, scale=scale)
        out.append((weights @ v.repeat_interleave(q.shape[1] // k.shape[1], 1))[0].transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize(
    ("B", "T", "S", "borders"),
    [(1, 12, 0, [0, 5, 5, 6, 12]), (1, 7, 0, [0, 7]), (3, 4, 6, None)],
    ids=["documents", "one document", "past"],
)
def test_documents_and_a_past_reach_the_kernel_in_its_layout(monkeypatch, B, T, S, borders):
    monkeypatch.setattr(varlen, "can_read", lambda q, key_mask: True)
    monkeypatch.setattr(varlen, "_kernel", lambda: stand_in)
    q = torch.randn(B, 4, T, 5, dtype=torch.float64, requires_grad=True)
    k, y = (torch.randn(B, 2, S + T, size, dtype=torch.float64, requires_grad=True) for size in (5, 3))
    cu_seqlens = None if borders is None else torch.tensor(borders)
    weight = torch.randn(B, 4, T, 3, dtype=torch.float64)
    results = []
    for forced in (True, False):
        monkeypatch.setattr(varlen, "can_read", lambda q, key_mask, forced=forced: forced)
        o = softmax_attention(q, k, y, cu_seqlens=cu_seqlens, scale=0.7)
        results.append((o, *torch.autograd.grad(o, (q, k, y), weight)))
    for ours, strips in zip(*results, strict=True):
        assert error(ours, strips) <= 1e-12


def test_the_kernel_of_this_torch_has_the_arguments_that_are_used():
    kernel = varlen._kernel()
    assert kernel is not None
    names = list(inspect.signature(kernel).parameters)
    assert names[:7] == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]


def test_masked_keys_and_other_devices_stay_with_strips():
    q = torch.randn(1, 1, 4, 8, dtype=torch.bfloat16)
    assert not varlen.can_read(q, None)

    class Gpu:
        device, shape = torch.device("cuda"), q.shape

        def element_size(self):
            return 2

    assert varlen.can_read(Gpu(), None)
    assert not varlen.can_read(Gpu(), torch.ones(1, 4, dtype=torch.bool))
