"""The Triton decoding step in Triton's interpreter, against float64. See `interpreted_lucid.py` for how it is run."""

from typing import Any

import pytest
import torch

from lucid_attention import lucid_decode
from lucid_attention.ops.lucid import triton_decode
from lucid_attention.ops.lucid.decode import inverse_key_norms, paged_decode_

from .cases import Case, error

FLOOR = {torch.float32: 2e-6, torch.bfloat16: 1e-4, torch.float16: 1e-4}
CASES = {
    "first token": Case(T=1, B=2, G=2),
    "second token": Case(T=2, B=2, D=1, E=3),
    "grouped": Case(T=70, B=2, G=3, D=20, E=7, keys="close"),
    "long": Case(T=600, H=1, G=4, D=68, E=16, keys="closest"),
    "repeated": Case(T=200, G=17, D=16, E=24, keys="repeated"),
    "wide": Case(T=70, H=1, D=256, E=256, keys="close"),
}


def cached(case: Case, dtype: torch.dtype, **features: bool) -> dict[str, Any]:
    """Arguments of `lucid_decode` for the last token of a case; any y_past will do."""
    tensors = case.tensors(dtype, **features)
    k, v = tensors["k"], tensors["v"]
    out = {"q": tensors["q"][:, :, -1:], "k": k, "v": v[:, :, -1:], "y_past": v[:, :, :-1]}
    out["inverse_norms"] = inverse_key_norms(k)
    if "beta" in tensors:
        out["beta"] = tensors["beta"][:, :, -1:]
    if "sharpness" in tensors:
        out["sharpness"] = tensors["sharpness"]
    return out


def compare(arguments: dict[str, Any], dtype: torch.dtype, **options: Any) -> None:
    ours = lucid_decode(**arguments, **options, impl="triton")
    again = lucid_decode(**arguments, **options, impl="triton")
    plain = lucid_decode(**arguments, **options, impl="torch")
    wide = {name: x.double() if x.is_floating_point() else x for name, x in arguments.items()}
    wide["inverse_norms"] = inverse_key_norms(wide["k"])
    truth = lucid_decode(**wide, **options, impl="torch")
    for name in ("o", "y"):
        one, two = getattr(ours, name), getattr(truth, name)
        assert torch.equal(one, getattr(again, name))
        assert one.dtype == dtype
        assert error(one, two) <= 2 * error(getattr(plain, name), two) + FLOOR[dtype]


@pytest.fixture(params=[1, 5], ids=["one program", "split"])
def splits(request, monkeypatch):
    monkeypatch.setattr(triton_decode, "splits_of", lambda n, places: request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_step_is_that_of_the_equation(name, dtype, splits):
    compare(cached(CASES[name], dtype), dtype)


@pytest.mark.parametrize("norm", ["key", "qk"])
@pytest.mark.parametrize("dtype", FLOOR, ids=str)
def test_every_option(dtype, norm, splits):
    arguments = cached(CASES["grouped"], dtype, beta=True, sharpness=True)
    mask = torch.rand(2, 70) > 0.3
    mask[1] = False
    for key_mask in (None, mask, torch.arange(70).expand(2, 70) < 69):
        compare(arguments, dtype, norm=norm, key_mask=key_mask, strength=0.7, scale=0.3)


def test_masked_places_may_hold_anything(splits):
    arguments = cached(CASES["grouped"], torch.float32)
    mask = torch.arange(70).expand(2, 70) % 7 > 1
    clean = lucid_decode(**arguments, key_mask=mask, impl="triton")
    for name in ("k", "y_past", "inverse_norms"):
        x = arguments[name]
        hidden = ~mask[:, : x.shape[2]]
        x = x.masked_fill(hidden[:, None, :, None] if x.ndim == 4 else hidden[:, None], torch.nan)
        dirty = lucid_decode(**{**arguments, name: x}, key_mask=mask, impl="triton")
        assert torch.equal(clean.o, dirty.o)
        assert torch.equal(clean.y, dirty.y)


@pytest.mark.parametrize("key", [0.0, 1e-20, 1e15, 1e36])
def test_small_and_large_keys(key, splits):
    for dtype in (torch.float32, torch.bfloat16):
        arguments = cached(CASES["grouped"], dtype)
        arguments["k"] = (arguments["k"].double() * key).to(dtype)
        arguments["q"] = arguments["q"] * 0
        arguments["inverse_norms"] = inverse_key_norms(arguments["k"])
        compare(arguments, dtype)


@pytest.mark.parametrize("position", [0, 1, 33, 69])
def test_a_preallocated_buffer_is_read_up_to_its_position(position, splits):
    arguments = cached(CASES["grouped"], torch.float32)
    k, y = arguments["k"], torch.cat([arguments["y_past"], arguments["v"]], 2)
    seen = torch.arange(70).expand(2, 70) <= position
    behind = ~seen[:, None, :, None]
    filled = k.masked_fill(behind, torch.nan)
    static = lucid_decode(
        arguments["q"], filled, arguments["v"], y.masked_fill(behind, 0.0), inverse_key_norms(filled), key_mask=seen,
        position=torch.tensor(position), impl="triton",
    )  # fmt: skip
    growing = lucid_decode(
        arguments["q"], k[:, :, : position + 1], arguments["v"], y[:, :, :position],
        arguments["inverse_norms"][:, :, : position + 1], impl="triton",
    )  # fmt: skip
    assert error(static.o, growing.o) <= 1e-6
    assert error(static.y, growing.y) <= 1e-6


@pytest.mark.quick
@pytest.mark.parametrize("dtype", FLOOR, ids=str)
def test_pages_hold_what_a_cache_holds_and_get_the_new_value(dtype, splits):
    B, H, G, D, E, size, pages = 3, 2, 3, 20, 7, 16, 20
    lengths = torch.tensor([0, 37, 63])
    table = torch.randperm(pages)[: B * 4].view(B, 4).to(torch.int32)
    k = (torch.randn(pages, size, H, D) + 1).to(dtype)
    y = torch.randn(pages, size, H, E).to(dtype)
    norms = inverse_key_norms(k.transpose(1, 2)).transpose(1, 2).contiguous()
    q, v = torch.randn(B, H * G, 1, D).to(dtype), torch.randn(B, H, 1, E).to(dtype)
    written = y.clone()
    o = paged_decode_(q, k, written, norms, v, table, lengths, sharpness=1.3)
    for b, length in enumerate(lengths.tolist()):
        keys, values = (x[table[b].long()].flatten(0, 1).transpose(0, 1)[None] for x in (k, y))
        keys, values = keys[:, :, : length + 1], values[:, :, :length]
        expected = lucid_decode(
            q[b : b + 1], keys, v[b : b + 1], values, inverse_key_norms(keys), sharpness=1.3, impl="triton"
        )
        assert error(o[b : b + 1], expected.o) <= FLOOR[dtype]
        place = table[b, length // size].long(), length % size
        assert torch.equal(written[place], expected.y[0, :, 0])
        y[place] = written[place]
    assert torch.equal(written, y), "something else was written"
