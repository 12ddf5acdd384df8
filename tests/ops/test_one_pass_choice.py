"""When decoding runs in one pass, by Numba: where it can, and nowhere else."""

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
from lucid_attention.ops.softmax import fused_step
from lucid_attention.ops.softmax.attention import softmax_attention, softmax_weights
from tests.ops.one_pass_cases import cache, masks, step

pytest.importorskip("numba")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A list that has one more entry for every step in one pass."""
    calls: list[Any] = []
    run = fused_step.run

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        return run(*arguments, **options)

    monkeypatch.setattr(fused_step, "run", counted)
    return calls


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


@pytest.mark.parametrize("name", ["q", "v", "y_past"])
def test_a_mixture_of_dtypes_under_autocast_is_torchs(name: str, runs: list[Any]) -> None:
    tensors = cache()
    with torch.autocast("cpu", torch.bfloat16):
        step(tensors | {name: tensors[name].bfloat16()}, "auto")
    assert not runs


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
    with pytest.raises(ValueError, match=r"impl must be one of 'auto', 'torch', 'numba', 'triton', got 'numa'"):
        step(cache(), "numa")
    with pytest.raises(ValueError, match=r"impl='numba' cannot run: .*float64"):
        step(cache(dtype=torch.float64), "numba")


@pytest.fixture
def fresh() -> Iterator[None]:
    """No kernel is known before and after the test."""
    fused_step.kernels.cache_clear()
    yield
    fused_step.kernels.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_without_the_extra_it_is_torch(
    monkeypatch: pytest.MonkeyPatch, runs: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "lucid_attention.ops.softmax.numba_step", raising=False)
    monkeypatch.setitem(sys.modules, "numba", None)
    tensors = cache()
    assert torch.equal(step(tensors, "auto").o, step(tensors, "torch").o)
    assert not runs
    assert not caplog.records
    with pytest.raises(ValueError, match=r"impl='numba' cannot run: numba is not installed: in a checkout"):
        step(tensors, "numba")


@pytest.mark.usefixtures("fresh")
def test_if_numba_fails_it_is_said_once_and_torch_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("no such CPU")

    monkeypatch.setattr("lucid_attention.ops.softmax.numba_step.step", fail)
    for _ in range(2):
        assert torch.equal(step(cache(), "auto").o, step(cache(), "torch").o)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "lucid_attention continues with torch, because Numba failed: no such CPU"
    ]
    with pytest.raises(ValueError, match="impl='numba' cannot run: Numba failed: no such CPU"):
        step(cache(), "numba")


@pytest.mark.slow
def test_it_compiles_where_no_folder_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code = "import torch; from tests.ops.one_pass_cases import cache, step; print(step(cache(), 'numba').o.sum())"
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "file" / "folder")}
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd=root, env=environment)


def _decode_in_child(results: Any) -> None:
    # As torch's own workers do: threads of OpenMP do not survive a fork. Ours are started again.
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


def test_a_process_can_go_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_step, "_off", [])
    fused_step.switch_off("an engine forbids it")
    with pytest.raises(ValueError, match="impl='numba' cannot run: an engine forbids it"):
        step(cache(), "numba")
    step(cache(), "auto")
