"""Sliding-window attention against its dense definition in float64: forward and every gradient."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lucid_attention.ops.softmax import sliding
from lucid_attention.ops.softmax.attention import softmax_attention
from lucid_attention.ops.softmax.sliding import read_window

from .cases import Case, assert_as_good_as, assert_exact, call, evaluate, upstream, widened


def sliding_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int, *, past: tuple[Tensor, Tensor] | None = None, **options: Any
) -> Tensor:
    """`read_window` of a past and new positions."""
    if past is not None:
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
    return read_window(q, k, v, window, **options)


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    *,
    past: tuple[Tensor, Tensor] | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Query by query, over the keys that it sees."""
    S = 0
    if past is not None:
        S, k, v = past[0].shape[2], torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
    B, heads, T, D = q.shape
    G, scale = heads // k.shape[1], 1 / math.sqrt(D) if scale is None else scale
    borders = [0, S + T] if cu_seqlens is None else cu_seqlens.tolist()
    rows = []
    for b in range(B):
        for head in range(heads):
            for t in range(S, S + T):
                first = max(border for border in borders if border <= t)
                seen = torch.arange(max(first, t - window + 1), t + 1)
                seen = seen if key_mask is None else seen[key_mask[b, seen]]
                weights = (scale * k[b, head // G, seen] @ q[b, head, t - S]).softmax(0)
                rows.append(weights @ v[b, head // G, seen])
    return torch.stack(rows).view(B, heads, T, -1)


CASES = {
    "one token": (Case(T=1, B=2, G=2), 3),
    "no more than the window": (Case(T=7, B=2), 7),
    "one more than the window": (Case(T=8, B=2), 7),
    "itself alone": (Case(T=70, B=2, H=1, G=2), 1),
    "several blocks": (Case(T=150, B=2, H=1, D=5, E=3), 4),
    "whole blocks": (Case(T=128, H=1, G=3, D=3, E=6), 64),
    "a block of the window": (Case(T=171, H=1, D=4, E=4), 80),
    "a long window": (Case(T=150, H=1, D=4, E=1), 149),
    "past": (Case(T=70, S=9, B=2, H=1, G=2), 5),
    "a past shorter than the window": (Case(T=70, S=3, G=2), 20),
    "one token after a past": (Case(T=1, S=30, B=2, G=2), 5),
    "a chunk after a past": (Case(T=3, S=30, B=2, G=2), 5),
}
every_case = pytest.mark.parametrize(("case", "window"), CASES.values(), ids=CASES)


@every_case
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_it_is_the_definition_with_all_its_gradients(case, window, masked):
    tensors = case.tensors()
    weight = upstream(tensors, sliding_attention)
    options: dict[str, Any] = {"window": window}
    if masked:
        options |= {"key_mask": torch.rand(case.B, case.S + case.T) > 0.3, "scale": -0.5}
    assert_exact(evaluate(sliding_attention, tensors, weight, **options), evaluate(dense, tensors, weight, **options))


@pytest.mark.parametrize("window", [1, 3, 64, 100])
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_packed_documents_do_not_see_each_other(window, masked):
    case = Case(T=150, G=2, D=4)
    tensors = case.tensors()
    weight = upstream(tensors, sliding_attention)
    options: dict[str, Any] = {"window": window, "cu_seqlens": torch.tensor([0, 1, 5, 5, 64, 110, 150])}
    if masked:
        options["key_mask"] = torch.rand(1, 150) > 0.3
    assert_exact(evaluate(sliding_attention, tensors, weight, **options), evaluate(dense, tensors, weight, **options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_lower_precision_is_as_good_as_torchs_attention_with_a_dense_mask(dtype):
    case = Case(T=150, H=1, G=2, D=8, E=8)
    tensors = case.tensors(dtype)
    weight = upstream(tensors, sliding_attention)
    position = torch.arange(150)
    band = (position <= position[:, None]) & (position > position[:, None] - 9)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=band, enable_gqa=True)

    truth = evaluate(dense, widened(tensors), weight, window=9)
    ours, theirs = evaluate(sliding_attention, tensors, weight, window=9), evaluate(plain, tensors, weight)
    assert ours["out"].dtype == dtype
    assert_as_good_as(ours, theirs, truth)


@pytest.mark.parametrize("filling", [torch.nan, torch.inf])
@pytest.mark.parametrize("window", [3, 70])
def test_whatever_stands_at_a_masked_place_changes_nothing(filling, window):
    case = Case(T=100, B=2, G=2, D=4)
    tensors, key_mask = case.tensors(), torch.rand(2, 100) > 0.4
    key_mask[0, 20:40] = False  # queries that see nothing, if they are of a narrow window
    clean = evaluate(sliding_attention, tensors, upstream(tensors, sliding_attention), window=window, key_mask=key_mask)
    real = key_mask[:, None].expand(2, 4, 100)
    for name in ("q", "k", "v"):
        tensors[name] = tensors[name].masked_fill(~key_mask[:, None, :, None], filling)
    broken = {name: x.requires_grad_() for name, x in tensors.items()}
    o = call(sliding_attention, broken, window=window, key_mask=key_mask)
    torch.testing.assert_close(o[real], clean["out"][real])
    assert o.isfinite().all()
    if window == 3:
        assert not o[0, :, 22:40].any()
    for grad in torch.autograd.grad(o.square().sum(), list(broken.values())):
        assert grad.isfinite().all()


def test_a_window_that_sees_all_is_softmax_attention():
    tensors = Case(T=150, B=2, G=2, D=4).tensors()
    q, k, v = (tensors[name] for name in "qkv")
    for window in (150, 10_000):
        torch.testing.assert_close(sliding_attention(q, k, v, window), softmax_attention(q, k, v))
    assert (sliding_attention(q, k, v, 149) - softmax_attention(q, k, v)).abs().max() > 1e-6


def test_only_the_last_positions_of_a_past_are_read():
    tensors = Case(T=80, S=50, B=2, D=4).tensors()
    past = tensors.pop("k_past"), tensors.pop("y_past")
    o = sliding_attention(**tensors, window=6, past=past)
    kept = tuple(x[:, :, -5:] for x in past)
    torch.testing.assert_close(sliding_attention(**tensors, window=6, past=kept), o, rtol=0, atol=0)
    fewer = tuple(x[:, :, -4:] for x in past)
    assert (sliding_attention(**tensors, window=6, past=fewer) - o).abs().max() > 1e-4


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_what_is_kept_for_the_backward_grows_with_the_length_and_not_its_square(masked):
    def kept(T: int) -> int:
        q, k, v = (torch.randn(1, 2, T, 8, requires_grad=True) for _ in range(3))
        mask = torch.ones(1, T, dtype=torch.bool) if masked else None
        held: dict[int, int] = {}

        def hold(x: Tensor) -> Tensor:
            held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(hold, lambda x: x):
            sliding_attention(q, k, v, 64, key_mask=mask)
        return sum(held.values())

    assert kept(4096) < 2.2 * kept(2048)
    assert kept(4096) < 4096 * 4096


def test_there_is_no_loop_over_blocks(monkeypatch):
    calls = []
    attend = sliding.grouped_sdpa
    monkeypatch.setattr(sliding, "grouped_sdpa", lambda *args, **options: calls.append(1) or attend(*args, **options))
    q = k = v = torch.randn(1, 1, 3000, 4)
    sliding_attention(q, k, v, 3)
    assert len(calls) == 1


@pytest.mark.slow
def test_compiled_it_takes_any_length():
    torch._dynamo.reset()
    compiled = torch.compile(sliding_attention, backend="aot_eager", fullgraph=True, dynamic=True)
    for T in (70, 150, 131):
        tensors = Case(T=T, B=2, G=2, D=4).tensors()
        q, k, v = (tensors[name] for name in "qkv")
        for options in ({}, {"key_mask": torch.rand(2, T) > 0.3}):
            torch.testing.assert_close(compiled(q, k, v, 5, **options), sliding_attention(q, k, v, 5, **options))
    torch._dynamo.reset()


@pytest.mark.parametrize("window", [3, 9])
def test_borders_that_do_not_cover_the_row_are_explained(window):
    with pytest.raises(ValueError, match=r"cu_seqlens must rise from 0 to T = 6.*got 5"):
        read_window(*torch.randn(3, 1, 2, 6, 4), window, cu_seqlens=torch.tensor([0, 5]))
