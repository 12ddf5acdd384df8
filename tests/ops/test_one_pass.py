"""Decoding in one pass over the cache, by Numba: what torch gives in float64."""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from lucid_attention import inverse_key_norms, lucid_decode
from lucid_attention.ops import native
from lucid_attention.ops.path.decode import path_decode
from lucid_attention.ops.path.factors import identity_factors
from lucid_attention.ops.softmax import fused_step
from lucid_attention.ops.softmax.attention import softmax_attention, softmax_weights

pytest.importorskip("numba")


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


@pytest.mark.parametrize("place", [-1, 300])
def test_a_position_outside_of_the_buffer_is_refused(place: int) -> None:
    tensors = cache(S=299)
    tensors["y_past"] = torch.nn.functional.pad(tensors["y_past"], (0, 0, 0, 1))
    with pytest.raises(IndexError, match=rf"position must be in \[0, M\) = \[0, 300\), got {place}"):
        step(tensors, "numba", key_mask=torch.ones(2, 300, dtype=torch.bool), position=torch.tensor(place))


@pytest.mark.parametrize("name", ["q", "v", "y_past"])
def test_a_mixture_of_dtypes_under_autocast_is_torchs(name: str, runs: list[Any]) -> None:
    tensors = cache()
    with torch.autocast("cpu", torch.bfloat16):
        step(tensors | {name: tensors[name].bfloat16()}, "auto")
    assert not runs


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


@pytest.mark.parametrize("kind", ["none", "left", "new", "nothing"])
@pytest.mark.parametrize("groups", [1, 3])
def test_plain_softmax(groups: int, kind: str, runs: list[Any]) -> None:
    tensors = cache(G=groups)
    mask = None if kind == "none" else masks(2, 301)[kind]
    q, k, y = tensors["q"], tensors["k"], torch.cat([tensors["y_past"], tensors["v"]], 2)
    got = softmax_attention(q, k, y, key_mask=mask, scale=0.1)
    assert len(runs) == 1
    weights = softmax_weights(q.double(), k.double(), key_mask=mask, scale=0.1)
    truth = weights @ y.double().repeat_interleave(groups, 1)
    torch.testing.assert_close(got.double(), truth, rtol=2e-5, atol=2e-5)


def test_a_gradient_goes_through_torch(runs: list[Any]) -> None:
    tensors = cache()
    y = torch.cat([tensors["y_past"], tensors["v"]], 2).requires_grad_()
    softmax_attention(tensors["q"], tensors["k"], y).sum().backward()
    assert y.grad is not None
    assert not runs


