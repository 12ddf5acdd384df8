"""Decoding in one pass over the cache, by Numba: what torch gives in float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lucid_attention import inverse_key_norms, lucid_decode
from lucid_attention.ops.path.decode import identity_factors, path_decode
from tests.ops.one_pass_cases import cache, correlated, masks, step

pytest.importorskip("numba")


def assert_right(tensors: dict[str, Tensor], tolerance: float = 2e-5, **options: Any) -> None:
    fast, truth = step(tensors, "numba", **options), step(tensors, "torch", torch.float64, **options)
    for name in ("o", "y"):
        got, expected = getattr(fast, name), getattr(truth, name)
        assert got.dtype == tensors["k"].dtype
        assert (got.double() - expected).abs().max() <= tolerance * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("norm", ["key", "qk", "row_max"])
@pytest.mark.parametrize(
    "shape",
    [
        {"S": 0},
        {"S": 1},
        {"S": 127, "D": 7, "E": 5},
        {"S": 128, "G": 1},
        {"S": 517, "B": 1, "H": 1, "G": 9, "D": 68},
        {"S": 260, "H": 3, "D": 64, "E": 64},
        {"S": 260, "G": 1, "D": 64, "E": 68},
    ],
    ids=str,
)
def test_it_is_the_step_of_torch(norm: str, shape: dict[str, int]) -> None:
    assert_right(cache(**shape), norm=norm)


@pytest.mark.parametrize("norm", ["key", "qk", "row_max"])
@pytest.mark.parametrize(
    "options",
    [
        {"strength": 0.3},
        {"sharpness": 0.7},
        {"sharpness": torch.tensor([0.5, 6.0])},
        {"scale": 0.05},
        {"beta": torch.rand(2, 2, 1, generator=torch.Generator().manual_seed(0))},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options(norm: str, options: dict[str, Any]) -> None:
    assert_right(cache(), norm=norm, **options)


@pytest.mark.parametrize("norm", ["key", "qk", "row_max"])
@pytest.mark.parametrize("kind", ["left", "holes", "new", "nothing"])
def test_masked_keys_take_no_part(kind: str, norm: str) -> None:
    tensors = cache()
    mask = masks(2, 301)[kind]
    assert_right(tensors, norm=norm, key_mask=mask)
    tensors["k"][~mask[:, None].expand(2, 2, 301)] = torch.nan
    tensors["k"][:, :, -1] = 1
    for name in ("q", "v"):
        tensors[name][~mask[:, -1]] = torch.nan
    decoded = step(tensors, "numba", norm=norm, key_mask=mask)
    assert decoded.o.isfinite().all()
    assert decoded.y.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", ["key", "qk", "row_max"])
def test_a_16_bit_cache_is_read_as_it_is(norm: str, dtype: torch.dtype) -> None:
    tensors = cache(dtype=dtype)
    fast, torch_ = step(tensors, "numba", norm=norm), step(tensors, "torch", norm=norm)
    truth = step(tensors, "torch", torch.float64, norm=norm)
    for name in ("o", "y"):
        exact = getattr(truth, name)
        errors = [(getattr(one, name).double() - exact).abs().max() for one in (fast, torch_)]
        # Both round the same number: they may differ where it lies between two of the dtype.
        assert errors[0] <= 1.01 * errors[1] + 1e-6
        assert getattr(fast, name).dtype == dtype


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("norm", ["key", "row_max"])
def test_the_keys_of_few_heads_are_divided(threads: int, norm: str) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_right(cache(B=1, H=1, S=2500), norm=norm)
        mask = torch.ones(1, 2501, dtype=torch.bool)
        mask[:, :1700] = False
        assert_right(cache(B=1, H=1, S=2500), norm=norm, key_mask=mask)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("place", [0, 1, 130, 299])
def test_buffers_with_a_position(place: int) -> None:
    tensors = cache(S=299)
    tensors["y_past"] = torch.nn.functional.pad(tensors["y_past"], (0, 0, 0, 1))
    mask = (torch.arange(300) <= place).expand(2, 300)
    assert_right(tensors, key_mask=mask, position=torch.tensor(place))


@pytest.mark.parametrize("impl", ["numba", "torch"])
def test_places_after_the_position_take_no_part(impl: str) -> None:
    tensors = cache(S=299)
    tensors["y_past"] = torch.nn.functional.pad(tensors["y_past"], (0, 0, 0, 1))
    masks = (torch.arange(300) <= 130).expand(2, 300), torch.ones(2, 300, dtype=torch.bool)
    truth, got = (step(tensors, impl, key_mask=mask, position=torch.tensor(130)) for mask in masks)
    assert torch.equal(got.o, truth.o)
    assert torch.equal(got.y, truth.y)


class Wrapper(Tensor):
    """Another tensor without memory of its own, as a DTensor is."""

    @staticmethod
    def __new__(cls, inside: Tensor) -> "Wrapper":
        return Tensor._make_wrapper_subclass(cls, inside.shape, dtype=inside.dtype)

    def __init__(self, inside: Tensor) -> None:
        self.inside = inside

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Wrapper, lambda x: x.inside, (args, kwargs or {}))
        return function(*args, **kwargs)


@pytest.mark.parametrize("name", ["beta", "sharpness", "key_mask", "inverse_norms"])
def test_a_wrapper_or_negative_view_in_any_place_is_read_right(name: str) -> None:
    tensors = cache(B=1, H=1)
    plain = {"beta": torch.full((1, 1, 1), 0.3), "sharpness": torch.tensor([2.0]), "key_mask": masks(1, 301)["holes"]}
    plain["inverse_norms"] = inverse_key_norms(tensors["k"])
    truth, x = lucid_decode(**tensors, **plain, impl="torch"), plain[name]
    views = [Wrapper(x)]
    if x.is_floating_point():
        views.append(torch.complex(torch.zeros_like(x), -x).conj().imag)
        assert views[1].is_neg()
    for view in views:
        got = lucid_decode(**tensors, **plain | {name: view})
        torch.testing.assert_close(tuple(got), tuple(truth))


@pytest.mark.parametrize("place", [-1, 300])
def test_a_position_outside_of_the_buffer_is_refused(place: int) -> None:
    tensors = cache(S=299)
    tensors["y_past"] = torch.nn.functional.pad(tensors["y_past"], (0, 0, 0, 1))
    with pytest.raises(IndexError, match=rf"position must be in \[0, M\) = \[0, 300\), got {place}"):
        step(tensors, "numba", key_mask=torch.ones(2, 300, dtype=torch.bool), position=torch.tensor(place))


def test_parts_of_larger_buffers() -> None:
    whole = cache(S=200)
    k, y = torch.zeros(2, 2, 400, 12), torch.zeros(2, 2, 400, 20)
    k[:, :, :201], y[:, :, :200] = whole["k"], whole["y_past"]
    parts = whole | {"k": k[:, :, :201], "y_past": y[:, :, :200]}
    assert torch.equal(step(parts, "numba").o, step(whole, "numba").o)


@pytest.mark.parametrize("preconditioned", [True, False])
@pytest.mark.parametrize("pending", [0, 150, 200])
def test_path(pending: int, preconditioned: bool) -> None:
    tensors = cache(S=200)
    w = torch.nn.functional.normalize(correlated(2, 2, 1, 12, seed=5), dim=-1)
    beta = torch.full((2, 2, 1), 1.3, dtype=torch.float64)
    product = identity_factors(tensors["k"].double()) + 0.1 * correlated(2, 2, 12, 12, seed=6)

    def decode(impl: str, dtype: torch.dtype) -> Any:
        cast = {name: x.to(dtype) for name, x in tensors.items()}
        inverse = inverse_key_norms(cast["k"]) if preconditioned else None
        factors = w.to(dtype), beta.to(dtype), cast["y_past"], product.to(dtype)
        return path_decode(
            cast["q"], cast["k"], cast["v"], *factors, pending, inverse_norms=inverse, scale=0.1, impl=impl
        )

    fast, truth = decode("numba", torch.float32), decode("torch", torch.float64)
    for got, expected in zip(fast, truth, strict=True):
        assert (got.double() - expected).abs().max() <= 3e-5 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("where", ["key", "value", "query"])
def test_what_is_not_a_number_is_not_hidden(where: str) -> None:
    for norm in ("key", "qk", "row_max"):
        tensors = cache()
        tensors[{"key": "k", "value": "y_past", "query": "q"}[where]][0, 0, 0, 0] = torch.nan
        fast, plain = (step(tensors, impl, norm=norm) for impl in ("numba", "torch"))
        assert torch.equal(fast.o.isnan(), plain.o.isnan())
        assert torch.equal(fast.y.isnan(), plain.y.isnan())


def test_the_exponential_is_that_of_torch() -> None:
    from lucid_attention.ops.softmax.numba_step import exponential

    x = torch.linspace(-86.5, 88, 2001)
    truth = x.double().exp()
    got = torch.tensor([exponential(value) for value in x.numpy()], dtype=torch.float64)
    assert ((got - truth) / truth).abs().max() <= 2e-7
    edges = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1000.0, -1000.0, 89.0, -104.0])
    got = torch.tensor([exponential(value) for value in edges.numpy()])
    torch.testing.assert_close(got, edges.exp(), equal_nan=True, rtol=2e-7, atol=1e-44)


def test_every_float16_is_read_right() -> None:
    from lucid_attention.ops.softmax.numba_step import from_half

    x = torch.arange(-(2**15), 2**15).to(torch.int16)
    got = torch.tensor([from_half(bits) for bits in x.numpy()])
    torch.testing.assert_close(got, x.view(torch.float16).float(), rtol=0, atol=0, equal_nan=True)


def test_the_memory_of_a_step_does_not_depend_on_defaults() -> None:
    tensors, before = cache(S=600, D=64, E=64), torch.get_default_dtype()
    expected = step(tensors, "numba")
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("meta"):
            got = step(tensors, "numba")
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(got.o, expected.o)
    assert torch.equal(got.y, expected.y)


def _without_norm(norms: Tensor, place: int) -> Tensor:
    norms = norms.clone()
    norms[:, :, place] = torch.nan
    return norms


@pytest.mark.parametrize("norm", ["key", "qk", "row_max"])
@pytest.mark.parametrize("impl", ["numba", "torch"])
@pytest.mark.parametrize("wide", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("shape", [{}, {"B": 1, "H": 1, "S": 2500}], ids=["heads", "pieces"])
def test_a_missing_norm_is_written(norm: str, impl: str, wide: bool, shape: dict[str, int]) -> None:
    tensors = cache(**shape)
    whole = inverse_key_norms(tensors["k"])
    whole = whole.double() if wide else whole
    norms, before = _without_norm(whole, -1), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        got = lucid_decode(**tensors, inverse_norms=norms, norm_known=False, norm=norm, impl=impl)
        expected = lucid_decode(**tensors, inverse_norms=whole, norm=norm, impl=impl)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(norms, whole, rtol=1e-6, atol=0)
    for name in ("o", "y"):
        torch.testing.assert_close(getattr(got, name), getattr(expected, name), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", ["numba", "torch"])
def test_a_missing_norm_is_written_into_a_buffer(impl: str) -> None:
    tensors = cache(S=299)
    tensors["y_past"] = torch.nn.functional.pad(tensors["y_past"], (0, 0, 0, 1))
    whole = inverse_key_norms(tensors["k"])
    norms = _without_norm(whole, 130)
    mask = (torch.arange(300) <= 130).expand(2, 300)
    options = {"key_mask": mask, "position": torch.tensor(130), "impl": impl}
    got = lucid_decode(**tensors, inverse_norms=norms, norm_known=False, **options)
    torch.testing.assert_close(norms, whole, rtol=1e-6, atol=0)
    torch.testing.assert_close(got.y, lucid_decode(**tensors, inverse_norms=whole, **options).y)


@pytest.mark.parametrize("impl", ["numba", "torch"])
def test_norms_that_share_a_place_cannot_be_written(impl: str) -> None:
    tensors = cache()
    shared = inverse_key_norms(tensors["k"])[:1, :1].expand(2, 2, 301)
    with pytest.raises(RuntimeError, match="single memory location"):
        lucid_decode(**tensors, inverse_norms=shared, norm_known=False, impl=impl)
