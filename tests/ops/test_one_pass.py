"""Decoding in one pass over the cache, by Numba: what torch gives in float64."""

import multiprocessing
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from lucid_attention import inverse_key_norms, lucid_decode
from lucid_attention.ops.path.decode import path_decode
from lucid_attention.ops.path.factors import identity_factors
from lucid_attention.ops.softmax import fused_step

pytest.importorskip("numba")
# The first use of a dtype compiles, for tens of seconds.
pytestmark = pytest.mark.slow


def correlated(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64) + 1.5


def cache(
    B: int = 2, H: int = 2, G: int = 3, S: int = 300, D: int = 12, E: int = 20, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """A token and its cache, in numbers that the dtype holds. One key is repeated, one is zero."""
    k = correlated(B, H, S + 1, D, seed=1)
    if S > 5:
        k[:, :, 3] = k[:, :, -1]
        k[:, :, 4] = 0
    tensors = {"q": correlated(B, H * G, 1, D), "k": k, "v": correlated(B, H, 1, E, seed=2)}
    tensors["y_past"] = correlated(B, H, S, E, seed=3) - 1.5
    return {name: x.to(dtype) for name, x in tensors.items()}


def step(tensors: dict[str, Tensor], impl: str, dtype: torch.dtype | None = None, **options: Any) -> Any:
    cast = {name: x if dtype is None else x.to(dtype) for name, x in tensors.items()}
    options = {
        name: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and dtype else x
        for name, x in options.items()
    }
    return lucid_decode(**cast, inverse_norms=inverse_key_norms(cast["k"]), impl=impl, **options)


def assert_right(tensors: dict[str, Tensor], tolerance: float = 2e-5, **options: Any) -> None:
    fast, truth = step(tensors, "numba", **options), step(tensors, "torch", torch.float64, **options)
    for name in ("o", "y"):
        got, expected = getattr(fast, name), getattr(truth, name)
        assert got.dtype == tensors["k"].dtype
        assert (got.double() - expected).abs().max() <= tolerance * max(1.0, float(expected.abs().max()))


def masks(B: int, total: int) -> dict[str, Tensor]:
    left, holes, new = (torch.ones(B, total, dtype=torch.bool) for _ in range(3))
    left[0, : total // 2] = False
    holes[:, 1::3] = False
    holes[:, -1] = True
    new[0, -1] = False
    nothing = torch.zeros(B, total, dtype=torch.bool)
    return {"left": left, "holes": holes, "new": new, "nothing": nothing}


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
    assert step(tensors, "numba", norm=norm, key_mask=mask).o.isfinite().all()


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


def test_a_named_implementation_is_obeyed_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"impl must be one of 'auto', 'torch', 'numba', got 'numa'"):
        step(cache(), "numa")
    with pytest.raises(ValueError, match=r"impl='numba' cannot run: .*float64"):
        step(cache(dtype=torch.float64), "numba")
    monkeypatch.setattr(fused_step, "_kernel", lambda: "numba is not installed: pip install it")
    with pytest.raises(ValueError, match="numba is not installed"):
        step(cache(), "numba")
    step(cache(), "auto")


def test_if_numba_fails_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no such CPU")

    monkeypatch.setattr(fused_step, "_kernel", lambda: (fail, lambda count: None))
    monkeypatch.setattr(fused_step, "_stopped", [])
    with pytest.raises(RuntimeError, match="impl='numba' failed, 'torch' works everywhere: no such CPU"):
        step(cache(), "numba")


def _decode_in_child(results: Any) -> None:
    # As torch's own workers do: threads of OpenMP do not survive a fork.
    torch.set_num_threads(1)
    results.put(step(cache(), "auto").o.tolist())


def test_a_forked_process_decodes_without_it() -> None:
    expected = step(cache(), "numba").o
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=_decode_in_child, args=(results,))
    child.start()
    child.join(120)
    assert child.exitcode == 0
    torch.testing.assert_close(torch.tensor(results.get()), expected, rtol=1e-4, atol=1e-4)


def test_importing_the_package_and_decoding_elsewhere_imports_no_numba() -> None:
    code = "import sys, lucid_attention.ops.lucid.decode as d; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