@pytest.mark.parametrize("where", ["key", "value", "query"])
def test_what_is_not_a_number_is_not_hidden(where: str) -> None:
    for norm in ("key", "qk", "row_max"):
        tensors = cache()
        tensors[{"key": "k", "value": "y_past", "query": "q"}[where]][0, 0, 0, 0] = torch.nan
        fast, plain = (step(tensors, impl, norm=norm) for impl in ("numba", "torch"))
        assert torch.equal(fast.o.isnan(), plain.o.isnan())
        assert torch.equal(fast.y.isnan(), plain.y.isnan())


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A list that has one more entry for every step in one pass."""
    calls: list[Any] = []
    run = fused_step.run

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return run(*arguments)

    monkeypatch.setattr(fused_step, "run", counted)
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_auto_takes_it(dtype: torch.dtype, runs: list[Any]) -> None:
    tensors = cache(dtype=dtype)
    o = step(tensors, "auto").o
    assert len(runs) == 1
    assert torch.equal(o, step(tensors, "numba").o)
    assert step(cache(dtype=torch.float64), "auto").o.dtype == torch.float64
    assert len(runs) == 2


def _compiled(tensors: dict[str, Tensor]) -> Tensor:
    inverse = inverse_key_norms(tensors["k"])
    whole = torch.compile(lambda **x: lucid_decode(**x, inverse_norms=inverse).o, fullgraph=True, backend="eager")
    return whole(**tensors)


def _mapped(tensors: dict[str, Tensor]) -> Tensor:
    inverse = inverse_key_norms(tensors["k"])
    return torch.vmap(lambda q: lucid_decode(**tensors | {"q": q}, inverse_norms=inverse).o)(tensors["q"][None])[0]


def _traced(tensors: dict[str, Tensor]) -> Tensor:
    inverse = inverse_key_norms(tensors["k"])
    graph = make_fx(lambda q: lucid_decode(**tensors | {"q": q}, inverse_norms=inverse).o)(tensors["q"])
    return graph(tensors["q"])


def _beside_a_transpose(tensors: dict[str, Tensor]) -> Tensor:
    across = tensors | {"k": tensors["k"].mT.contiguous().mT}
    return step(across, "auto").o


@pytest.mark.parametrize("way", [_compiled, _mapped, _traced, _beside_a_transpose])
def test_where_it_cannot_run_auto_is_torch(way: Any, runs: list[Any]) -> None:
    tensors = cache()
    o = way(tensors)
    assert not runs
    torch.testing.assert_close(o, step(tensors, "torch").o)


def test_a_named_implementation_is_obeyed_or_refused() -> None:
    with pytest.raises(ValueError, match=r"impl must be one of 'auto', 'torch', 'numba', got 'numa'"):
        step(cache(), "numa")
    with pytest.raises(ValueError, match=r"impl='numba' cannot run: .*float64"):
        step(cache(dtype=torch.float64), "numba")


@pytest.fixture
def fresh() -> Iterator[None]:
    """No kernel is known before and after the test."""
    native.compiled.cache_clear()
    yield
    native.compiled.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_without_the_extra_it_is_torch(
    monkeypatch: pytest.MonkeyPatch, runs: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "lucid_attention.ops.softmax.numba_step", raising=False)
    monkeypatch.delattr("lucid_attention.ops.softmax.numba_step", raising=False)
    monkeypatch.setitem(sys.modules, "numba", None)
    tensors = cache()
    assert torch.equal(step(tensors, "auto").o, step(tensors, "torch").o)
    assert not runs
    assert not caplog.records
    with pytest.raises(ValueError, match=r"impl='numba' cannot run: numba is not installed: pip install"):
        step(tensors, "numba")


@pytest.mark.usefixtures("fresh")
def test_if_numba_fails_it_is_said_once_and_torch_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(dtype: str, cache: bool) -> None:
        raise RuntimeError("no such CPU")

    monkeypatch.setattr("lucid_attention.ops.softmax.numba_step.compiled", fail)
    for _ in range(2):
        assert torch.equal(step(cache(), "auto").o, step(cache(), "torch").o)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "lucid_attention goes on with torch, because Numba failed: no such CPU"
    ]
    with pytest.raises(ValueError, match="impl='numba' cannot run: Numba failed: no such CPU"):
        step(cache(), "numba")


@pytest.mark.usefixtures("fresh")
def test_a_folder_that_cannot_be_written_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, runs: list[Any]
) -> None:
    from lucid_attention.ops.softmax import numba_step

    compiled = numba_step.compiled

    def refuse(dtype: str, cache: bool) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return compiled(dtype, True)

    monkeypatch.setattr(numba_step, "compiled", refuse)
    step(cache(), "auto")
    assert len(runs) == 1
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_code_of_other_sources_is_not_taken_from_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    from lucid_attention.ops.softmax import numba_step

    kernel = numba_step.compiled("float32", cache=True)
    key = kernel._cache._index_key(kernel._sig, kernel._library.codegen)
    monkeypatch.setattr(numba_step, "sources", lambda: 12345)
    monkeypatch.setattr(numba_step, "cfunc", lambda sig, **_: lambda function: (sig, function))
    _, other = numba_step.compiled("float32", cache=True)
    from numba.core.caching import FunctionCache

    assert FunctionCache(other)._index_key(kernel._sig, kernel._library.codegen) != key


@pytest.mark.slow
def test_it_compiles_where_no_folder_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code = "import torch; from tests.ops.test_one_pass import cache, step; print(step(cache(), 'numba').o.sum())"
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "file" / "folder")}
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd=root, env=environment)


def _decode_in_child(results: Any) -> None:
    # As torch's own workers do: threads of OpenMP do not survive a fork.
    torch.set_num_threads(1)
    results.put(step(cache(S=3000), "numba").o.tolist())


def test_a_forked_process_decodes() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected = step(cache(S=3000), "numba").o
        context = multiprocessing.get_context("fork")
        results = context.SimpleQueue()
        child = context.Process(target=_decode_in_child, args=(results,))
        child.start()
        child.join(120)
    finally:
        torch.set_num_threads(before)
    assert child.exitcode == 0
    torch.testing.assert_close(torch.tensor(results.get()), expected, rtol=1e-4, atol=1e-4)


def test_several_python_threads_decode_at_once() -> None:
    expected = step(cache(S=3000), "numba")
    with ThreadPoolExecutor(3) as pool:
        for got in pool.map(lambda _: step(cache(S=3000), "numba"), range(30)):
            assert torch.equal(got.o, expected.o)
            assert torch.equal(got.y, expected.y)


def test_importing_the_package_imports_no_numba() -> None:
    code = "import sys, lucid_attention.ops.lucid.decode as d; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
