"""`lucid doctor`: is every implementation right on this device, what does it cost, and what will "auto" use there?"""

import argparse
import json
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lucid_attention.files import write_whole
from lucid_attention.ops import dispatch, proof, self_check, triton_support
from lucid_attention.ops.self_check import OPERATORS, Case, Finding

from ..devices import find_device
from ..tables import text_table
from .doctor_costs import Cost, measure
from .harness import cpu_model

OK, WRONG = "right", "WRONG"
# Packages that implementations are made of, and the names under which they are installed.
PACKAGES = {"torch": "torch", "Triton": "triton", "Numba": "numba", "flash-linear-attention": "flash-linear-attention"}


class Check(NamedTuple):
    """What one implementation did in one case."""

    case: Case
    impl: str
    finding: Finding


def run(args: argparse.Namespace) -> int:
    # Refuses a wrong value before minutes of work.
    proof.switched_off()
    try:
        device = find_device(args.device)
    except ValueError as error:
        print(f"lucid doctor: error: {error}", file=sys.stderr)
        return 2
    # With --json - standard output is for JSON alone.
    out = sys.stderr if args.json == "-" else sys.stdout
    about = environment(device)
    print(text_table([["", ""], *([name, value] for name, value in about.items())]).strip(), file=out)
    checks = list(_run_checks(device, quick=args.quick))
    print("\nError: of outputs and gradients against float64, relative to the largest entry", file=out)
    print(_table(checks), file=out)
    for line in not_run(device, quick=args.quick):
        print(line, file=out)
    wrong = {(check.case.operator, check.impl) for check in checks if not check.finding.ok}
    costs = [] if args.quick else measure(device, wrong)
    if costs:
        print("\n" + _cost_table(costs), file=out)
    note = remember_kernels(device, checks)
    choices = what_auto_chooses(device)
    print("\n" + "\n".join([*choices.values(), *([note] if note else [])]), file=out)
    if args.json:
        _write_json(args.json, record(device, about, checks, costs, choices))
    if wrong:
        names = ", ".join(sorted({impl for _, impl in wrong}))
        print(f"\nWRONG on this device: {names}. Please report it, with the output of --json FILE", file=out)
    else:
        print(f"\nAll {len(checks)} checks are right on {device}", file=out)
    return 1 if wrong else 0


def environment(device: torch.device) -> dict[str, str]:
    """What a result depends on, for people."""
    about = {"lucid-attention": proof.package_version("lucid-attention")}
    about |= {name: proof.package_version(package) for name, package in PACKAGES.items()}
    about["torch"] = torch.__version__
    about |= {"Python": platform.python_version(), "system": platform.platform(), "device": str(device)}
    if device.type == "cuda":
        known = proof.identity(device)
        about |= {"name": known["device"], "capability": known["capability"], "runtime": known["runtime"]}
        about |= {"driver": known["driver"], "memory": f"{torch.cuda.mem_get_info(device)[1] / 1e9:.0f} GB"}
    else:
        about |= {"name": cpu_model(), "instructions": torch.backends.cpu.get_cpu_capability()}
        about["threads"] = str(torch.get_num_threads())
    if triton_support.interpreted():
        about["Triton"] += ", in its interpreter: slow, for tests"
    return about


def planned(device: torch.device, *, quick: bool) -> list[tuple[Case, str]]:
    """Every case with every implementation that can run on the device."""
    cases = self_check.QUICK if quick else self_check.ALL
    if triton_support.interpreted():
        cases = tuple(case.small() for case in cases)
    return [
        (case, impl)
        for case in cases
        for impl in OPERATORS[case.operator].implementations
        if _left_out(impl, device, case.dtype, quick=quick) is None
    ]


def _left_out(impl: str, device: torch.device, dtype: torch.dtype, *, quick: bool) -> str | None:
    """Why an implementation is not run; None if it is."""
    reason = self_check.cannot_run(impl, device, dtype)
    if reason is None and quick and impl == "numba":
        return "it may compile for a minute; without --quick it runs"
    return reason


def _run_checks(device: torch.device, *, quick: bool) -> Iterator[Check]:
    plan = planned(device, quick=quick)
    for number, (case, impl) in enumerate(plan, 1):
        line = f"[{number}/{len(plan)}] {case.operator} {case.name}: {impl}"
        print(line, end=" ", file=sys.stderr, flush=True)
        finding = self_check.check(case, impl, device)
        print(OK if finding.ok else f"{WRONG}: {finding.about}", file=sys.stderr, flush=True)
        yield Check(case, impl, finding)


