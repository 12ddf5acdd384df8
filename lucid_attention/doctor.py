"""`lucid doctor`: is every implementation right on this device, and what does "auto" use there?

Every implementation runs twice, with uninitialised memory full of NaN, and is compared with the dense equation in
float64 on the CPU, of the same rounded inputs. It may be a few times as far from it as the dense equation in the same
dtype. Keys are correlated: with independent keys P is nearly the identity, and a kernel that does nothing would pass.

A run proves the Triton kernels for `impl="auto"`: the result is written to the user's cache folder (`ops/dispatch.py`).
Compilers have been wrong for one dtype or one head size, and races were rare. So every dtype runs with every size, many
times, in sequences of several strips and with enough heads to fill a GPU.
"""

import json
import math
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .files import write_whole
from .messages import text_table
from .ops import dispatch
from .ops.linear.delta import delta_attention
from .ops.lucid.api import lucid_attention, precondition
from .ops.lucid.decode import inverse_key_norms, lucid_decode
from .ops.path.api import lucid_path_attention, path_precondition
from .ops.path.decode import path_decode

REFERENCE = "reference"
# An error may be this many times that of the dense equation in the same dtype, plus a floor: the precision of products
# of float32, or of the pieces of bfloat16 that the kernels make of them.
MULTIPLE = 4.0
FLOORS = {torch.float32: 1e-5, torch.float16: 1e-4, torch.bfloat16: 1e-4}
# Read-outs round values and weights to 16 bits, which the dense equation does not: twice the dtype's precision more.
READOUTS = ("lucid_attention", "lucid_path_attention", "delta_attention")
# The kinds of accelerators that "auto" looks for, in this order.
ACCELERATORS = ("cuda", "xpu", "mps")
# The longest sequence in Triton's interpreter.
INTERPRETED_LENGTH = 48

# A 16-bit product. It ends the process on machines that advertise AMX and forbid it.
PROBE = "import torch; a = torch.ones(256, 256, dtype=torch.bfloat16); a @ a; a.half() @ a.half()"

Results = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One call. B batch, H key/value heads, G query heads per key/value head, T new and S past tokens, D, E sizes.

    options: of "mask", "packed", "beta", "sharpness" (learned), "strength", "static" (a cache of fixed size).
    copies: how often the heads are repeated on the device; runs: how often the call is. All must give the same bits.
    """

    operator: str
    dtype: torch.dtype
    T: int = 1
    S: int = 0
    B: int = 1
    H: int = 2
    G: int = 1
    D: int = 64
    E: int = 64
    options: tuple[str, ...] = ()
    copies: int = 1
    runs: int = 2

    @property
    def name(self) -> str:
        sizes = f"T={self.T}" + (f" S={self.S}" if self.S else "") + f" D={self.D} E={self.E}"
        return ", ".join([f"{str(self.dtype).removeprefix('torch.')} {sizes}", *self.options])

    def small(self) -> "Case":
        """The same for Triton's interpreter, which is slow."""
        return replace(
            self, T=min(self.T, INTERPRETED_LENGTH), S=min(self.S, INTERPRETED_LENGTH), B=1, copies=1, runs=2
        )


BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
QUICK: tuple[Case, ...] = (
    Case("precondition", BF16, T=300, D=128, E=128),
    Case("precondition", F32, T=200, S=70, D=64, E=64, options=("beta", "sharpness")),
    Case("precondition", F16, T=257, B=2, D=64, E=32, options=("mask",)),
    Case("precondition", BF16, T=400, D=80, E=48, options=("packed", "strength")),
    Case("lucid_decode", BF16, S=700, G=4, D=128, E=128, options=("mask",)),
    Case("lucid_decode", F32, S=300, D=64, E=64, options=("static",)),
    Case("lucid_path_attention", F32, T=150, G=2, D=32, E=32, options=("sharpness",)),
    Case("lucid_path_attention", BF16, T=200, B=2, D=64, E=64, options=("mask",)),
    Case("path_decode", BF16, S=200, B=2, D=64, E=64),
)
ALL: tuple[Case, ...] = (
    *QUICK,
    Case("precondition", F32, T=1, D=5, E=3),
    # Several strips of rows.
    Case("precondition", BF16, T=1300, D=128, E=128),
    Case("precondition", BF16, T=140, D=256, E=256, options=("beta",)),
    Case("precondition", F32, T=600, D=64, E=64, options=("packed",)),
    Case("precondition", F16, T=150, S=600, B=2, D=128, E=64, options=("mask", "sharpness")),
    Case("lucid_attention", F32, T=200, G=2, D=64, E=64),
    Case("lucid_attention", BF16, T=300, G=4, D=64, E=64, options=("packed",)),
    Case("lucid_attention", F16, T=130, S=60, B=2, D=64, E=64, options=("mask",)),
    Case("lucid_decode", F16, S=130, B=2, G=2, D=96, E=40, options=("beta", "sharpness")),
    Case("lucid_path_attention", F32, T=300, D=32, E=16, options=("packed",)),
    Case("path_decode", F32, S=300, G=2, D=64, E=64),
    Case("delta_attention", F32, T=130, G=2, D=64, E=64),
)


