"""`lucid doctor`, and the self-check that "auto" asks for: what is wrong is found, said, refused and remembered."""

import json
import os
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from lucid_attention.ops import proof, self_check, triton_support
from lucid_attention.ops.lucid import blockwise
from lucid_attention.ops.self_check import Case
from lucid_lab.bench import doctor, doctor_costs
from lucid_lab.cli import main

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
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
    monkeypatch.setattr(self_check, "QUICK", CASES)
    monkeypatch.setenv(proof.FOLDER, str(tmp_path / "cache"))
    monkeypatch.delenv(proof.SWITCH, raising=False)


def diagnosis(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any], str]:
    code = main(["doctor", "--quick", "--device", "cpu", "--json", "-"])
    captured = capsys.readouterr()
    return code, json.loads(captured.out), captured.err


def test_on_a_healthy_machine_everything_is_right(capsys: pytest.CaptureFixture[str]):
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
    monkeypatch.setattr(self_check, "QUICK", CASES[:1])
    code, found, text = diagnosis(capsys)
    assert code == 1
    assert {check["impl"]: check["ok"] for check in found["checks"]} == {"reference": True, "blockwise": False}
    assert says in next(check["about"] for check in found["checks"] if not check["ok"])
    assert "WRONG on this device: blockwise" in text


def test_a_solve_that_does_nothing_is_found_in_every_case(monkeypatch):
    """Keys are correlated, so P is far from the identity."""
    monkeypatch.setattr(blockwise, "solve_", lambda y, *args, **kwargs: None)
    cases = [case for case in self_check.ALL if case.operator in ("precondition", "lucid_attention") and case.T > 1]
    assert len(cases) >= 10
    for case in cases:
        assert not self_check.check(case.small(), "blockwise", CPU).ok, case.name


def test_costs_are_measured_against_torchs_attention(monkeypatch):
    monkeypatch.setattr(doctor_costs, "BUDGET", 0.0)
    sizes = doctor_costs.Sizes(2, 64, 16, 64, torch.float32)
    monkeypatch.setattr(doctor_costs.Sizes, "of", classmethod(lambda cls, device: sizes))
    monkeypatch.setattr(doctor_costs, "DECODE", ("torch",))
    costs = doctor_costs.measure(CPU, {("lucid_attention", "triton")})
    assert [(cost.impl, cost.time_ratio > 0) for cost in costs] == [("SDPA", True), ("blockwise", True)] * 2 + [
        ("SDPA", True),
        ("torch", True),
    ]
    assert "blockwise" in doctor._cost_table(costs)
    left_out = doctor_costs.measure(CPU, {("precondition", "blockwise"), ("lucid_decode", "torch")})
    assert {cost.impl for cost in left_out} == {"SDPA"}


