"""The Triton kernels in Triton's interpreter, and what `impl="triton"` says where it cannot run.

The interpreter's tests run in a process of their own: Triton reads TRITON_INTERPRET when a kernel is defined. Here is a
quick part; `make test-gpu-offline` runs all of them and compiles the kernels for GPUs.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lucid_attention import lucid_attention, lucid_decode, lucid_path_attention, path_attention, precondition
from lucid_attention.ops import dispatch
from lucid_attention.ops.lucid.decode import inverse_key_norms
from lucid_attention.ops.path.api import path_precondition
from lucid_attention.ops.path.decode import identity_factors, path_decode

ROOT = Path(__file__).resolve().parents[2]
needs_triton = pytest.mark.skipif(not dispatch.installed(), reason="Triton has wheels for Linux only")


@needs_triton
def test_the_kernels_agree_with_the_equation_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-m", "quick", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += [f"tests/ops/interpreted_{name}.py" for name in ("lucid", "decode", "path", "bounds")]
    environment = os.environ | {dispatch.INTERPRETER: "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]


def tensors(dtype=torch.float32, D=8, E=8):
    return [torch.randn(1, 2, 5, size, dtype=dtype) for size in (D, D, E)]


def refusal(call):
    with pytest.raises(ValueError, match="impl='triton' cannot run") as raised:
        call()
    return str(raised.value)


def path_step(q, k, v):
    one = [x[:, :, :1] for x in (q, v, k)]
    return path_decode(one[0], k, *one[1:], k[:, :, :1, 0], v[:, :, 1:], identity_factors(k), 2, impl="triton")


@needs_triton
def test_without_a_gpu_a_named_choice_is_refused_in_words():
    q, k, v = tensors()
    for call in (
        lambda: lucid_attention(q, k, v, impl="triton"),
        lambda: precondition(k, v, impl="triton"),
        lambda: lucid_decode(q[:, :, :1], k, v[:, :, :1], v[:, :, 1:], inverse_key_norms(k), impl="triton"),
        lambda: path_attention(q, k, v, k, k[..., 0], impl="triton"),
        lambda: lucid_path_attention(q, k, v, k, k[..., 0], impl="triton"),
        lambda: path_precondition(k, v, k, k[..., 0], impl="triton"),
        lambda: path_step(q, k, v),
    ):
        assert "CUDA and ROCm devices, got tensors on cpu" in refusal(call)


@pytest.mark.parametrize(
    ("dtype", "D", "E", "options", "word"),
    [
        (torch.float64, 8, 8, {}, "float64"),
        (torch.float32, 257, 8, {}, "D = 257"),
        (torch.float32, 8, 300, {}, "E = 300"),
        (torch.float32, 8, 8, {"norm": "row_max"}, "row_max"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused_in_words(dtype, D, E, options, word):
    q, k, v = tensors(dtype, D, E)
    assert word in refusal(lambda: precondition(k, v, impl="triton", **options))
    if not options:
        w, beta = torch.randn(k.shape), torch.rand(k.shape[:3])
        assert word in refusal(lambda: path_attention(q, k, v, w, beta, impl="triton"))
        assert word in refusal(lambda: lucid_path_attention(q, k, v, w, beta, impl="triton"))
        assert word in refusal(lambda: path_precondition(k, v, w, beta, impl="triton"))
        assert word in refusal(lambda: path_step(q, k, v))


@needs_triton
def test_an_older_triton_and_another_device_of_amd_are_refused_by_name(monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    for name, refused in (("gfx942:sramecc+:xnack-", False), ("gfx90a:sramecc+:xnack-", True)):
        properties = SimpleNamespace(gcnArchName=name)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, found=properties: found)
        assert dispatch.unusable(gpu, torch.float32) == ("it is for gfx942, got gfx90a" if refused else None)
    monkeypatch.setattr(dispatch, "package_version", lambda name: "3.3.1")
    assert dispatch.unusable(gpu, torch.float32) == "it needs Triton 3.9 or newer, got 3.3.1"


def test_auto_asks_for_proof_and_keeps_to_what_the_kernels_can_do(monkeypatch):
    like = torch.empty(1, 1, 1, 1, device="meta")
    monkeypatch.setattr(dispatch, "unusable", lambda device, dtype: None)

    class Gpu:
        device, dtype = torch.device("cuda"), torch.float32

    for proven in (False, True):
        monkeypatch.setattr(dispatch, "proven", lambda device, proven=proven: proven)
        chosen = [
            dispatch.choose("auto", dispatch.BLOCKWISE_AND_TRITON, like, reason)
            for like in (Gpu, like)
            for reason in (None, "its kernels have no norm='row_max'")
        ]
        assert chosen == ["triton" if proven else "blockwise", "blockwise", "blockwise", "blockwise"]