def not_run(device: torch.device, *, quick: bool) -> list[str]:
    """One line for every implementation that is not run here, with the reason."""
    names = dict.fromkeys(impl for operator in OPERATORS.values() for impl in operator.implementations)
    reasons = {impl: _left_out(impl, device, torch.float32, quick=quick) for impl in names}
    return [f"not run: {impl}: {reason}" for impl, reason in reasons.items() if reason]


def _table(checks: list[Check]) -> str:
    rows = [["operator", "case", "implementation", "error", "allowed", ""]]
    for case, impl, finding in checks:
        verdict = OK if finding.ok else f"{WRONG}: {finding.about}"
        rows.append([case.operator, case.name, impl, f"{finding.error:.1e}", f"{finding.allowed:.1e}", verdict])
    return text_table(rows, rule=True)


def _cost_table(costs: list[Cost]) -> str:
    known = any(cost.megabytes is not None for cost in costs)
    rows = [["cost", "implementation", "ms", "of SDPA's time", *(["MB", "of SDPA's memory"] if known else [])]]
    for cost in costs:
        memory = ["-", "-"] if cost.megabytes is None else [f"{cost.megabytes:.1f}", f"{cost.memory_ratio:.2f}"]
        ms = 1000 * cost.seconds
        time = f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}"
        rows.append([cost.what, cost.impl, time, f"{cost.time_ratio:.2f}", *(memory if known else [])])
    table = text_table(rows, rule=True)
    return table if known else f"{table}\nMemory is told on GPUs only; `lucid bench memory` measures it on a CPU"


def remember_kernels(device: torch.device, checks: list[Check]) -> str | None:
    """Keep the result of the Triton kernels for later processes. Returns a line if it cannot be kept."""
    kernels = [check for check in checks if check.impl == "triton"]
    if not kernels or triton_support.interpreted():
        return None
    wrong = [check for check in kernels if not check.finding.ok]
    about = f"they passed {len(kernels)} cases of lucid doctor"
    if wrong:
        case, _, finding = wrong[0]
        about = f"they failed in lucid doctor ({case.operator}, {case.name}: {finding.about})"
    failure = proof.remember(device, proof.Proof(not wrong, about))
    return f"The result is not remembered: {failure}. Every process will check again" if failure else None


def what_auto_chooses(device: torch.device) -> dict[str, str]:
    """By operator, what impl="auto" uses on the device and why."""
    reason = _no_kernels(device)
    kernels = "triton, for bfloat16, float16 and float32: the kernels were right on this device"
    whole = f"{dispatch.BLOCKWISE[0]} ({reason})" if reason else kernels
    step = kernels
    if reason:
        no_numba = self_check.cannot_run("numba", device, torch.float32)
        step = (
            f"torch ({reason if device.type == 'cuda' else no_numba})" if no_numba else "numba, compiled for this CPU"
        )
    start = f"impl='auto' on {device} uses for"
    return {
        "lucid_attention": f"{start} lucid_attention and precondition: {whole}",
        "path": f"{start} PaTH and LUCID-PaTH: {whole}",
        "lucid_decode": f"{start} one token (lucid_decode, path_decode): {step}",
        "linear": f"{start} linear attention: {dispatch.RECURRENT[0]} (fla is used on request)",
    }


def _no_kernels(device: torch.device) -> str | None:
    """Why "auto" does not use the Triton kernels; None if it does."""
    if device.type != "cuda":
        return f"the Triton kernels are for CUDA and ROCm devices, not for {device.type}"
    if proof.switched_off():
        return f"{proof.SWITCH}=blockwise"
    unusable = triton_support.unusable(device, torch.float32)
    if unusable:
        return f"Triton: {unusable}"
    known = proof.remembered(device)
    if known is None:
        return None if triton_support.proven(device) else "the Triton kernels failed their self-check"
    return None if known.passed else f"the Triton kernels: {known.about}"


def record(
    device: torch.device, about: dict[str, str], checks: list[Check], costs: list[Cost], choices: dict[str, str]
) -> dict[str, Any]:
    """Everything, for JSON."""
    return {
        "environment": about,
        "identity": proof.identity(device),
        "checks": [
            {"operator": case.operator, "case": case.name, "impl": impl, "ok": finding.ok, "about": finding.about}
            # JSON has no infinity.
            | {"error": finding.error if finding.error < float("inf") else None, "allowed": finding.allowed}
            for case, impl, finding in checks
        ],
        "costs": [cost._asdict() for cost in costs],
        "not_run": not_run(device, quick=not costs),
        "auto": choices,
    }


def _write_json(where: str, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    if where == "-":
        print(text, end="")
    else:
        write_whole(Path(where), text)
        print(f"written: {where}", file=sys.stderr)