GPU = torch.device("cuda", 0)


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A GPU on which kernels run on the CPU instead. Gives the list of self-checks that ran."""
    ran: list[str] = []

    class OnGpu:
        def __init__(self, device: torch.device) -> None: ...

        def __enter__(self) -> None: ...

        def __exit__(self, *error: object) -> None: ...

    for name, value in {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "is_current_stream_capturing": lambda: False,
        "get_device_capability": lambda device: (9, 0),
        "get_device_name": lambda device: "H100",
        "device": OnGpu,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(triton_support, "unusable", lambda device, dtype: None)
    monkeypatch.setattr(proof, "_found", {})
    real_check = self_check.check

    def check(case: Case, impl: str, device: torch.device) -> self_check.Finding:
        ran.append(case.name)
        return real_check(case, "blockwise", CPU)

    monkeypatch.setattr(self_check, "check", check)
    monkeypatch.setattr(self_check, "QUICK", CASES[:2])
    return ran


def test_auto_uses_the_kernels_after_a_self_check_that_later_processes_remember(a_gpu, monkeypatch):
    assert triton_support.proven(GPU)
    assert len(a_gpu) == 2
    assert triton_support.proven(GPU)
    proof._found.clear()
    assert triton_support.proven(torch.device("cuda"))
    assert len(a_gpu) == 2
    assert proof.remembered(GPU).passed
    choices = doctor.what_auto_chooses(GPU)
    assert all(": triton, " in choices[name] for name in ("lucid_attention", "path", "lucid_decode"))
    # Another driver is another compiler.
    monkeypatch.setattr(proof, "driver", lambda: "another")
    proof._found.clear()
    assert triton_support.proven(GPU)
    assert len(a_gpu) == 4


def test_broken_kernels_are_refused_with_one_warning_and_this_is_remembered(a_gpu, monkeypatch):
    monkeypatch.setattr(blockwise, "solve_", wrong_by_a_percent(blockwise.solve_))
    with pytest.warns(UserWarning, match=r"not the Triton kernels on cuda:0: they failed their self-check .*is wrong"):
        assert not triton_support.proven(GPU)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not triton_support.proven(GPU)
    monkeypatch.undo()
    assert len(a_gpu) == 1


def test_the_doctor_overrules_an_earlier_self_check(a_gpu):
    assert triton_support.proven(GPU)
    failed = doctor.Check(CASES[0], "triton", self_check.Finding(False, 1.0, 0.1, "y is wrong"))
    assert doctor.remember_kernels(GPU, [failed]) is None
    assert "y is wrong" in doctor.what_auto_chooses(GPU)["lucid_attention"]
    proof._found.clear()
    with pytest.warns(UserWarning, match="y is wrong"):
        assert not triton_support.proven(GPU)


def test_a_damaged_result_is_checked_again(a_gpu):
    assert triton_support.proven(GPU)
    for content in ("{", "[]", '{"passed": true}', '{"passed": true, "identity": {"torch": "1.0"}}'):
        proof._file(GPU).write_text(content)
        proof._found.clear()
        before = len(a_gpu)
        assert triton_support.proven(GPU)
        assert len(a_gpu) == before + 2


def test_a_folder_that_cannot_be_written_is_no_error(a_gpu, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(proof.FOLDER, str(tmp_path / "file" / "below"))
    assert triton_support.proven(GPU)
    right = doctor.Check(CASES[0], "triton", self_check.Finding(True, 0.0, 0.1, ""))
    assert "cannot be written" in doctor.remember_kernels(GPU, [right])


def test_the_variable_switches_the_kernels_off_or_is_refused(a_gpu, monkeypatch, capsys):
    monkeypatch.setenv(proof.SWITCH, "blockwise")
    assert not triton_support.proven(GPU)
    assert a_gpu == []
    assert "LUCID_ATTENTION_IMPL=blockwise" in doctor.what_auto_chooses(GPU)["lucid_decode"]
    monkeypatch.setenv(proof.SWITCH, "cuda")
    with pytest.raises(ValueError, match="LUCID_ATTENTION_IMPL must be 'blockwise'"):
        triton_support.proven(GPU)


def test_nothing_is_checked_while_a_graph_is_recorded(a_gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not triton_support.proven(GPU)
    assert a_gpu == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert triton_support.proven(GPU)


PLANTED = """
import sys
import torch
from lucid_lab.cli import main
from lucid_attention.ops import self_check
from lucid_attention.ops.lucid import triton_launch
self_check.QUICK = tuple(case for case in self_check.QUICK if case.operator == "lucid_decode")
if sys.argv[1] == "broken":
    step = triton_launch.step
    def broken(q, k, v, y_past, y, norms, o, *args, **kwargs):
        step(q, k, v, y_past, y, norms, o, *args, **kwargs)
        o.mul_(1.05)
    triton_launch.step = broken
sys.exit(main(["doctor", "--quick", "--device", "cpu"]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not triton_support.installed(), reason="Triton has wheels for Linux only")
@pytest.mark.parametrize(("kernel", "code"), [("whole", 0), ("broken", 1)])
def test_a_broken_triton_kernel_is_found_in_the_interpreter(kernel: str, code: int):
    environment = os.environ | {triton_support.INTERPRETER: "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PLANTED, kernel]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == code, run.stdout + run.stderr
    assert ("WRONG on this device: triton" in run.stdout) == (kernel == "broken")