# For the Triton kernels only: every dtype with every head size and with every option.
LONG = Case("precondition", BF16, T=1700, copies=16, runs=50)
PROOF: tuple[Case, ...] = tuple(
    replace(case, dtype=dtype)
    for dtype in dispatch.DTYPES
    for case in (
        *(replace(LONG, D=size, E=size) for size in (64, 128, 256)),
        replace(LONG, D=128, S=600, options=("mask", "beta", "sharpness")),
        replace(LONG, E=128, options=("packed", "beta", "strength")),
        replace(LONG, operator="lucid_decode", T=1, S=1700, G=4, D=128, E=128),
        *(replace(LONG, operator="lucid_path_attention", D=size, E=size) for size in (64, 128, 256)),
        replace(LONG, operator="lucid_path_attention", D=128, S=600, options=("mask", "sharpness")),
        replace(LONG, operator="lucid_path_attention", E=128, options=("packed",)),
        replace(LONG, operator="path_decode", T=1, S=1700, G=4, D=128, E=128),
    )
)
# Of timings: key/value heads, query heads per key/value head, T, D.
TIMED = ((8, 1, 8192, 128), (4, 8, 32768, 64))


def make_inputs(case: Case) -> dict[str, Any]:
    """Tensors of a case on the CPU, floating point ones rounded to its dtype. Keys have cosines around 0.8."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    B, H, T, S, D, E = case.B, case.H, case.T, case.S, case.D, case.E
    k = normal(B, H, S + T, D) + 2 * normal(B, H, 1, D)
    # Every third key comes twice.
    k[:, :, 2::3] = k[:, :, 1::3][:, :, : k[:, :, 2::3].shape[2]]
    x = {"q": normal(B, H * case.G, T, D), "k": k[:, :, S:], "v": normal(B, H, T, E)}
    x |= {"k_past": k[:, :, :S], "y_past": normal(B, H, S, E)} if S else {}
    x |= {"weight": normal(B, H * case.G, T, E), "sharpness": 2 + normal(H).abs()}
    x |= {"beta": normal(B, H, T).sigmoid(), "w": F.normalize(normal(B, H, T, D), dim=-1)}
    x = {name: value.to(case.dtype) for name, value in x.items()}
    if "mask" in case.options:
        x["key_mask"] = torch.rand(B, S + T, generator=generator) < 0.8
        x["key_mask"][:, -1] = True
    if "packed" in case.options:
        borders = sorted({0, 1, T // 5, T // 4, T // 4 + 1, T})
        x["cu_seqlens"] = torch.tensor(borders, dtype=torch.int32)
    return x


def _options(case: Case, x: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {name: x[name] for name in ("key_mask", "cu_seqlens") if name in x}
    options |= {name: x[name] for name in ("beta", "sharpness") if name in case.options}
    options |= {"past": (x["k_past"], x["y_past"])} if case.S else {}
    return options | ({"strength": 0.6} if "strength" in case.options else {})


def _precondition(case: Case, x: dict[str, Any], impl: str) -> Results:
    return {"y": precondition(x["k"], x["v"], impl=impl, **_options(case, x))}


def _attention(case: Case, x: dict[str, Any], impl: str) -> Results:
    return {"o": lucid_attention(x["q"], x["k"], x["v"], impl=impl, **_options(case, x))}


def _decode(case: Case, x: dict[str, Any], impl: str) -> Results:
    options = _options(case, x)
    if impl == REFERENCE:
        y = precondition(x["k"], x["v"], impl=impl, **options)
        return {"o": lucid_attention(x["q"], x["k"], x["v"], impl=impl, **options), "y": y}
    del options["past"]
    k, y_past = torch.cat([x["k_past"], x["k"]], 2), x["y_past"]
    if "static" in case.options:
        # Two places after the new token, which must not be read.
        k, y_past = F.pad(k, (0, 0, 0, 2), value=1.0), F.pad(y_past, (0, 0, 0, 3))
        options["key_mask"] = torch.arange(case.S + 3, device=k.device)[None].expand(case.B, -1) <= case.S
        options["position"] = torch.tensor(case.S, device=k.device)
    step = lucid_decode(x["q"], k, x["v"], y_past, inverse_key_norms(k), impl=impl, **options)
    return {"o": step.o, "y": step.y}


def _path(case: Case, x: dict[str, Any], impl: str) -> Results:
    options = {name: value for name, value in _options(case, x).items() if name != "beta"}
    if case.S:
        options["past"] += (inverse_key_norms(x["k_past"]),)
    return {"o": lucid_path_attention(x["q"], x["k"], x["v"], x["w"], x["beta"], impl=impl, **options)}


def _path_decode(case: Case, x: dict[str, Any], impl: str) -> Results:
    norms = inverse_key_norms(torch.cat([x["k_past"], x["k"]], 2))
    new = x["k"], x["v"], x["w"], x["beta"]
    if impl == REFERENCE:
        past = (x["k_past"], x["y_past"], norms[:, :, : case.S])
        y = path_precondition(*new, past=past, impl=impl)
        return {"o": lucid_path_attention(x["q"], *new, past=past, impl=impl), "y": y}
    product = torch.eye(case.D, device=norms.device, dtype=norms.dtype).expand(*norms.shape[:2], -1, -1)
    k = torch.cat([x["k_past"], x["k"]], 2)
    step = path_decode(x["q"], k, *new[1:], x["y_past"], product.clone(), case.S, inverse_norms=norms, impl=impl)
    return {"o": step.o, "y": step.y}


def _delta(case: Case, x: dict[str, Any], impl: str) -> Results:
    return {"o": delta_attention(x["q"], F.normalize(x["k"], dim=-1), x["v"], x["beta"], impl=impl).o}


class Operator(NamedTuple):
    """implementations: those that are checked, by their names in `impl`. backward: whether gradients are checked."""

    run: Callable[[Case, dict[str, Any], str], Results]
    implementations: tuple[str, ...]
    backward: bool = True


OPERATORS = {
    "precondition": Operator(_precondition, ("reference", "blockwise", "triton")),
    "lucid_attention": Operator(_attention, ("reference", "blockwise", "triton")),
    "lucid_decode": Operator(_decode, ("torch", "numba", "triton"), backward=False),
    "lucid_path_attention": Operator(_path, ("reference", "blockwise", "triton")),
    "path_decode": Operator(_path_decode, ("torch", "numba", "triton"), backward=False),
    "delta_attention": Operator(_delta, ("reference", "chunkwise", "fla")),
}


def find_device(name: str) -> torch.device:
    """The device of this name, tried with a small tensor; "auto" for an accelerator of this machine, else its CPU."""
    if name == "auto":
        available = [kind for kind in ACCELERATORS if hasattr(torch, kind) and getattr(torch, kind).is_available()]
        return torch.device(available[0] if available else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).tolist()
    # Torch has no common class: a wrong name is a RuntimeError, a missing driver an AssertionError.
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"--device must be auto, cpu, or an accelerator of this machine, such as cuda or cuda:1, got {name!r}: "
            f"{reason:.200}"
        ) from error
    return device


def cannot_run(impl: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why an implementation cannot run on a device; None if it can."""
    if impl == "triton":
        return dispatch.unusable(device, dtype)
    needed = {"numba": ("cpu", "numba"), "fla": ("cuda", "fla")}.get(impl)
    if needed is None:
        return None
    kind, package = needed
    if device.type != kind:
        return f"it is for tensors on {kind}, got {device.type}"
    return None if find_spec(package) else f"{package} is not installed"


