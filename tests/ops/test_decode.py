"""One token against a cache: what the full pass gives for its last position."""

from typing import Any

import pytest
import torch

from lucid_attention import lucid_attention, lucid_decode, precondition
from lucid_attention.ops.lucid.decode import inverse_key_norms

from .cases import Case, call, error

NORMS = ["key", "qk", "row_max"]


def last_token(tensors: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    """(o, y) of the last position by `lucid_decode`, its cache filled by `precondition`."""
    T = tensors["k"].shape[2]
    options = {"beta": tensors.get("beta"), "sharpness": tensors.get("sharpness"), **options}
    key_mask, beta, scale = (options.pop(name, None) for name in ("key_mask", "beta", "scale"))
    k, v = tensors["k"], tensors["v"]
    y_past = v[:, :, :0]
    if T > 1:
        past = {"beta": None if beta is None else beta[:, :, :-1]}
        past["key_mask"] = None if key_mask is None else key_mask[:, :-1]
        y_past = precondition(k[:, :, :-1], v[:, :, :-1], **past, **options)
    beta = None if beta is None else beta[:, :, -1:]
    new = tensors["q"][:, :, -1:], k, v[:, :, -1:], y_past, inverse_key_norms(k)
    return lucid_decode(*new, key_mask=key_mask, beta=beta, scale=scale, **options)


def assert_is_full_pass(tensors: dict[str, Any], tolerance: float = 1e-11, **options: Any) -> None:
    step = last_token(tensors, **options)
    o = call(lucid_attention, tensors, **options)[:, :, -1:]
    options.pop("scale", None)
    assert error(step.o, o) <= tolerance
    assert error(step.y, call(precondition, tensors, **options)[:, :, -1:]) <= tolerance


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    "case",
    [
        Case(T=1, B=2, G=2),
        Case(T=2, B=2, D=1, E=3),
        Case(T=38, B=2, G=3, D=5, E=7),
        Case(T=1101, H=1, G=4, D=68, E=16, keys="close"),
        Case(T=600, H=3, D=16, E=24, keys="repeated"),
        Case(T=300, D=8, keys="equal"),
    ],
    ids=str,
)
def test_a_decode_step_is_the_last_row_of_the_full_pass(case, norm):
    assert_is_full_pass(case.tensors(), norm=norm)
    assert_is_full_pass(case.tensors(beta=True, sharpness=True), norm=norm, scale=0.3)
    assert_is_full_pass(case.tensors(beta=True), norm=norm, sharpness=2.5)
    if norm != "row_max":
        tensors = case.tensors()
        tensors["k"][:, :, [0, case.T // 2, -1]] = 0
        assert_is_full_pass(tensors, norm=norm)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("options", ["plain", "beta and sharpness"])
def test_padding_leaves_the_decode_step(norm, options):
    tensors = Case(T=40, B=6, G=2, D=4).tensors(beta=options != "plain", sharpness=options != "plain")
    key_mask = torch.ones(6, 40, dtype=torch.bool)
    key_mask[1, :10] = False  # left
    key_mask[2, 5:20] = False  # middle
    key_mask[3, -1] = False  # the new token itself
    key_mask[4, :-1] = False  # everything but the new token
    key_mask[5] = False  # everything
    tensors["k"][~key_mask[:, None].expand(6, 2, 40)] *= 30  # else a masked key would rarely be a row's maximum
    assert_is_full_pass(tensors, norm=norm, key_mask=key_mask)
    step = last_token(tensors, norm=norm, key_mask=key_mask)
    assert (step.y[3] == 0).all()
    assert (step.y[5] == 0).all()
    assert (step.o[5] == 0).all()


@pytest.mark.parametrize(
    ("place", "filling"), [("k", float("nan")), ("k", float("inf")), ("y_past", 1e3)]
)  # y_past is ours, and finite: cleaning it would read the cache twice
@pytest.mark.parametrize("norm", NORMS)
def test_whatever_stands_in_a_masked_place_of_the_cache_changes_nothing(norm, place, filling):
    tensors = Case(T=20, B=2, G=2, D=4).tensors()
    key_mask = torch.ones(2, 20, dtype=torch.bool)
    key_mask[0, :6] = False
    key_mask[1, 7:9] = False
    k, v, q = tensors["k"], tensors["v"][:, :, -1:], tensors["q"][:, :, -1:]
    y_past = precondition(k[:, :, :-1], tensors["v"][:, :, :-1], norm=norm, key_mask=key_mask[:, :-1])
    clean = lucid_decode(q, k, v, y_past, inverse_key_norms(k), norm=norm, key_mask=key_mask)
    hidden = ~key_mask[:, None, :, None]
    if place == "k":
        k = k.masked_fill(hidden, filling)
    else:
        y_past = y_past.masked_fill(hidden[:, :, :-1], filling)
    step = lucid_decode(q, k, v, y_past, inverse_key_norms(k), norm=norm, key_mask=key_mask)
    torch.testing.assert_close(step.y, clean.y)
    torch.testing.assert_close(step.o, clean.o)


@pytest.mark.parametrize("filling", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", ["q", "k", "v"])
@pytest.mark.parametrize("norm", NORMS)
def test_a_masked_new_token_may_hold_anything(norm, place, filling):
    tensors = Case(T=12, B=2, G=2, D=4).tensors()
    key_mask = torch.ones(2, 12, dtype=torch.bool)
    key_mask[:, -1] = False
    key_mask[1] = False
    past = {name: x[:, :, :-1] for name, x in tensors.items()}
    y_past = call(precondition, past, norm=norm, key_mask=key_mask[:, :-1])

    def step():
        q, k, v = (tensors[name] for name in "qkv")
        return lucid_decode(q[:, :, -1:], k, v[:, :, -1:], y_past, inverse_key_norms(k), norm=norm, key_mask=key_mask)

    clean = step()
    tensors[place][:, :, -1] = filling
    broken = step()
    assert (broken.y == 0).all()
    assert (broken.o[1] == 0).all()
    assert broken.o.isfinite().all()
    if place != "q":
        torch.testing.assert_close(broken.o, clean.o)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 3e-5), (torch.bfloat16, 4 * 2**-8), (torch.float16, 4 * 2**-11)],
    ids=["float32", "bfloat16", "float16"],
)
def test_a_cache_of_any_dtype_is_read_in_at_least_float32(dtype, tolerance, norm):
    """Against float64 on the same rounded cache, so that only the step's own rounding counts."""
    case = Case(T=1500, B=2, G=2, D=16, E=8, keys="close")
    tensors = case.tensors(dtype)
    k, v, q = tensors["k"], tensors["v"][:, :, -1:], tensors["q"][:, :, -1:]
    y_past = precondition(k[:, :, :-1], tensors["v"][:, :, :-1], norm=norm)
    step = lucid_decode(q, k, v, y_past, inverse_key_norms(k), norm=norm)
    assert step.o.dtype == step.y.dtype == dtype
    assert inverse_key_norms(k).dtype == torch.float32
    wide = [x.double() for x in (q, k, v, y_past)]
    truth = lucid_decode(*wide, inverse_key_norms(wide[1]), norm=norm)
    assert error(step.y, truth.y) <= tolerance
    assert error(step.o, truth.o) <= tolerance


