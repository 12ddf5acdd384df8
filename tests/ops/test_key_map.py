"""P of mapped keys u = (k − center) @ matrix, while the softmax reads k: the equation written out in float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lucid_attention import (
    KeyMap,
    calibrated_key_map,
    inverse_key_norms,
    lucid_attention,
    lucid_decode,
    precondition,
    preconditioner,
)

from . import oracles
from .cases import Case, assert_as_good_as, assert_exact, evaluate, widened

MASK = torch.arange(80).view(2, 40) % 13 > 2
CASES = {
    "one token": (Case(T=1), {}),
    "grouped": (Case(T=37, G=2, keys="close"), {}),
    "repeated": (Case(T=37, keys="repeated"), {"sharpness": 4.0, "strength": 0.4}),
    "masked past": (Case(T=29, S=11, B=2, keys="close"), {"key_mask": MASK}),
    "packed": (Case(T=40, keys="close"), {"cu_seqlens": torch.tensor([0, 7, 8, 8, 40])}),
    "qk": (Case(T=29, S=11, keys="close"), {"norm": "qk"}),
    "row_max": (Case(T=29, S=11, keys="close"), {"norm": "row_max", "sharpness": 0.7}),
}


def tensors_of(case: Case, dtype: torch.dtype = torch.float64, **features: bool) -> dict[str, Tensor]:
    tensors = case.tensors(dtype, **features)
    # Nearly the mean of the keys, in which they are similar, and a map that is not symmetric.
    tensors["center"] = (tensors["k"].mean((0, 2)) + 0.1 * torch.randn(case.H, case.D)).to(dtype)
    tensors["matrix"] = (torch.eye(case.D) + 0.3 * torch.randn(case.H, case.D, case.D)).to(dtype)
    return tensors


def mapped_attention(q: Tensor, k: Tensor, v: Tensor, center: Tensor, matrix: Tensor, **options: Any) -> Tensor:
    return lucid_attention(q, k, v, key_map=KeyMap(center, matrix), **options)


def equation(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    center: Tensor,
    matrix: Tensor,
    *,
    past: Any = None,
    norm: str = "key",
    **options: Any,
) -> Tensor:
    old = (k[:, :, :0], v[:, :, :0]) if past is None else past
    u, u_past = ((x - center[:, None]) @ matrix for x in (k, old[0]))
    y = oracles.precondition(u, v, past=(u_past, old[1]), norm=norm, **options)
    k, y = torch.cat([old[0], k], 2), torch.cat([old[1], y], 2)
    if norm == "qk":
        q, k = (x * math.sqrt(x.shape[-1]) / x.norm(dim=-1, keepdim=True) for x in (q, k))
    seen = {name: options[name] for name in ("key_mask", "cu_seqlens") if name in options}
    return oracles.read_out(q, k, y, **seen)


@pytest.mark.parametrize("impl", ["blockwise", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_of_mapped_keys_are_those_of_the_equation(name, impl):
    case, options = CASES[name]
    tensors = tensors_of(case, beta=True)
    weight = torch.randn(case.B, case.H * case.G, case.T, case.E, dtype=torch.float64)
    assert_exact(
        evaluate(mapped_attention, tensors, weight, impl=impl, **options),
        evaluate(equation, tensors, weight, **options),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_mapped_keys_are_not_rounded_to_16_bits(dtype):
    """At this sharpness P follows the small angles between similar keys, which 16 bits of u would change."""
    tensors = widened(tensors_of(Case(T=37, D=8, keys="closest")), dtype)
    tensors["center"], tensors["matrix"] = 0.1 * tensors["center"], tensors["matrix"].tril()
    del tensors["q"]
    weight = torch.randn(1, 2, 37, 3).to(dtype)

    def values(k: Tensor, v: Tensor, center: Tensor, matrix: Tensor, impl: str) -> Tensor:
        if impl == "equation":
            return oracles.precondition((k - center[:, None]) @ matrix, v, sharpness=200.0)
        return precondition(k, v, key_map=KeyMap(center, matrix), sharpness=200.0, impl=impl)

    ours, plain = (evaluate(values, tensors, weight, impl=impl) for impl in ("blockwise", "reference"))
    truth = evaluate(values, widened(tensors), weight.double(), impl="equation")
    assert ours["out"].dtype == ours["dk"].dtype == ours["dcenter"].dtype == dtype
    rounded = {name: x.to(dtype) for name, x in truth.items()}
    for result in (ours, plain):
        assert_as_good_as(result, rounded, truth, multiple=3.0, floor=1e-4)


def test_a_vector_added_to_all_keys_changes_nothing_if_the_center_moves_along():
    tensors = tensors_of(Case(T=41, B=2, G=2, keys="close"))
    q, k, v = (tensors[name] for name in "qkv")
    shift = 3 * torch.randn(2, 1, 5, dtype=torch.float64)
    outputs = [lucid_attention(q, keys, v, key_map=calibrated_key_map(keys)) for keys in (k, k + shift)]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-5)
    key_map = KeyMap(tensors["center"])
    moved = KeyMap(tensors["center"] + shift[:, 0])
    torch.testing.assert_close(
        lucid_attention(q, k + shift, v, key_map=moved), lucid_attention(q, k, v, key_map=key_map), rtol=0, atol=1e-12
    )
    assert (lucid_attention(q, k + shift, v) - lucid_attention(q, k, v)).abs().max() > 0.1


@pytest.mark.parametrize("keys", ["close", "repeated", "runs"])
def test_the_inverse_is_bounded_by_2_for_any_map(keys):
    tensors = tensors_of(Case(T=120, keys=keys))
    for matrix in (tensors["matrix"], 0 * tensors["matrix"], 1e3 * torch.randn(2, 5, 5, dtype=torch.float64)):
        P = preconditioner(tensors["k"], sharpness=0.5, key_map=KeyMap(tensors["center"], matrix))
        assert torch.linalg.matrix_norm(torch.linalg.inv(P), 2).max() <= 2


@pytest.mark.parametrize("norm", ["key", "qk", "row_max"])
@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("parts", ["center", "matrix", "both"])
def test_a_decoded_token_is_that_of_the_full_pass(norm, static, parts):
    tensors = tensors_of(Case(T=23, B=2, G=2, keys="close"), beta=True)
    q, k, v, beta = (tensors[name] for name in ("q", "k", "v", "beta"))
    center = None if parts == "matrix" else tensors["center"]
    options: dict[str, Any] = {
        "norm": norm,
        "key_map": KeyMap(center, None if parts == "center" else tensors["matrix"]),
    }
    mask = torch.arange(46).view(2, 23) % 7 > 0
    assert mask[:, -1].all()
    y = precondition(k, v, key_mask=mask, beta=beta, **options)
    truth = lucid_attention(q, k, v, key_mask=mask, beta=beta, **options)
    keys = k.masked_fill(~mask[:, None, :, None], math.nan)
    norms = inverse_key_norms(keys, options["key_map"]).clone()
    norms[:, :, -1] = math.nan
    options |= {"beta": beta[:, :, -1:], "key_mask": mask, "norm_known": False}
    past = y[:, :, :-1]
    if static:
        places = (0, 0, 0, 4)
        keys, past = torch.nn.functional.pad(keys, places), torch.nn.functional.pad(past, (0, 0, 0, 5))
        norms, options["key_mask"] = (torch.nn.functional.pad(x, (0, 4)) for x in (norms, mask))
        options["position"] = torch.tensor(22)
    step = lucid_decode(q[:, :, -1:], keys, v[:, :, -1:], past, norms, **options)
    torch.testing.assert_close(step.o, truth[:, :, -1:], rtol=0, atol=1e-10)
    torch.testing.assert_close(step.y, y[:, :, -1:], rtol=0, atol=1e-10)


def test_masked_nan_keys_reach_neither_outputs_nor_gradients():
    tensors = tensors_of(Case(T=29, S=11, B=2, keys="close"))
    weight = torch.randn(2, 2, 29, 3, dtype=torch.float64)
    clean = evaluate(mapped_attention, tensors, weight, key_mask=MASK)
    hidden = ~MASK[:, None, :, None]
    tensors["k_past"] = tensors["k_past"].masked_fill(hidden[:, :, :11], math.nan)
    tensors["k"] = tensors["k"].masked_fill(hidden[:, :, 11:], math.nan)
    for name, x in evaluate(mapped_attention, tensors, weight, key_mask=MASK).items():
        torch.testing.assert_close(x, clean[name])


def test_a_calibrated_map_centres_and_whitens_the_keys_that_count():
    k = Case(T=4000, B=2, keys="close").tensors()["k"] * torch.linspace(0.5, 2, 5)
    mask = torch.rand(2, 4000) > 0.3
    k = k.masked_fill(~mask[:, None, :, None], math.nan)
    center, matrix = calibrated_key_map(k, mask)
    u = ((k.transpose(1, 2)[mask] - center).transpose(0, 1) @ matrix.double()).transpose(0, 1)
    for head in range(2):
        torch.testing.assert_close(torch.cov(u[:, head].mT), torch.eye(5, dtype=torch.float64), rtol=0, atol=0.05)
        assert u[:, head].mean(0).abs().max() < 1e-4
    assert calibrated_key_map(k, mask, whiten=False).matrix is None
    # One key has no covariance, and fewer keys than D have a singular one.
    assert torch.equal(calibrated_key_map(k[:1, :, -1:].nan_to_num()).matrix[0], math.sqrt(6 / 5) * torch.eye(5))
    assert calibrated_key_map(k[:, :, :2].nan_to_num()).matrix.isfinite().all()


def test_wrong_maps_are_refused_in_words():
    k = torch.randn(1, 2, 4, 5)
    for wrong, error in (
        ((None, None), "key_map must be a KeyMap"),
        (KeyMap(torch.zeros(5)), r"key_map.center must be \[H, D\] = \[2, 5\], got shape \[5\]"),
        (KeyMap(matrix=torch.zeros(2, 5, 4)), r"key_map.matrix must be \[H, D, D\]"),
        (KeyMap(torch.zeros(2, 5, dtype=torch.int64)), "key_map.center must be float64"),
    ):
        with pytest.raises((TypeError, ValueError), match=error):
            precondition(k, k, key_map=wrong)
    norms = inverse_key_norms(k)
    for impl in ("triton", "numba"):
        with pytest.raises(ValueError, match=f"impl='{impl}' cannot run: .*key_map"):
            lucid_decode(k[:, :, -1:], k, k[:, :, -1:], k[:, :, :-1], norms, key_map=KeyMap(), impl=impl)