def evaluate(case: Case, inputs: dict[str, Any], impl: str, device: torch.device, dtype: torch.dtype) -> Results:
    """Outputs and gradients on the CPU in float64."""
    operator, copies = OPERATORS[case.operator], 1 if impl == REFERENCE else case.copies
    x = {name: t.clone().to(device, dtype if t.is_floating_point() else t.dtype) for name, t in inputs.items()}
    # Masks and borders are of all heads.
    x = {name: torch.cat([t] * copies, min(1, t.ndim - 1)) if t.is_floating_point() else t for name, t in x.items()}
    tracked = {name: t.requires_grad_() for name, t in x.items() if t.is_floating_point() and name != "weight"}
    with torch.set_grad_enabled(operator.backward):
        results = operator.run(case, x, impl)
        if operator.backward:
            weight = x["weight"][:, : results[next(iter(results))].shape[1]]
            sum((out * weight).sum() for out in results.values()).backward()
            results |= {f"d{name}": t.grad for name, t in tracked.items() if t.grad is not None}
    parts = {name: t.detach().chunk(copies, min(1, t.ndim - 1)) for name, t in results.items()}
    for name, (first, *others) in parts.items():
        if not all(torch.equal(first, other) for other in others):
            raise RuntimeError(f"equal heads of one batch have different {name}")
    return {name: part[0].double().cpu() for name, part in parts.items()}


