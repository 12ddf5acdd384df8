"""The operators against the defining equation, dense and in float64: forward and every gradient, all shapes."""

import pytest
import torch

from lucid_attention import lucid_attention, precondition, preconditioner

from . import oracles
from .cases import Case, assert_as_good_as, assert_exact, evaluate, keys_of, shifted_keys, upstream, widened

# One block is 256 long. Lengths around it, head sizes that no kernel likes, several batches, grouped queries.
CASES = [
    Case(T=1, B=2, G=2),
    Case(T=2, G=3, D=1, E=4),
    Case(T=37, B=2, D=1, E=3),
    Case(T=255, B=2, G=2, D=5, E=7),
    Case(T=256, D=4, E=4, keys="close"),
    Case(T=257, D=68, E=68, G=2, keys="close"),
    Case(T=600, H=1, D=256, E=33, keys="closest"),
    Case(T=600, B=2, D=16, E=16, keys="repeated"),
    Case(T=1100, G=4, H=1, D=8, E=5, keys="runs"),
    Case(T=1100, H=3, D=16, E=24, keys="close"),
    Case(T=300, D=68, E=8, keys="equal"),
]
OPERATORS = [pytest.param(precondition, oracles.precondition, id="y"),
             pytest.param(lucid_attention, oracles.lucid_attention, id="o")]  # fmt: skip


def ordinary_dk(case: Case, oracle: object) -> float:
    """The size of dK on keys that are merely correlated: for repeated keys its true value is nearly zero."""
    small = Case(T=64, H=1, D=case.D, E=case.E).tensors()
    dk = evaluate(oracle, small, torch.randn(1, 1, 64, case.E, dtype=torch.float64))["dk"]
    return max(0.1, dk.abs().max().item())


@pytest.mark.parametrize(("fn", "oracle"), OPERATORS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_float64_is_the_defining_equation_with_all_its_gradients(case, fn, oracle):
    tensors = case.tensors()
    weight = upstream(tensors, fn)
    truth = evaluate(oracle, tensors, weight)
    assert_exact(evaluate(fn, tensors, weight), truth, dk=ordinary_dk(case, oracle))


@pytest.mark.parametrize(("fn", "oracle"), OPERATORS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_float32_is_as_good_as_the_plain_formula(case, fn, oracle):
    tensors = case.tensors(torch.float32)
    weight = upstream(tensors, fn)
    truth = evaluate(oracle, widened(tensors), weight)
    plain = evaluate(oracle, tensors, weight)
    ours = evaluate(fn, tensors, weight)
    assert {x.dtype for x in ours.values()} == {torch.float32}
    assert_as_good_as(ours, plain, truth, dk=ordinary_dk(case, oracle))


@pytest.mark.parametrize("norm", ["key", "qk", "row_max"])
def test_the_dense_reference_is_the_defining_equation(norm):
    tensors = Case(T=70, B=2, G=2, S=9, D=3, E=4).tensors(beta=True, sharpness=True)
    key_mask = torch.rand(2, 79) > 0.2
    for fn, oracle in ((precondition, oracles.precondition), (lucid_attention, oracles.lucid_attention)):
        weight = upstream(tensors, fn)
        ours = evaluate(fn, tensors, weight, norm=norm, key_mask=key_mask, impl="reference")
        assert_exact(ours, evaluate(oracle, tensors, weight, norm=norm, key_mask=key_mask))


@pytest.mark.parametrize("strength", [1.0, 0.25])
@pytest.mark.parametrize("norm", ["key", "qk", "row_max"])
def test_the_dense_matrix_is_the_matrix_that_is_solved(norm, strength):
    k, beta = shifted_keys(2, 3, 50, 4), torch.rand(2, 3, 50, dtype=torch.float64)
    sharpness = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)
    options = {"beta": beta, "norm": norm, "sharpness": sharpness, "strength": strength}
    P = preconditioner(k, **options)
    for b in range(2):
        for h in range(3):
            L = oracles.preconditioner(k[b, h], norm, sharpness[h]).tril(-1)
            expected = torch.eye(50, dtype=torch.float64) + strength * beta[b, h][:, None] * L
            torch.testing.assert_close(P[b, h], expected, rtol=1e-12, atol=1e-12)
    v = torch.randn(2, 3, 50, 6, dtype=torch.float64)
    y = precondition(k, v, **options)
    torch.testing.assert_close(P @ y, beta[..., None] * v, rtol=1e-11, atol=1e-11)


def test_the_dense_matrix_has_the_identity_at_masked_keys_and_between_documents():
    k, key_mask = shifted_keys(1, 1, 9, 3), torch.ones(1, 9, dtype=torch.bool)
    key_mask[0, 4] = False
    P = preconditioner(k, key_mask=key_mask, cu_seqlens=torch.tensor([0, 2, 9]))[0, 0]
    together = torch.tensor([2, 3, 5, 6, 7, 8])
    expected = torch.eye(9, dtype=torch.float64)
    expected[1, 0] = oracles.preconditioner(k[0, 0, :2])[1, 0]
    expected[together[:, None], together] = oracles.preconditioner(k[0, 0, together])
    torch.testing.assert_close(P, expected)


@pytest.mark.parametrize("D", [1, 3, 64])
def test_the_delta_rule_token_by_token_gives_the_same_values(D):
    T, c = 40, 1.3
    k, v, beta = shifted_keys(T, D, cosine=0.8), torch.randn(T, 4, dtype=torch.float64), torch.rand(T).double()
    y = precondition(k[None, None], v[None, None], beta=beta[None, None], sharpness=c)[0, 0]
    torch.testing.assert_close(y, oracles.delta_rule(k, v, beta, c), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kind", ["shifted", "repeated"])
def test_the_delta_rule_in_feature_space_gives_the_same_memory(kind):
    """The paper's recurrence with an explicit φ: S_t = S_{t−1} − β_t (S_{t−1} φ_t − v_t) φ_tᵀ."""
    T, E, c = 60, 3, 2.0
    k, v = keys_of(kind, 1, 1, T, 2), torch.randn(1, 1, T, E, dtype=torch.float64)
    beta = torch.rand(1, 1, T, dtype=torch.float64)
    phi = oracles.taylor_features(k[0, 0], c)
    memory = torch.zeros(E, phi.shape[1], dtype=torch.float64)
    for t in range(T):
        memory = memory - beta[0, 0, t] * torch.outer(memory @ phi[t] - v[0, 0, t], phi[t])
    y = precondition(k, v, beta=beta, sharpness=c)[0, 0]
    query = torch.randn(11, 2, dtype=torch.float64)
    read = torch.stack([sum(oracles.kernel(a, k[0, 0, j], c) * y[j] for j in range(T)) for a in query])
    torch.testing.assert_close(oracles.taylor_features(query, c) @ memory.T, read, rtol=1e-10, atol=1e-10)
    # Both memories are Σ y_j φ_jᵀ, not only similar where we asked.
    torch.testing.assert_close(memory, y.T @ phi, rtol=1e-10, atol=1e-10)
