"""What holds for any keys, factors and lengths, on examples that hypothesis chooses."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from lucid_attention.ops.path.api import path_precondition
from lucid_attention.ops.path.reference import dense_matrix

from .cases import error, keys_of
from .path_cases import OPERATORS, PathCase, call, strengths

kinds = st.sampled_from(["shifted", "close", "closest", "repeated", "equal", "runs"])
betas = st.sampled_from(["uniform", "edges", "small", "0", "1", "2", "1.9"])
lengths = st.sampled_from([1, 2, 17, 64, 66, 130, 300])
sharpnesses = st.sampled_from([1e-3, 0.2, 1.0, 4.0, 100.0])


@given(st.integers(0, 2**16), lengths, st.integers(1, 6), kinds, kinds, betas, sharpnesses, st.booleans())
def test_the_inverse_has_norm_at_most_two(seed, T, D, keys, w, beta, sharpness, along):
    """For ‖w‖ = 1 and β in [0, 2], however keys and factors conspire: w may be the key itself."""
    torch.manual_seed(seed)
    k = keys_of(keys, 1, 1, T, D)
    directions = F.normalize(k if along else keys_of(w, 1, 1, T, D), dim=-1)
    b = strengths(beta, 1, 1, T)
    inverse = path_precondition(k, torch.eye(T, dtype=torch.float64)[None, None], directions, b, sharpness=sharpness)
    assert torch.linalg.matrix_norm(inverse, 2).item() <= 2 * (1 + 1e-10)
    u = math.sqrt(sharpness) * F.normalize(k, dim=-1)
    P = dense_matrix(u, directions, b, None, None, None, sharpness)
    assert torch.linalg.eigvalsh((P + P.mT)[0, 0]).min().item() >= 1 - 1e-9
    torch.testing.assert_close(P @ inverse, torch.eye(T, dtype=torch.float64)[None, None], rtol=0, atol=1e-9)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("now", [63, 64, 65, 256, 300, 511])
def test_future_leaves_and_blocks_do_not_change_the_past(now, operator):
    tensors = PathCase(T=530, H=1, G=2, D=4, beta="small").tensors(operator)
    changed = {name: x.clone() for name, x in tensors.items()}
    for name, x in changed.items():
        if name != "w":
            x[:, :, now:] += 1
    whole, other = call(operator, tensors), call(operator, changed)
    assert error(other[:, :, :now], whole[:, :, :now]) < 1e-12
    assert error(other[:, :, now:], whole[:, :, now:]) > 1e-3


@pytest.mark.parametrize("options", ["plain", "past", "masked", "packed"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_inputs_are_never_modified(operator, options):
    case = PathCase(T=300, S=20 if options == "past" else 0, D=4, G=2)
    tensors = {name: x.requires_grad_() for name, x in case.tensors(operator, sharpness=True).items()}
    before = {name: x.detach().clone() for name, x in tensors.items()}
    extra = {
        "masked": {"key_mask": torch.arange(300)[None] > 30},
        "packed": {"cu_seqlens": torch.tensor([0, 280, 300])},
    }
    out = call(operator, tensors, **extra.get(options, {}))
    weight = case.weight(operator)
    upstream, held = weight.clone(), out.detach().clone()
    out.backward(weight)
    for name, x in tensors.items():
        torch.testing.assert_close(x.detach(), before[name], rtol=0, atol=0)
    torch.testing.assert_close(weight, upstream, rtol=0, atol=0)
    torch.testing.assert_close(out.detach(), held, rtol=0, atol=0)