class Finding(NamedTuple):
    """How an implementation did. error, allowed: of the result that is nearest to its limit, relative to the truth."""

    ok: bool
    error: float
    allowed: float
    about: str

    @property
    def verdict(self) -> str:
        return "right" if self.ok else f"WRONG: {self.about}"


def check(case: Case, impl: str, device: torch.device) -> Finding:
    """Run one implementation several times and compare it with the truth. Never raises."""
    try:
        with poisoned_memory():
            inputs, cpu = make_inputs(case), torch.device("cpu")
            truth = evaluate(case, inputs, REFERENCE, cpu, torch.float64)
            plain = evaluate(case, inputs, REFERENCE, cpu, case.dtype)
            first, *others = (evaluate(case, inputs, impl, device, case.dtype) for _ in range(case.runs))
    # Any error of a compiler, a driver or a kernel is a finding.
    except Exception as error:
        return Finding(False, math.inf, 0.0, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]:.200}")
    rounds = case.operator in READOUTS and case.dtype != torch.float32
    floor = FLOORS[case.dtype] + (2 * torch.finfo(case.dtype).eps if rounds else 0)
    return judge(truth, plain, first, others, floor)


def judge(truth: Results, plain: Results, first: Results, others: list[Results], floor: float) -> Finding:
    """Compare runs with the truth. plain: the dense equation in the same dtype."""
    if first.keys() != truth.keys():
        return Finding(False, math.inf, 0.0, f"expected {', '.join(truth)}, got {', '.join(first)}")
    different = [name for name in first if not all(torch.equal(first[name], other[name]) for other in others)]
    worst = Finding(True, 0.0, floor, "")
    # A gradient that nearly cancels is measured in units of the largest one.
    unit = max(float(x.abs().max()) for x in truth.values())
    for name, x in first.items():
        if not bool(x.isfinite().all()):
            return Finding(False, math.inf, 0.0, f"{name} is not finite")
        size = max(float(truth[name].abs().max()), 0.01 * unit)
        error, usual = (float((y - truth[name]).abs().max()) / size for y in (x, plain[name]))
        allowed = MULTIPLE * usual + floor
        if error / allowed >= worst.error / worst.allowed:
            worst = Finding(error <= allowed, error, allowed, "" if error <= allowed else f"{name} is wrong")
    if different and worst.ok:
        return Finding(False, worst.error, worst.allowed, f"two runs differ in {', '.join(different)}")
    return worst


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Uninitialised memory holds NaN. What reads it before writing it cannot look right by chance."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    )
    with warnings.catch_warnings():
        # Torch names operations that it cannot make deterministic. Two runs are compared anyway.
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            torch.utils.deterministic.fill_uninitialized_memory = before[2]  # type: ignore[attr-defined]


