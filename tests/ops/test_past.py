"""New tokens after a past: the same as one long pass, whatever the sizes, forward and backward."""

import pytest
import torch

from lucid_attention import lucid_attention, precondition

from . import oracles
from .cases import Case, assert_exact, evaluate

CASES = [
    Case(T=1, S=1, B=2, G=2),
    Case(T=1, S=700, G=3, D=4, E=6),
    Case(T=37, S=1, B=2, D=1, E=3),
    Case(T=255, S=257, B=2, G=2),
    Case(T=600, S=3, D=68, E=8, keys="close"),
    Case(T=3, S=1100, H=1, G=4, D=8, keys="runs"),
    Case(T=300, S=600, H=3, D=16, E=24, keys="repeated"),
]


@pytest.mark.parametrize("fn", [precondition, lucid_attention])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_new_tokens_see_the_past_as_the_equation_says(case, fn):
    """With any y_past: its own gradient, and those of k_past, are those of an input."""
    tensors = case.tensors()
    weight = torch.randn(case.B, case.H * (1 if fn is precondition else case.G), case.T, case.E, dtype=torch.float64)
    oracle = oracles.precondition if fn is precondition else oracles.lucid_attention
    assert_exact(evaluate(fn, tensors, weight), evaluate(oracle, tensors, weight))


def in_chunks(q, k, v, beta, cuts, **options):
    """Outputs of `lucid_attention` chunk by chunk, with the cache that a user would keep."""
    outputs, cache = [], (k[:, :, :0], v[:, :, :0])
    for start, stop in zip([0, *cuts], [*cuts, k.shape[2]], strict=True):
        new = {"k": k[:, :, start:stop], "v": v[:, :, start:stop], "beta": beta[:, :, start:stop], "past": cache}
        outputs.append(lucid_attention(q[:, :, start:stop], **new, **options))
        cache = torch.cat([cache[0], new["k"]], 2), torch.cat([cache[1], precondition(**new, **options)], 2)
    return torch.cat(outputs, 2)


@pytest.mark.parametrize("norm", ["key", "qk", "row_max"])
@pytest.mark.parametrize("cuts", [[1], [256], [300, 301, 599], [10, 20, 500]], ids=str)
def test_gradients_flow_through_the_past_as_through_one_pass(cuts, norm):
    tensors = Case(T=600, G=2, D=4).tensors(beta=True, sharpness=True)
    weight = torch.randn(1, 4, 600, 3, dtype=torch.float64)

    def chunked(**arguments):
        return in_chunks(**arguments, cuts=cuts, norm=norm)

    assert_exact(evaluate(chunked, tensors, weight), evaluate(lucid_attention, tensors, weight, norm=norm))
