"""What holds for any keys, lengths and cuts, on examples that hypothesis chooses."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lucid_attention import lucid_attention, precondition
from lucid_attention.ops.lucid import blockwise
from lucid_attention.ops.triangular import Schedule

from .cases import call, shifted_keys

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