class Check(NamedTuple):
    """What one implementation did in one case."""

    case: Case
    impl: str
    finding: Finding


def diagnose(device: torch.device, *, quick: bool = False, json_file: str | None = None) -> bool:
    """Check the implementations on a device, and print what was found. Returns whether all are right.

    quick: a few cases, and no proof. json_file: where to write everything as JSON; "-" for standard output alone.
    """
    dispatch.switched_off()  # refuses a wrong value before minutes of work
    out = sys.stderr if json_file == "-" else sys.stdout
    if subprocess.run([sys.executable, "-c", PROBE]).returncode < 0:
        print(
            "WRONG: 16-bit matrix products end the process on this CPU, which advertises AMX and forbids it. Set",
            file=out,
        )
        print("ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 before Python starts", file=out)
        return False
    about = environment(device)
    print("\n".join(f"{name:22}  {value}" for name, value in about.items()), file=out)
    checks = list(_run_checks(device, quick))
    _print_table(checks, out)
    print("error: of outputs and gradients against float64, relative to the largest entry", file=out)
    skipped = [f"not run: {impl}: {reason}" for impl, reason in not_run(device, quick).items()]
    wrong = {(x.case.operator, x.impl) for x in checks if not x.finding.ok}
    note = write_proof(device, checks, quick)
    times = [] if quick or device.type != "cuda" else list(timings(device))
    choices = what_auto_chooses(device)
    print("\n".join(map(str, times)), file=out)
    print("\n".join([*skipped, "", *choices.values(), *([note] if note else []), ""]), file=out)
    if wrong:
        names = ", ".join(sorted({impl for _, impl in wrong}))
        print(f"WRONG on this device: {names}. Please report it, with the output of --json FILE", file=out)
    else:
        print(f"All {len(checks)} checks are right on {device}", file=out)
    if json_file:
        content = {
            "environment": about,
            "checks": [
                {"operator": case.operator, "case": case.name, "impl": impl, "ok": finding.ok, "about": finding.about}
                # JSON has no infinity.
                | {"error": finding.error if finding.error < math.inf else None, "allowed": finding.allowed}
                for case, impl, finding in checks
            ],
            "milliseconds": times,
            "not_run": skipped,
            "auto": choices,
        }
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        print(text, end="") if json_file == "-" else write_whole(Path(json_file), text)
    return not wrong


def timings(device: torch.device) -> Iterator[dict[str, Any]]:
    """Milliseconds in bfloat16, forward and with gradients: LUCID attention, torch's softmax attention, and its flash
    attention, which is one of the kernels that the latter may choose."""
    for H, G, T, D in TIMED:
        x = [torch.randn(1, heads, T, D, device=device, dtype=BF16).requires_grad_() for heads in (H * G, H, H)]
        softmax = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
        calls = {"softmax": softmax, "flash": sdpa_kernel(SDPBackend.FLASH_ATTENTION)(softmax)}
        for impl in ("triton", "blockwise"):
            if cannot_run(impl, device, BF16) is None:
                calls[impl] = partial(lucid_attention, impl=impl)
        found: dict[str, Any] = {"heads": H, "queries": H * G, "T": T, "D": D}
        for name, call in calls.items():
            try:
                found[name] = [_milliseconds(call, x, gradients) for gradients in (False, True)]
            except Exception as error:  # no such kernel, not enough memory, and what compilers raise
                found[name] = str(error).partition("\n")[0]
        yield found


def _milliseconds(call: Callable[..., Tensor], x: list[Tensor], gradients: bool) -> float:
    """The median of seven calls, after two that compile."""
    times, wait = [], partial(torch.cuda.synchronize, x[0].device) if x[0].is_cuda else int
    for _ in range(9):
        wait()
        start = time.perf_counter()
        with torch.set_grad_enabled(gradients):
            o = call(*x)
        if gradients:
            torch.autograd.grad(o.sum(), x)
        wait()
        times.append(1e3 * (time.perf_counter() - start))
    return round(statistics.median(times[2:]), 3)


