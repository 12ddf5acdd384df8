"""`lucid doctor`: what is wrong is found and reported, and "auto" uses kernels that it has proved."""

import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from lucid_attention import doctor
from lucid_attention.doctor import Case
from lucid_attention.ops import dispatch
from lucid_attention.ops.lucid import blockwise
from lucid_lab.cli import main

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
PROBE = doctor.PROBE
CASES = (
    Case("precondition", torch.float32, T=40, D=16, E=8, options=("beta",)),
    Case("precondition", torch.bfloat16, T=40, S=10, D=16, E=8, options=("mask", "sharpness")),
    Case("lucid_attention", torch.bfloat16, T=40, G=2, D=16, E=16, options=("packed",)),
    Case("lucid_decode", torch.float16, S=40, G=2, D=16, E=8, options=("static",)),
    Case("lucid_path_attention", torch.float32, T=40, D=8, E=8, options=("mask",)),
    Case("path_decode", torch.float32, S=40, D=8, E=8),
    Case("delta_attention", torch.float32, T=40, D=8, E=8),
)


@pytest.fixture(autouse=True)
def small_cases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "QUICK", CASES)
    monkeypatch.setattr(doctor, "PROBE", "")
    monkeypatch.setenv(dispatch.FOLDER, str(tmp_path / "cache"))
    monkeypatch.delenv(dispatch.SWITCH, raising=False)


def diagnosis(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any], str]:
    code = main(["doctor", "--quick", "--device", "cpu", "--json", "-"])
    captured = capsys.readouterr()
    return code, json.loads(captured.out), captured.err


def test_on_a_healthy_machine_everything_is_right(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "PROBE", PROBE)
    code, found, text = diagnosis(capsys)
    assert code == 0
    assert all(check["ok"] and check["error"] <= check["allowed"] for check in found["checks"])
    checked = {(check["operator"], check["impl"]) for check in found["checks"]}
    assert {("precondition", "blockwise"), ("path_decode", "torch"), ("delta_attention", "chunkwise")} <= checked
    assert found["environment"]["torch"] == torch.__version__
    assert any("triton" in line for line in found["not_run"])
    assert "impl='auto' on cpu uses for lucid_attention and precondition: blockwise" in text
    assert f"All {len(found['checks'])} checks are right on cpu" in text
    assert ("path_decode): numba" in text) == (find_spec("numba") is not None)
    assert text.count("right") >= 2 * len(found["checks"])