@pytest.mark.parametrize("size", [0.01, 1e-20, 1e15], ids=lambda x: f"{x:g}")
def test_small_and_large_keys_decode_as_they_prefill(size):
    """An eps in the norm would make the two disagree for small keys."""
    tensors = Case(T=50, D=8).tensors(torch.float32)
    plain = call(precondition, tensors)[:, :, -1:]
    tensors["k"] *= size
    tensors["q"] /= size
    assert_is_full_pass(tensors, tolerance=1e-5)
    assert error(last_token(tensors).y, plain) < 1e-5


def transposed(x: torch.Tensor) -> torch.Tensor:
    """[B, T, H, D] seen as [B, H, T, D]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def beginning(x: torch.Tensor) -> torch.Tensor:
    """The filled part of a longer buffer."""
    return torch.cat([x, torch.full_like(x, float("nan"))], 2)[:, :, : x.shape[2]]


def expanded(x: torch.Tensor) -> torch.Tensor:
    """One prompt for a whole batch."""
    return x[:1].expand(x.shape)


@pytest.mark.parametrize("layout", [transposed, beginning, expanded])
@pytest.mark.parametrize("place", ["q", "k", "v", "y_past", "inverse_norms"])
def test_the_layout_of_an_input_does_not_matter_and_inputs_are_left_alone(place, layout):
    tensors = Case(T=30, B=3, G=2, D=4).tensors()
    k, v, q = tensors["k"], tensors["v"][:, :, -1:], tensors["q"][:, :, -1:]
    y_past = precondition(k[:, :, :-1], tensors["v"][:, :, :-1])
    inputs = {"q": q, "k": k, "v": v, "y_past": y_past, "inverse_norms": inverse_key_norms(k)}
    inputs[place] = layout(inputs[place])
    before = {name: x.clone() for name, x in inputs.items()}
    expected = lucid_decode(**{name: x.contiguous() for name, x in inputs.items()})
    step = lucid_decode(**{name: x.requires_grad_(name != "inverse_norms") for name, x in inputs.items()})
    assert not step.o.requires_grad
    assert not step.y.requires_grad
    torch.testing.assert_close(step.o, expected.o)
    torch.testing.assert_close(step.y, expected.y)
    for name, x in inputs.items():
        torch.testing.assert_close(x.detach(), before[name], rtol=0, atol=0)
