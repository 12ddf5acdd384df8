"""A masked key leaves the system and the softmax, whatever stands there."""

import pytest
import torch

from lucid_attention import lucid_attention, precondition

from . import oracles
from .cases import Case, assert_exact, evaluate, upstream
from .path_cases import five_masks

NORMS = ["key", "qk", "row_max"]
ORACLES = {precondition: oracles.precondition, lucid_attention: oracles.lucid_attention}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("fn", [precondition, lucid_attention])
@pytest.mark.parametrize(
    "case",
    [
        Case(T=37, B=5, G=2, D=1, E=3),
        Case(T=257, B=5, H=1, G=2, D=4),
        Case(T=600, B=5, H=1, D=6, E=8, keys="close"),
        Case(T=20, S=300, B=5, D=4),
    ],
    ids=str,
)
def test_masked_tokens_are_dropped_forward_and_backward(case, fn, norm):
    """The oracle really drops them. Queries at masked positions still read the keys before them."""
    if norm == "row_max" and case.D == 1:
        # On a line cosines are ±1 and raw scores tie; a tie may be broken either way, with another gradient.
        case = Case(**{**vars(case), "D": 2})
    tensors, key_mask = case.tensors(beta=True), five_masks(case.S + case.T)
    weight = upstream(tensors, fn)
    strided = torch.stack([key_mask, ~key_mask], -1)[..., 0]
    ours = evaluate(fn, tensors, weight, norm=norm, key_mask=strided)
    truth = evaluate(ORACLES[fn], tensors, weight, norm=norm, key_mask=key_mask)
    assert_exact(ours, truth, tolerance=1e-10)
    hidden = ~key_mask[:, None, :]
    new, old = hidden[:, :, case.S :, None], hidden[:, :, : case.S, None]
    for name in ("dk", "dv"):
        assert (ours[name].masked_select(new) == 0).all(), name
    assert (ours["dbeta"].masked_select(new[..., 0]) == 0).all()
    if case.S:
        assert (ours["dk_past"].masked_select(old) == 0).all()
        assert (ours["dy_past"].masked_select(old) == 0).all()
    if fn is precondition:
        assert (ours["out"].masked_select(new) == 0).all()


@pytest.mark.parametrize("filling", [float("nan"), float("inf")])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("fn", [precondition, lucid_attention])
@pytest.mark.parametrize("impl", ["blockwise", "reference"])
def test_whatever_stands_at_masked_keys_values_and_step_sizes_changes_nothing(impl, fn, norm, filling):
    case = Case(T=37, S=11, B=5, G=2, D=4)
    tensors, key_mask = case.tensors(beta=True), five_masks(48)
    options = {"norm": norm, "key_mask": key_mask, "impl": impl}
    weight = upstream(tensors, fn)
    clean = evaluate(fn, tensors, weight, **options)
    new, old = ~key_mask[:, None, 11:, None], ~key_mask[:, None, :11, None]
    broken = {name: x.clone() for name, x in tensors.items()}
    for name, where in (("k", new), ("v", new), ("beta", new[..., 0]), ("k_past", old), ("y_past", old)):
        broken[name].masked_fill_(where, filling)
    assert_exact(evaluate(fn, broken, weight, **options), clean)


@pytest.mark.parametrize("filling", [float("nan"), float("inf")])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("impl", ["blockwise", "reference"])
def test_a_broken_query_at_a_masked_position_changes_nothing_else(impl, norm, filling):
    case = Case(T=37, S=11, B=5, G=2, D=4)
    tensors, key_mask = case.tensors(), five_masks(48)
    hidden = ~key_mask[:, None, 11:, None]
    options = {"norm": norm, "key_mask": key_mask, "impl": impl}
    # The loss does not read padded positions; the gradients must not either.
    weight = upstream(tensors, lucid_attention).masked_fill(hidden, 0)
    clean = evaluate(lucid_attention, tensors, weight, **options)
    broken = tensors | {"q": tensors["q"].masked_fill(hidden, filling)}
    results = evaluate(lucid_attention, broken, weight, **options)
    assert results["out"].isfinite().all()
    for results_of in (clean, results):
        results_of["out"] = results_of["out"].masked_fill(hidden, 0)
    assert_exact(results, clean)


@pytest.mark.parametrize("impl", ["blockwise", "reference"])
def test_a_huge_query_at_a_masked_position_leaves_all_gradients_finite(impl):
    case = Case(T=37, B=1, G=2, D=4)
    tensors, key_mask = case.tensors(torch.float32), torch.ones(1, 37, dtype=torch.bool)
    key_mask[0, 20] = False
    tensors["q"][:, :, 20] = 1e38
    results = evaluate(lucid_attention, tensors, upstream(tensors, lucid_attention), key_mask=key_mask, impl=impl)
    for name, x in results.items():
        assert x.isfinite().all(), name