def wrong_by_a_percent(solve: Any) -> Any:
    def broken(y: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        solve(y, *args, **kwargs)
        y[:, 7] *= 1.05

    return broken


def different_every_time(solve: Any) -> Any:
    calls = []

    def broken(y: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        solve(y, *args, **kwargs)
        calls.append(1)
        y[:, 7] *= 1 + 1e-6 * len(calls)

    return broken


def unwritten(solve: Any) -> Any:
    def broken(y: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        solve(y, *args, **kwargs)
        y[:, 7] = torch.empty_like(y[:, 7])

    return broken


def crashing(solve: Any) -> Any:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    return broken


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (wrong_by_a_percent, "is wrong"),
        (different_every_time, "two runs differ"),
        (unwritten, "not finite"),
        (crashing, "illegal memory access"),
    ],
)
def test_a_broken_implementation_is_named_and_the_exit_code_says_so(break_it, says, monkeypatch, capsys):
    monkeypatch.setattr(blockwise, "solve_", break_it(blockwise.solve_))
    monkeypatch.setattr(doctor, "QUICK", CASES[:1])
    code, found, text = diagnosis(capsys)
    assert code == 1
    assert {check["impl"]: check["ok"] for check in found["checks"]} == {"reference": True, "blockwise": False}
    assert says in next(check["about"] for check in found["checks"] if not check["ok"])
    assert "WRONG on this device: blockwise" in text


def test_a_cpu_that_ends_the_process_in_16_bits_is_named_with_the_setting(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "PROBE", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    assert main(["doctor", "--quick", "--device", "cpu"]) == 1
    assert "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16" in capsys.readouterr().out


def test_a_solve_that_does_nothing_is_found_in_every_case(monkeypatch):
    """Keys are correlated, so P is far from the identity."""
    monkeypatch.setattr(blockwise, "solve_", lambda y, *args, **kwargs: None)
    cases = [case for case in doctor.ALL if case.operator in ("precondition", "lucid_attention") and case.T > 1]
    assert len(cases) >= 10
    for case in cases:
        assert not doctor.check(case.small(), "blockwise", CPU).ok, case.name


GPU = torch.device("cuda", 0)
PROOF = (Case("precondition", torch.bfloat16, T=40, D=16, E=16, copies=3, runs=4),)


def test_a_proof_repeats_heads_and_runs_and_compares_all_of_them(monkeypatch):
    calls = []

    def broken(y: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        solve(y, *args, **kwargs)
        calls.append(y.shape[0])
        if len(calls) > 2 * PROOF[0].runs:
            y[-1, 7] *= 1.01

    solve = blockwise.solve_
    monkeypatch.setattr(blockwise, "solve_", broken)
    assert doctor.check(PROOF[0], "blockwise", CPU).ok
    assert sum(calls) == PROOF[0].runs * 3 * PROOF[0].H
    calls += [0] * 10
    assert "equal heads of one batch" in doctor.check(PROOF[0], "blockwise", CPU).about


@pytest.mark.parametrize("case", [case for case in doctor.PROOF if case.dtype == torch.bfloat16], ids=lambda x: x.name)
def test_a_case_of_the_proof_is_one_of_many_heads_that_a_right_implementation_passes(case):
    assert case.H * case.copies >= 32
    assert case.T + case.S >= 1600
    impl = "torch" if "decode" in case.operator else "blockwise"
    small = replace(case, T=min(case.T, 40), S=min(case.S, 8), D=16, E=16, copies=3, runs=2)
    assert doctor.check(small, impl, CPU).ok


def test_timings_have_every_implementation_or_why_it_has_none(monkeypatch):
    def refused(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no such kernel\nat all")

    monkeypatch.setattr(doctor, "TIMED", ((1, 2, 16, 8),))
    monkeypatch.setattr(doctor, "lucid_attention", refused)
    (found,) = doctor.timings(CPU)
    assert [found[name] for name in ("heads", "queries", "T", "D")] == [1, 2, 16, 8]
    assert all(0 < ms < 1e4 for name in ("softmax", "flash") for ms in found[name])
    assert found["blockwise"] == "no such kernel"


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU on which kernels run on the CPU instead."""
    for name, value in {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_capability": lambda device: (9, 0),
        "get_device_name": lambda device: "H100",
        "mem_get_info": lambda device: (0, 80e9),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(dispatch, "unusable", lambda device, dtype: None)
    dispatch._proven.cache_clear()
    real_check = doctor.check
    monkeypatch.setattr(doctor, "check", lambda case, impl, device: real_check(case, "blockwise", CPU))
    for name, value in {"QUICK": CASES[:2], "ALL": CASES[:2], "PROOF": PROOF, "TIMED": ()}.items():
        monkeypatch.setattr(doctor, name, value)
    yield
    dispatch._proven.cache_clear()


@pytest.mark.usefixtures("a_gpu")
def test_auto_uses_the_kernels_once_the_doctor_has_proved_them(monkeypatch):
    with pytest.warns(UserWarning, match=r"does not use the Triton kernels on cuda:0: .* Run `lucid doctor` once"):
        assert not dispatch.proven(GPU)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it warns once
        assert not dispatch.proven(GPU)
        assert doctor.diagnose(GPU, quick=True)
        assert not dispatch.proven(GPU)  # a quick run proves nothing
        assert doctor.diagnose(GPU)
        assert dispatch.proven(GPU)
        assert dispatch.proven(torch.device("cuda"))
        choices = doctor.what_auto_chooses(GPU)
    assert all(": triton, " in choices[name] for name in ("lucid_attention", "path", "lucid_decode"))
    assert json.loads(dispatch.proof_file(GPU).read_text())["device"] == "H100"


@pytest.mark.usefixtures("a_gpu")
@pytest.mark.parametrize("part", ["torch", "device"])
def test_a_proof_holds_for_one_device_and_its_versions(part, monkeypatch):
    assert doctor.diagnose(GPU)
    if part == "torch":
        monkeypatch.setattr(torch, "__version__", "2.99.0")
    else:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    dispatch._proven.cache_clear()
    with pytest.warns(UserWarning, match="Run `lucid doctor` once"):
        assert not dispatch.proven(GPU)


@pytest.mark.usefixtures("a_gpu")
def test_broken_kernels_are_refused_with_the_reason(monkeypatch):
    assert doctor.diagnose(GPU)
    monkeypatch.setattr(blockwise, "solve_", wrong_by_a_percent(blockwise.solve_))
    assert not doctor.diagnose(GPU, quick=True)
    assert "is wrong" in doctor.what_auto_chooses(GPU)["lucid_attention"]
    with pytest.warns(UserWarning, match=r"cuda:0: they failed in `lucid doctor`: .*is wrong"):
        assert not dispatch.proven(GPU)


@pytest.mark.usefixtures("a_gpu")
def test_a_damaged_proof_is_no_proof():
    assert doctor.diagnose(GPU)
    for content in ("{", "[]", '{"passed": true}', '{"passed": true, "torch": "1.0"}'):
        dispatch.proof_file(GPU).write_text(content)
        assert "not proved" in dispatch.unproven(GPU)


@pytest.mark.usefixtures("a_gpu")
def test_the_variable_disables_the_kernels_or_is_refused(monkeypatch):
    assert doctor.diagnose(GPU)
    monkeypatch.setenv(dispatch.SWITCH, "blockwise")
    assert not dispatch.proven(GPU)
    assert "LUCID_ATTENTION_IMPL=blockwise" in doctor.what_auto_chooses(GPU)["lucid_decode"]
    monkeypatch.setenv(dispatch.SWITCH, "cuda")
    with pytest.raises(ValueError, match="LUCID_ATTENTION_IMPL must be 'blockwise'"):
        dispatch.proven(GPU)


PLANTED = """
import sys
import torch
from lucid_lab.cli import main
from lucid_attention import doctor
from tests.triton_interpreter import install
install()
from lucid_attention.ops.lucid import triton_decode
doctor.QUICK = tuple(case for case in doctor.QUICK if case.operator == "lucid_decode")
if sys.argv[1] == "broken":
    step = triton_decode.step
    def broken(token, y, o, *args):
        step(token, y, o, *args)
        o.mul_(1.05)
    triton_decode.step = broken
sys.exit(main(["doctor", "--quick", "--device", "cpu"]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not dispatch.installed(), reason="Triton has wheels for Linux only")
@pytest.mark.parametrize(("kernel", "code"), [("whole", 0), ("broken", 1)])
def test_a_broken_triton_kernel_is_found_in_the_interpreter(kernel: str, code: int):
    environment = os.environ | {dispatch.INTERPRETER: "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PLANTED, kernel]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == code, run.stdout + run.stderr
    assert ("WRONG on this device: triton" in run.stdout) == (kernel == "broken")