def _print_table(checks: list[Check], out: TextIO) -> None:
    rows = [("operator", "case", "implementation", "error", "allowed", "")]
    for case, impl, finding in checks:
        rows.append((case.operator, case.name, impl, f"{finding.error:.1e}", f"{finding.allowed:.1e}", finding.verdict))
    print(text_table(rows), file=out)


def environment(device: torch.device) -> dict[str, str]:
    """What a result depends on."""
    packages = ("lucid-attention", "triton", "numba", "flash-linear-attention")
    about = {name: dispatch.package_version(name) for name in packages}
    about |= {"torch": torch.__version__, "Python": platform.python_version(), "system": platform.platform()}
    about["device"] = str(device)
    if device.type == "cuda":
        about["name"] = torch.cuda.get_device_name(device)
        about["capability"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
        about["memory"] = f"{torch.cuda.mem_get_info(device)[1] / 1e9:.0f} GB"
    else:
        about["name"] = f"{platform.processor() or platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
        about["threads"] = str(torch.get_num_threads())
    if dispatch.interpreted():
        about["triton"] += ", in its interpreter: slow, for tests"
    return about


def _left_out(impl: str, device: torch.device, dtype: torch.dtype, quick: bool) -> str | None:
    """Why an implementation is not run; None if it is."""
    slow = "it may compile for a minute; without --quick it runs" if quick and impl == "numba" else None
    return cannot_run(impl, device, dtype) or slow


def _run_checks(device: torch.device, quick: bool) -> Iterator[Check]:
    cases = QUICK if quick else ALL
    if dispatch.interpreted():
        cases = tuple(case.small() for case in cases)
    plan = [(case, impl) for case in cases for impl in OPERATORS[case.operator].implementations]
    plan += [] if quick or dispatch.interpreted() else [(case, "triton") for case in PROOF]
    plan = [(case, impl) for case, impl in plan if _left_out(impl, device, case.dtype, quick) is None]
    for number, (case, impl) in enumerate(plan, 1):
        print(f"[{number}/{len(plan)}] {case.operator} {case.name}: {impl}", end=" ", file=sys.stderr, flush=True)
        finding = check(case, impl, device)
        print(finding.verdict, file=sys.stderr, flush=True)
        yield Check(case, impl, finding)


def not_run(device: torch.device, quick: bool) -> dict[str, str]:
    """The implementations that are not run here, with the reason."""
    names = dict.fromkeys(impl for operator in OPERATORS.values() for impl in operator.implementations)
    reasons = {impl: _left_out(impl, device, torch.float32, quick) for impl in names}
    return {impl: reason for impl, reason in reasons.items() if reason}


def write_proof(device: torch.device, checks: list[Check], quick: bool) -> str | None:
    """Write the result of the Triton kernels for `impl="auto"`. Returns a line if it cannot be written.

    A quick run proves nothing, but its failures count.
    """
    kernels = [check for check in checks if check.impl == "triton"]
    wrong = [f"{case.operator}, {case.name}: {finding.about}" for case, _, finding in kernels if not finding.ok]
    if not kernels or dispatch.interpreted() or (quick and not wrong):
        return None
    about = wrong[0] if wrong else f"{len(kernels)} cases passed"
    content = dispatch.proof_identity(device) | {"passed": not wrong, "about": about}
    file = dispatch.proof_file(device)
    try:
        write_whole(file, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        return f"The proof is not written: {file.parent} cannot be written: {error.strerror or error}"
    dispatch._proven.cache_clear()
    return None


def what_auto_chooses(device: torch.device) -> dict[str, str]:
    """By operator, what impl="auto" uses on the device and why."""
    if device.type != "cuda":
        reason: str | None = f"the Triton kernels are for CUDA and ROCm devices, not for {device.type}"
    else:
        reason = f"{dispatch.SWITCH}=blockwise" if dispatch.switched_off() else dispatch.unproven(device)
    whole = step = "triton, for bfloat16, float16 and float32: the kernels were right on this device"
    if reason:
        whole = f"{dispatch.BLOCKWISE[0]} ({reason})"
        no_numba = cannot_run("numba", device, torch.float32)
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
