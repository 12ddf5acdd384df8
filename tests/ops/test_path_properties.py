"""What holds for any keys, factors and lengths, on examples that hypothesis chooses."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from lucid_attention.ops.path.api import path_attention, path_precondition
from lucid_attention.ops.path.reference import dense_matrix

from .cases import error, keys_of
from .path_cases import NEW, OPERATORS, PathCase, call, strengths, tokens

seeds = st.integers(0, 2**16)
kinds = st.sampled_from(["shifted", "close", "closest", "repeated", "equal", "runs"])
betas = st.sampled_from(["uniform", "edges", "small", "0", "1", "2", "1.9"])
operators = st.sampled_from(OPERATORS)


@st.composite
def problems(draw: st.DrawFn, longest: int = 30) -> dict[str, torch.Tensor]:
    """Arguments of `lucid_path_attention`, now and then with zero keys."""
    torch.manual_seed(draw(seeds))
    B, H, G = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    T, D, E = draw(st.integers(1, longest)), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    case = PathCase(T=T, B=B, H=H, G=G, D=D, E=E, keys=draw(kinds), w=draw(kinds), beta=draw(betas))
    tensors = case.tensors("lucid_path", sharpness=draw(st.booleans()))
    if draw(st.booleans()):
        tensors["k"][:, :, torch.rand(T) < 0.2] = 0
    return tensors


lengths = st.sampled_from([1, 2, 17, 64, 66, 130, 300])
sharpnesses = st.sampled_from([1e-3, 0.2, 1.0, 4.0, 100.0])


@given(seeds, lengths, st.integers(1, 6), kinds, kinds, betas, sharpnesses, st.booleans())
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


@given(problems(longest=150), st.sampled_from([torch.float64, torch.float32]), st.booleans())
def test_values_and_their_gradients_at_most_double(tensors, dtype, masked):
    """‖Y‖ ≤ 2‖V‖ and ‖dV‖ ≤ 2‖dY‖ in every column, with zero keys and masks."""
    tensors = {name: x.to(dtype) for name, x in tensors.items() if name != "q"}
    v = tensors["v"].requires_grad_()
    key_mask = torch.rand(v.shape[0], v.shape[2]) > 0.3 if masked else None
    y = call("precondition", tensors, key_mask=key_mask)
    dy = torch.randn_like(y)
    (dv,) = torch.autograd.grad(y, v, dy)
    slack = 2 * (1 + (1e-10 if dtype == torch.float64 else 1e-4))
    assert (y.norm(dim=2) <= slack * v.norm(dim=2)).all()
    assert (dv.norm(dim=2) <= slack * dy.norm(dim=2)).all()


@given(st.sampled_from([0.0, 2.0]), st.integers(2, 600))
def test_the_bound_is_nearly_reached_and_never_passed(strength, T):
    """Keys that every later token sees as its own: equal ones that stay, or alternating ones that are reflected."""
    sign = (-1.0) ** torch.arange(T) if strength else torch.ones(T)
    k = F.normalize(torch.ones(1, 1, T, 3), dim=-1) * sign[:, None]
    v = torch.ones(1, 1, T, 1)
    v[:, :, 1::2] = -1
    ratio = (path_precondition(k, v, k, torch.full((1, 1, T), strength)).norm() / v.norm()).item()
    assert 2 * (1 - 1 / T) < ratio <= 2 * (1 + 1e-5)


@given(problems(), operators, st.data())
def test_future_tokens_do_not_change_the_past(tensors, operator, data):
    T = tensors["k"].shape[2]
    now = data.draw(st.integers(1, T))
    changed = {name: x.clone() for name, x in tensors.items()}
    for name in NEW:
        changed[name][:, :, now:] = 10 * torch.randn_like(changed[name][:, :, now:])
    whole = call(operator, tensors)[:, :, :now]
    assert error(call(operator, tokens(tensors, slice(0, now))), whole) < 1e-11
    # Nothing may grow: an infinite future would reach the past as infinity times zero.
    changed |= {"w": F.normalize(changed["w"], dim=-1), "beta": changed["beta"].clamp(0, 2)}
    assert error(call(operator, changed)[:, :, :now], whole) < 1e-11


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


@given(problems(), st.floats(1e-3, 1e3))
def test_lucids_system_does_not_know_the_length_of_a_key(tensors, size):
    lengths = size * (0.1 + torch.rand_like(tensors["beta"]))[..., None]
    y = call("precondition", tensors)
    assert error(call("precondition", tensors | {"k": lengths * tensors["k"]}), y) < 1e-11


@given(problems(), operators)
def test_only_the_line_of_w_matters(tensors, operator):
    """β w wᵀ is the same for −w, and for w/2 with 4β."""
    out = call(operator, tensors)
    sign = torch.where(torch.rand_like(tensors["beta"]) < 0.5, -1.0, 0.5)
    other = tensors | {"w": sign[..., None] * tensors["w"], "beta": tensors["beta"] / sign.square()}
    assert error(call(operator, other), out) < 1e-11


@given(problems(longest=70), operators)
def test_a_rotation_of_all_vectors_changes_nothing(tensors, operator):
    D = tensors["k"].shape[3]
    rotation = torch.linalg.qr(torch.randn(D, D, dtype=torch.float64))[0]
    turned = tensors | {name: tensors[name] @ rotation for name in ("q", "k", "w")}
    assert error(call(operator, turned), call(operator, tensors)) < 1e-10


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


def test_a_single_head_of_one_sequence_is_not_modified_either():
    """A slice of one head is contiguous as it is, and would not be copied by chance."""
    tensors = PathCase(T=600, H=1, D=4).tensors("path", torch.float32)
    before = {name: x.clone() for name, x in tensors.items()}
    path_attention(**{name: x.requires_grad_() for name, x in tensors.items()}).sum().backward()
    for name, x in tensors.items():
        torch.testing.assert_close(x.detach(), before[name], rtol=0, atol=0)
