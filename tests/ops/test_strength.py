"""strength: s in P = I + s · stril exp(…), from softmax attention to LUCID, with every other option."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from lucid_attention import lucid_attention, lucid_decode, precondition, preconditioner
from lucid_attention.ops.lucid import blockwise
from lucid_attention.ops.lucid.decode import inverse_key_norms
from lucid_attention.ops.softmax.attention import softmax_attention

from . import oracles
from .cases import Case, assert_exact, call, evaluate, keys_of, shifted_keys, upstream

NORMS = ["key", "qk", "row_max"]
OPERATORS = [pytest.param(precondition, oracles.precondition, id="y"),
             pytest.param(lucid_attention, oracles.lucid_attention, id="o")]  # fmt: skip
every_norm = pytest.mark.parametrize("norm", NORMS)
both_operators = pytest.mark.parametrize(("fn", "oracle"), OPERATORS)
both_impls = pytest.mark.parametrize("impl", ["blockwise", "reference"])


def settings(kind: str, case: Case) -> dict[str, Any]:
    """Options of the kinds of input there are."""
    if kind in ("masked", "past and mask"):
        return {"key_mask": torch.rand(case.B, case.S + case.T) > 0.2}
    return {"cu_seqlens": torch.tensor([0, 3, 3, case.T // 2, case.T])} if kind == "packed" else {}


KINDS = {
    "plain": Case(T=300, B=2, G=2, D=4, E=3),
    "close keys": Case(T=600, D=16, E=5, keys="close"),
    "repeated keys": Case(T=270, D=8, keys="repeated"),
    "one token": Case(T=1, G=2),
    "past": Case(T=260, B=2, G=2, S=40, D=4),
    "masked": Case(T=300, B=2, G=2, D=4),
    "past and mask": Case(T=70, B=2, S=30, D=4),
    "packed": Case(T=700, G=2, D=4),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@both_impls
@both_operators
@every_kind
def test_it_is_the_equation_with_all_its_gradients(kind, fn, oracle, impl):
    case = KINDS[kind]
    for norm, s in (("key", 0.5), ("qk", 0.9), ("row_max", 0.3)):
        if case.keys == "repeated" and norm == "row_max":
            continue  # ties for the maximum, where it has no derivative
        tensors = case.tensors(beta=norm != "key", sharpness=norm != "key")
        options = settings(kind, case) | {"norm": norm, "strength": s}
        weight = upstream(tensors, fn)
        truth = evaluate(oracle, tensors, weight, **options)
        assert_exact(evaluate(fn, tensors, weight, impl=impl, **options), truth, tolerance=1e-10)


@both_impls
@every_norm
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_at_zero_the_values_are_stored_as_they_are(dtype, norm, impl):
    for s in (0, 0.0):
        case = Case(T=300, B=2, S=20, D=4)
        tensors, options = case.tensors(dtype, beta=True), {"norm": norm, "impl": impl, "strength": s}
        beta, v, key_mask = tensors.pop("beta"), tensors["v"], torch.rand(2, 320) > 0.3
        new = key_mask[:, None, 20:, None]
        assert torch.equal(call(precondition, tensors, **options), v)
        assert torch.equal(call(precondition, tensors, beta=beta, **options), beta[..., None] * v)
        assert torch.equal(call(precondition, tensors, key_mask=key_mask, **options), v * new)
        row = {name: x[:1] for name, x in tensors.items() if "past" not in name}
        assert torch.equal(call(precondition, row, cu_seqlens=torch.tensor([0, 7, 300]), **options), v[:1])
        assert torch.equal(preconditioner(tensors["k"], norm=norm, strength=s)[0, 0], torch.eye(300, dtype=dtype))


@every_norm
def test_at_zero_nothing_is_solved_and_all_gradients_are_those_of_the_equation(norm, monkeypatch):
    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("a triangular system was solved")

    monkeypatch.setattr(blockwise, "solve_", refuse)
    monkeypatch.setattr(blockwise, "solve_adjoint_", refuse)
    monkeypatch.setattr(blockwise, "row_winners", refuse)
    tensors = Case(T=60, B=2, G=2, S=9, D=4).tensors(beta=True, sharpness=True)
    options = {"norm": norm, "key_mask": torch.rand(2, 69) > 0.3, "strength": 0.0}
    for fn, oracle in ((precondition, oracles.precondition), (lucid_attention, oracles.lucid_attention)):
        weight = upstream(tensors, fn)
        assert_exact(evaluate(fn, tensors, weight, **options), evaluate(oracle, tensors, weight, **options))
    row = {name: x if name == "sharpness" else x[:1] for name, x in tensors.items() if "past" not in name}
    packed, weight = {"norm": norm, "cu_seqlens": torch.tensor([0, 9, 60]), "strength": 0.0}, torch.randn(1, 2, 60, 3)
    truth = evaluate(oracles.precondition, row, weight, **packed)
    assert_exact(evaluate(precondition, row, weight, **packed), truth)


def test_at_zero_what_stands_at_masked_places_does_not_matter():
    tensors = Case(T=30, D=4).tensors(beta=True)
    key_mask = torch.rand(1, 30) > 0.4
    clean = call(precondition, tensors, key_mask=key_mask, strength=0)
    for x in tensors.values():
        x[:, :, ~key_mask[0]] = math.nan
    v = tensors["v"].requires_grad_()
    y = call(precondition, tensors, key_mask=key_mask, strength=0)
    assert torch.equal(y, clean)
    (dv,) = torch.autograd.grad(y.square().sum(), v)
    assert dv.isfinite().all()


@both_impls
@every_norm
def test_one_is_the_default_and_zero_is_softmax_attention(norm, impl):
    tensors = Case(T=300, B=2, G=2, D=4).tensors(beta=True)
    options = {"norm": norm, "impl": impl}
    default = call(lucid_attention, tensors, **options)
    assert torch.equal(call(lucid_attention, tensors, strength=1, **options), default)
    assert (call(lucid_attention, tensors, strength=0.9, **options) - default).abs().max() > 1e-3
    if norm != "qk":
        del tensors["beta"]
        plain = softmax_attention(**{"y" if name == "v" else name: x for name, x in tensors.items()})
        torch.testing.assert_close(call(lucid_attention, tensors, strength=0, **options), plain)


@given(
    st.floats(0, 1),
    st.sampled_from(["shifted", "close", "equal", "repeated"]),
    st.integers(1, 60),
    st.integers(1, 6),
    st.booleans(),
    st.integers(0, 2**16),
)
def test_the_inverse_is_at_most_two_by_two_minus_s(s, kind, T, D, masked, seed):
    """‖P⁻¹‖₂ ≤ 2/(2 − s), of the dense matrix and, as ‖Y‖ ≤ … ‖V‖ and ‖dV‖ ≤ … ‖dY‖, of what is solved."""
    torch.manual_seed(seed)
    k, v = keys_of(kind, 1, 2, T, D), torch.randn(1, 2, T, 3, dtype=torch.float64, requires_grad=True)
    if kind != "equal":
        k[:, :, torch.rand(T) < 0.1] = 0
    key_mask = torch.rand(1, T) > 0.3 if masked else None
    bound = 2 / (2 - s) * (1 + 1e-10)
    P = preconditioner(k, key_mask=key_mask, strength=s, sharpness=0.7)
    assert (torch.linalg.matrix_norm(P.inverse(), 2) <= bound).all()
    beta = torch.rand(1, 2, T, dtype=torch.float64) if masked else None
    y = precondition(k, v, key_mask=key_mask, beta=beta, strength=s, sharpness=0.7)
    dy = torch.randn_like(y)
    (dv,) = torch.autograd.grad(y, v, dy)
    assert (y.norm(dim=2) <= bound * v.norm(dim=2)).all()
    assert (dv.norm(dim=2) <= bound * dy.norm(dim=2)).all()


@pytest.mark.parametrize("s", [0.2, 0.5, 1.0])
def test_the_bound_is_nearly_reached_by_equal_keys(s):
    """Else it could be a much smaller one."""
    P = preconditioner(torch.ones(1, 1, 200, 3, dtype=torch.float64), strength=s)[0, 0]
    assert torch.linalg.matrix_norm(P.inverse(), 2) > 0.99 * 2 / (2 - s)


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "above one": (1.5, ValueError, r"strength must be a number from 0 to 1, got 1\.5"),
    "NaN": (math.nan, ValueError, "strength must be a number from 0 to 1, got nan"),
    "a tensor": (torch.tensor(0.5), TypeError, "strength must be a number from 0 to 1, got Tensor"),
}


@pytest.mark.parametrize(("value", "kind", "message"), BAD.values(), ids=BAD)
def test_a_bad_strength_is_explained(value, kind, message):
    q = k = v = torch.randn(1, 1, 3, 4)
    new = q[:, :, -1:], k, v[:, :, -1:], v[:, :, :-1], inverse_key_norms(k)
    for fn, args in ((lucid_attention, (q, k, v)), (precondition, (k, v)), (preconditioner, (k,)), (lucid_decode, new)):
        with pytest.raises(kind, match=message):
            fn(*args, strength=value)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["blockwise", "reference", "step"])
def test_a_schedule_of_strengths_needs_few_compiled_graphs(kind, backend, dynamo):
    """20 values, 0 and 1 among them: graphs for the first, for any, for 1; not one for each."""
    k, v = shifted_keys(1, 2, 9, 4).requires_grad_(), torch.randn(1, 2, 9, 3, dtype=torch.float64)
    if kind == "step":
        k = k.detach()

    def function(k: Tensor, v: Tensor, s: float) -> Tensor:
        if kind == "step":
            return lucid_decode(k[:, :, -1:], k, v[:, :, -1:], v[:, :, :-1], inverse_key_norms(k), strength=s).o
        return precondition(k, v, strength=s, impl=kind)

    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    for i in range(20):
        expected, output = function(k, v, i / 19), compiled(k, v, i / 19)
        torch.testing.assert_close(output, expected)
        if k.requires_grad:
            dy = torch.ones_like(v)
            torch.testing.assert_close(torch.autograd.grad(output, k, dy), torch.autograd.grad(expected, k, dy))
    assert counter.frame_count <= 4
