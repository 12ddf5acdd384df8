"""A past of moved keys: chunks of any size give the full pass, and so do single tokens with lazily moved keys."""

import pytest
import torch

from lucid_attention.ops.lucid.decode import inverse_key_norms
from lucid_attention.ops.path.decode import keys_at_end

from .cases import assert_exact, error
from .path_cases import OPERATORS, PathCase, call, evaluate, moved_keys, tokens


def chunked(
    operator: str, tensors: dict, cuts: list[int], key_mask: torch.Tensor | None = None, **options
) -> torch.Tensor:
    """The operator on pieces, each after the cache that the pieces before it leave."""
    k, T = tensors["k"], tensors["k"].shape[2]
    keys, values, outputs = None, tensors["v"][:, :, :0], []
    for start, stop in zip([0, *cuts], [*cuts, T], strict=True):
        here = tokens(tensors, slice(start, stop))
        mask = None if key_mask is None else key_mask[:, :stop]
        if keys is not None:
            here |= {"k_past": keys, "y_past": values, "inverse_norms": inverse_key_norms(k[:, :, :start])}
        outputs.append(call(operator, here, key_mask=mask, **options))
        if operator == "path":
            new = here["v"]
        else:
            kept = {name: x for name, x in options.items() if name != "scale"}
            new = call("precondition", here, key_mask=mask, **kept)
        values = torch.cat([values, new], 2)
        keys = keys_at_end(here["k"], here["w"], here["beta"], past=keys, key_mask=mask)
    return torch.cat(outputs, 2)


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("cuts", [[64, 128, 256], [1, 300], [599], [250, 251, 590]], ids=str)
def test_chunks_across_leaves_and_blocks_give_the_full_pass(cuts, operator, masked):
    tensors = PathCase(T=600, G=2, D=4, beta="small", keys="close").tensors("lucid_path", sharpness=True)
    key_mask = torch.rand(1, 600) > 0.2 if masked else None
    whole = call(operator, tensors, key_mask=key_mask)
    assert error(chunked(operator, tensors, cuts, key_mask), whole) < 1e-11


@pytest.mark.parametrize("operator", OPERATORS)
def test_gradients_flow_through_the_past_into_the_tokens_that_made_it(operator):
    """keys_at_end is differentiable, so that a long context can be trained on in pieces."""
    case = PathCase(T=150, G=2, D=4, beta="edges")
    tensors, weight = case.tensors(operator, sharpness=True), case.weight(operator)

    def in_pieces(operator, leaves):
        return chunked(operator, leaves, [20, 100])

    assert_exact(evaluate(in_pieces, operator, tensors, weight), evaluate(call, operator, tensors, weight))


@pytest.mark.parametrize("S", [0, 5, 200])
@pytest.mark.parametrize("T", [1, 63, 64, 65, 200])
def test_moved_keys_are_explicit_products(T, S):
    tensors = PathCase(T=T, S=S, B=2, D=4, beta="edges" if T < 64 else "small").tensors("path")
    k, w, beta, past = (tensors.get(name) for name in ("k", "w", "beta", "k_past"))
    made = keys_at_end(k, w, beta, past=past)
    assert made.shape == (2, 2, S + T, 4)
    for b in range(2):
        old = k[b, :, :0] if past is None else past[b]
        assert error(made[b], moved_keys(k[b], w[b], beta[b], old)[-1]) < 1e-12
    torch.testing.assert_close(made[:, :, -1], k[:, :, -1], rtol=0, atol=0)


@pytest.mark.parametrize("filling", [0.0, float("nan"), float("inf")])
def test_moved_keys_know_nothing_of_masked_tokens_and_are_zero_there(filling):
    tensors = PathCase(T=80, S=9, B=3, D=4).tensors("path")
    k, w, beta, past = (tensors[name] for name in ("k", "w", "beta", "k_past"))
    key_mask = torch.rand(3, 89) > 0.3
    key_mask[2] = False
    for x, hidden in ((k, ~key_mask[:, 9:]), (w, ~key_mask[:, 9:]), (beta, ~key_mask[:, 9:]), (past, ~key_mask[:, :9])):
        x[hidden[:, None].expand(x.shape[:3])] = filling
    inputs = [x.requires_grad_() for x in (k, w, beta, past)]
    made = keys_at_end(k, w, beta, past=past, key_mask=key_mask)
    for b in range(3):
        old, new = key_mask[b, :9].nonzero()[:, 0], key_mask[b, 9:].nonzero()[:, 0]
        assert (made[b, :, ~key_mask[b]] == 0).all()
        if len(new):
            expected = moved_keys(k[b, :, new], w[b, :, new], beta[b, :, new], past[b, :, old])[-1]
            assert error(made[b, :, key_mask[b]], expected) < 1e-12
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(made.sum(), inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_moved_keys_have_the_dtype_of_the_keys_and_are_rounded_once(dtype):
    tensors = PathCase(T=130, S=5, D=8, beta="small").tensors("path", dtype)
    args = [tensors[name] for name in ("k", "w", "beta")]
    made = keys_at_end(*args, past=tensors["k_past"])
    assert made.dtype == dtype
    wide = keys_at_end(*(x.double() for x in args), past=tensors["k_past"].double())
    unit = torch.finfo(dtype).eps
    assert error(made, wide) <= max(unit, 2e-6)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(keys_at_end(*args, past=tensors["k_past"]), made, rtol=0, atol=0)
