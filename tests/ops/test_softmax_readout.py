"""The softmax read-out on both paths: torch's CPU kernel, and plain products where that kernel is missing."""

import pytest
import torch

from lucid_attention.ops.softmax import strips
from lucid_attention.ops.softmax.attention import softmax_attention, softmax_weights, visible_keys

from . import oracles
from .cases import assert_as_good_as, assert_exact, evaluate, widened

SHAPES = {  # B, H, G, T, S, D, E
    "one": (2, 2, 2, 1, 0, 5, 3),
    "grouped": (2, 2, 3, 37, 0, 5, 7),
    "chunk": (2, 2, 2, 37, 50, 5, 3),
    "newest": (2, 2, 2, 1, 50, 3, 5),
    "long": (1, 1, 2, 600, 0, 8, 8),
    "long chunk": (1, 1, 2, 600, 500, 8, 4),
}


@pytest.fixture(params=["kernels", "plain"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "plain":
        monkeypatch.setattr(strips, "flash_kernel_for", lambda x: False)
    return request.param


def test_torch_still_has_the_kernel_that_the_fast_path_calls():
    release = tuple(int(number) for number in torch.__version__.split(".")[:2])
    assert strips.flash_kernel_for(torch.empty(0)) == (release >= (2, 13))


@pytest.fixture(params=["wide", "narrow"])
def strip(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Strips so narrow that even short sequences and small batches need several."""
    if request.param == "narrow":
        monkeypatch.setattr(strips, "MASK_ELEMENTS", 16 * 20)
        monkeypatch.setattr(strips, "SCORE_ELEMENTS", 16 * 20)
    return request.param


def tensors_of(shape: str, dtype: torch.dtype = torch.float64) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    B, H, G, T, S, D, E = SHAPES[shape]
    q, k = torch.randn(B, H * G, T, D, dtype=dtype), 2 * torch.randn(B, H, S + T, D, dtype=dtype)
    y, weight = torch.randn(B, H, S + T, E, dtype=dtype), torch.randn(B, H * G, T, E, dtype=torch.float64)
    return {"q": q, "k": k, "y": y}, weight


def mask_for(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    B, _, N, _ = tensors["k"].shape
    mask = torch.rand(B, N) > 0.3
    mask[0, : N // 3] = False
    return mask


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_read_out_is_softmax_over_what_a_query_sees(shape, masked, path, strip):
    tensors, weight = tensors_of(shape)
    options = {"key_mask": mask_for(tensors) if masked else None, "scale": 0.7}
    truth = evaluate(oracles.read_out, tensors, weight, **options)
    assert_exact(evaluate(softmax_attention, tensors, weight, **options), truth)


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("shape", ["one", "grouped", "long"])
def test_documents_are_read_apart(shape, masked, path, strip):
    tensors, weight = tensors_of(shape)
    tensors, weight = {name: x[:1] for name, x in tensors.items()}, weight[:1]
    N = tensors["k"].shape[2]
    cu_seqlens = torch.tensor([0, N // 4, N // 4, N // 2 + 1 if N > 1 else 1, N])
    options = {"key_mask": mask_for(tensors) if masked else None, "cu_seqlens": cu_seqlens}
    truth = evaluate(oracles.read_out, tensors, weight, **options)
    assert_exact(evaluate(softmax_attention, tensors, weight, **options), truth)


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_float32_is_as_good_as_the_plain_formula(masked, path):
    tensors, weight = tensors_of("long chunk", torch.float32)
    options = {"key_mask": mask_for(tensors) if masked else None}
    truth, plain = (evaluate(oracles.read_out, x, weight, **options) for x in (widened(tensors), tensors))
    assert_as_good_as(evaluate(softmax_attention, tensors, weight, **options), plain, truth)


@pytest.mark.parametrize(("dtype", "unit"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)], ids=str)
@pytest.mark.parametrize("shape", ["grouped", "long chunk"])
def test_16_bit_read_outs_are_a_few_roundings_from_the_truth(shape, dtype, unit, path, strip):
    """Narrow strips add up dk and dy over many strips: in float32, or the error would grow with their number."""
    tensors, weight = tensors_of(shape, dtype)
    options = {"key_mask": mask_for(tensors)}
    ours = evaluate(softmax_attention, tensors, weight, **options)
    truth = evaluate(oracles.read_out, widened(tensors), weight.to(dtype).double(), **options)
    for name, x in truth.items():
        assert ours[name].dtype == dtype
        assert (ours[name].double() - x).norm() <= 2 * unit * x.norm(), name


@pytest.mark.parametrize("shape", ["grouped", "chunk"])
def test_autocast_is_the_same_as_rounding_the_inputs(shape, path):
    """Inside, autocast is off: it would narrow the products that are meant to be float32."""
    tensors, weight = tensors_of(shape, torch.bfloat16)
    key_mask = mask_for(tensors)
    rounded = evaluate(softmax_attention, tensors, weight, key_mask=key_mask)
    with torch.autocast("cpu", torch.bfloat16):
        cast = evaluate(softmax_attention, widened(tensors, torch.float32), weight, key_mask=key_mask)
    for name, x in rounded.items():
        torch.testing.assert_close(cast[name].to(torch.bfloat16), x, rtol=0, atol=0)


def test_nan_at_masked_keys_changes_nothing(path):
    tensors, weight = tensors_of("chunk")
    key_mask = mask_for(tensors)
    hidden = ~key_mask[:, None, :, None]
    weight = weight.masked_fill(hidden[:, :, 50:], 0)
    clean = evaluate(softmax_attention, tensors, weight, key_mask=key_mask)
    broken = {name: x.masked_fill(hidden[:, :, -x.shape[2] :], float("nan")) for name, x in tensors.items()}
    results = evaluate(softmax_attention, broken, weight, key_mask=key_mask)
    assert results["out"].isfinite().all()
    results["out"], clean["out"] = (x["out"].masked_fill(hidden[:, :, 50:], 0) for x in (results, clean))
    assert_exact(results, clean)


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("shape", ["one", "grouped", "chunk"])
def test_the_dense_weights_are_those_of_the_read_out(shape, masked):
    tensors, _ = tensors_of(shape)
    q, k, y = tensors.values()
    options = {"key_mask": mask_for(tensors) if masked else None, "scale": 0.7}
    weights = softmax_weights(q, k, **options)
    G = q.shape[1] // k.shape[1]
    expected = oracles.read_out(q, k, y, **options)
    torch.testing.assert_close(weights @ y.repeat_interleave(G, 1), expected)
    sums = weights.sum(-1)
    torch.testing.assert_close(sums, sums.round(), rtol=0, atol=1e-12)


def test_visible_keys_are_earlier_unmasked_and_of_the_same_document():
    key_mask = torch.tensor([[True, True, False, True, True, True]])
    seen = visible_keys(1, 4, 6, key_mask, torch.tensor([0, 0, 3, 3, 6]), torch.device("cpu"))[0, 0]
    expected = [[0, 0, 0, 0, 0, 0]] * 0 + [
        [1, 1, 0, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 1, 1, 1],
    ]
    assert seen.int().tolist() == expected
