"""What holds for any keys, lengths and cuts, on examples that hypothesis chooses."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lucid_attention import lucid_attention, precondition
from lucid_attention.ops.lucid import blockwise
from lucid_attention.ops.triangular import Schedule

from .cases import call, shifted_keys
from .oracles import kernel

norms = st.sampled_from(["key", "qk", "row_max"])
seeds = st.integers(0, 2**16)


@pytest.fixture(autouse=True, params=["usual", "small"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every property also with blocks so small that these short examples have several."""
    if request.param == "small":
        monkeypatch.setattr(blockwise, "pick_schedule", lambda *args, **options: Schedule(2, block=5, elements=35))


@st.composite
def problems(draw: st.DrawFn, longest: int = 24, keys: str = "any", batch: int = 3) -> dict[str, Any]:
    """Arguments of `lucid_attention` in float64; keys shifted, repeated or zero in places."""
    torch.manual_seed(draw(seeds))
    B, H, G = draw(st.integers(1, batch)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    T, D, E = draw(st.integers(1, longest)), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    k = shifted_keys(B, H, T, D, cosine=draw(st.sampled_from([0.0, 0.5, 0.9, 0.99])))
    if keys == "any" and draw(st.booleans()):
        k = k[:, :, torch.randint(max(1, T // 3), (T,))]
    if keys == "any" and draw(st.booleans()):
        k[:, :, torch.rand(T) < 0.2] = 0
    tensors = {"q": torch.randn(B, H * G, T, D).double(), "k": k, "v": torch.randn(B, H, T, E).double()}
    if draw(st.booleans()):
        # Zeros and ones among them.
        tensors["beta"] = torch.rand(B, H, T).double().mul(1.4).sub(0.2).clamp(0, 1)
    if draw(st.booleans()):
        tensors["sharpness"] = torch.rand(H).double().mul(3).add(0.1)
    return tensors


def rows(tensors: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    """The same problem on positions [start, stop)."""
    return {name: x if name == "sharpness" else x[:, :, start:stop] for name, x in tensors.items()}


def near(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@given(problems(), norms, st.data())
def test_future_tokens_do_not_change_the_past(tensors, norm, data):
    T = tensors["k"].shape[2]
    now = data.draw(st.integers(1, T))
    changed = {name: x.clone() for name, x in tensors.items()}
    for name in ("q", "k", "v"):
        changed[name][:, :, now:] = 10 * torch.randn_like(changed[name][:, :, now:])
    for fn in (precondition, lucid_attention):
        whole = call(fn, tensors, norm=norm)
        near(call(fn, changed, norm=norm)[:, :, :now], whole[:, :, :now])
        near(call(fn, rows(tensors, 0, now), norm=norm), whole[:, :, :now])


@given(problems(), norms, st.data())
def test_any_cut_into_past_and_new_tokens_gives_the_full_pass(tensors, norm, data):
    T = tensors["k"].shape[2]
    cuts = sorted(data.draw(st.sets(st.integers(1, T), max_size=4)) - {T})
    if data.draw(st.booleans()):
        cuts = list(range(1, T))  # token by token
    B = tensors["k"].shape[0]
    key_mask = torch.rand(B, T) > 0.25 if data.draw(st.booleans()) else None
    o, y = (call(fn, tensors, norm=norm, key_mask=key_mask) for fn in (lucid_attention, precondition))
    kept = y[:, :, :0]
    for start, stop in zip([0, *cuts], [*cuts, T], strict=True):
        options = {
            "norm": norm,
            "key_mask": None if key_mask is None else key_mask[:, :stop],
            "past": (tensors["k"][:, :, :start], kept),
        }
        near(call(lucid_attention, rows(tensors, start, stop), **options), o[:, :, start:stop])
        new = call(precondition, rows(tensors, start, stop), **options)
        near(new, y[:, :, start:stop])
        kept = torch.cat([kept, new], 2)


@given(problems(), norms, st.sampled_from(["left", "right", "middle", "anywhere"]), st.data())
def test_a_masked_token_is_ignored(tensors, norm, where, data):
    B, _, T, _ = tensors["k"].shape
    key_mask = torch.ones(B, T, dtype=torch.bool)
    for b in range(B):
        a, c = sorted(data.draw(st.tuples(st.integers(0, T), st.integers(0, T))))
        if where == "anywhere":
            key_mask[b] = torch.rand(T) > 0.4
        else:
            key_mask[b, {"left": slice(0, a), "right": slice(a, T), "middle": slice(a, c)}[where]] = False
    o = call(lucid_attention, tensors, norm=norm, key_mask=key_mask)
    y = call(precondition, tensors, norm=norm, key_mask=key_mask)
    assert (y.masked_select(~key_mask[:, None, :, None]) == 0).all()
    for b in range(B):
        index = key_mask[b].nonzero()[:, 0]
        if len(index) == 0:
            assert (o[b] == 0).all()
            continue
        alone = {n: x if n == "sharpness" else x[b : b + 1].index_select(2, index) for n, x in tensors.items()}
        near(o[b, :, index], call(lucid_attention, alone, norm=norm)[0])
        near(y[b, :, index], call(precondition, alone, norm=norm)[0])


@given(problems(longest=40, batch=1), norms, st.lists(st.integers(0, 40), max_size=5))
def test_packed_documents_are_computed_as_if_alone(tensors, norm, cuts):
    T = tensors["k"].shape[2]
    borders = [0, *sorted(min(c, T) for c in cuts), T]
    packed = {"cu_seqlens": torch.tensor(borders), "norm": norm}
    o, y = call(lucid_attention, tensors, **packed), call(precondition, tensors, **packed)
    for start, stop in pairwise(borders):
        if stop > start:
            near(o[:, :, start:stop], call(lucid_attention, rows(tensors, start, stop), norm=norm))
            near(y[:, :, start:stop], call(precondition, rows(tensors, start, stop), norm=norm))


@given(problems(longest=60), st.sampled_from([torch.float64, torch.float32]), st.booleans())
def test_values_and_their_gradients_at_most_double(tensors, dtype, masked):
    """‖Y‖ ≤ 2‖V‖ and ‖dV‖ ≤ 2‖dY‖ in every column, for β in [0, 1], zero keys and masks."""
    tensors = {name: x.to(dtype) for name, x in tensors.items() if name != "q"}
    v = tensors["v"].requires_grad_()
    key_mask = torch.rand(v.shape[0], v.shape[2]) > 0.3 if masked else None
    y = call(precondition, tensors, key_mask=key_mask)
    dy = torch.randn_like(y)
    (dv,) = torch.autograd.grad(y, v, dy)
    slack = 2 * (1 + (1e-10 if dtype == torch.float64 else 1e-4))
    assert (y.norm(dim=2) <= slack * v.norm(dim=2)).all()
    assert (dv.norm(dim=2) <= slack * dy.norm(dim=2)).all()


@given(st.sampled_from(["equal", "alternating"]), st.integers(2, 600))
def test_the_bound_is_nearly_reached_and_never_passed(kind, T):
    """Equal keys with values of alternating sign: the worst there is, 2 cos(π/(2T + 1)) in the limit."""
    k = torch.ones(1, 1, T, 3)
    v = torch.ones(1, 1, T, 1)
    v[:, :, 1::2] = -1
    if kind == "alternating":
        k, v = k.clone(), v.abs()
        k[:, :, 1::2] *= -1
    ratio = (precondition(k, v).norm() / v.norm()).item()
    assert ratio <= 2 * (1 + 1e-5)
    assert kind == "alternating" or ratio > 2 * (1 - 1 / T)


@given(problems(keys="distinct", longest=12), st.data())
def test_the_last_value_of_a_repeated_key_wins(tensors, data):
    """Right after a write, the memory read at the key gives the value written, whatever was there before."""
    k, v = tensors["k"], tensors["v"]
    B, H, T, _ = k.shape
    again = data.draw(st.integers(0, T - 1))
    k2 = torch.cat([k, k[:, :, again : again + 1]], 2)
    v2 = torch.cat([v, torch.randn_like(v[:, :, :1])], 2)
    y = precondition(k2, v2, sharpness=1.7)
    for b in range(B):
        for h in range(H):
            read = sum(kernel(k2[b, h, T], k2[b, h, j], 1.7) * y[b, h, j] for j in range(T + 1))
            near(read, v2[b, h, T])
