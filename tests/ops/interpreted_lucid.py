"""The Triton kernels of the solve in Triton's interpreter, against float64.

Run in a process of its own, since Triton reads TRITON_INTERPRET when a kernel is defined: `test_triton.py` does for the
tests marked quick, `make test-gpu-offline` for all.

Rule: at most twice the error that the same formula makes in plain torch (`blockwise`) on the same inputs, and a floor
of float32 (1e-4 in 16 bit: products of three bfloat16 pieces have 16 bits, and what is rounded is far above it).
"""

from dataclasses import replace

import pytest
import torch

from lucid_attention import precondition
from lucid_attention.ops.lucid import triton_solve
from lucid_attention.ops.lucid.system import checked_system
from lucid_attention.ops.lucid.triton_solve import SolveTiles
from lucid_attention.ops.triton_tiles import Tile

from . import oracles
from .cases import Case, assert_as_good_as, evaluate, widened

FLOOR = {torch.float32: 2e-6, torch.bfloat16: 1e-4, torch.float16: 1e-4}
DTYPES = pytest.mark.parametrize("dtype", FLOOR, ids=lambda dtype: str(dtype).removeprefix("torch."))
# So small that short sequences have several chunks and strips.
SMALL = SolveTiles(
    inverse=Tile(16, 16, 16, 16),
    product=Tile(16, 16, 0, 16),
    solve=Tile(16, 16, 16, 0),
    update=Tile(16, 16, 16, 16),
    gradient=Tile(16, 16, 16, 16, out=16),
    block=16,
    chunk=32,
    strip=64,
)
MASK = torch.arange(280).view(2, 140) % 83 > 4
CASES = {
    "one token": (Case(T=1, H=1, D=5, E=3), {}),
    "short": (Case(T=40, H=1, D=8, E=4, keys="close"), {}),
    "strips": (Case(T=150, H=1, D=24, E=18, keys="close"), {}),
    "closest": (Case(T=140, H=1, D=64, E=64, keys="closest"), {}),
    "equal": (Case(T=140, H=1, D=16, E=8, keys="equal"), {}),
    "repeated": (Case(T=140, H=1, D=16, E=8, keys="repeated"), {}),
    "runs": (Case(T=140, H=1, D=16, E=8, keys="runs"), {}),
    "masked": (Case(T=140, H=2, B=2, D=16, E=8, keys="close"), {"key_mask": MASK}),
    "packed": (Case(T=140, H=1, D=16, E=8, keys="close"), {"cu_seqlens": torch.tensor([0, 37, 38, 38, 64, 70, 140])}),
    "past": (Case(T=70, H=1, S=45, B=2, D=16, E=8, keys="close"), {}),
    "masked past": (Case(T=70, H=1, S=70, B=2, D=16, E=8, keys="close"), {"key_mask": MASK}),
    "strength": (Case(T=70, H=1, D=16, E=8, keys="close"), {"strength": 0.4}),
    "no strength": (Case(T=40, H=1, D=16, E=8, keys="close"), {"strength": 0.0}),
    "number": (Case(T=70, H=1, D=16, E=8, keys="close"), {"sharpness": 1.7}),
}  # fmt: skip


def compare(case: Case, options: dict[str, object], dtype: torch.dtype, **features: bool) -> None:
    tensors = case.tensors(dtype, **features)
    weight = torch.randn(case.B, case.H, case.T, case.E).to(dtype)
    ours = evaluate(precondition, tensors, weight, impl="triton", **options)
    plain = evaluate(precondition, tensors, weight, impl="blockwise", **options)
    truth = evaluate(oracles.precondition, widened(tensors), weight.double(), **options)
    # The gradient of repeated keys nearly vanishes: its error is measured in units of that of ordinary keys.
    ordinary = evaluate(
        oracles.precondition, replace(case, keys="shifted").tensors(**features), weight.double(), **options
    )
    unit = max(0.1, ordinary["dk"].abs().max().item())
    # The gradient of the sharpness is a sum over rows that cancels: its unit is that of a result, for every row.
    units = {"dk": unit, "dk_past": unit, "dsharpness": 0.1 * case.B * case.T}
    assert_as_good_as(ours, plain, truth, multiple=2.0, floor=FLOOR[dtype], **units)


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(triton_solve, "solve_tiles", lambda *shape: SMALL)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_values_and_gradients_are_those_of_the_equation(name, dtype, small_tiles):
    case, options = CASES[name]
    compare(case, options, dtype)


@pytest.mark.parametrize("most", [1, 40_000], ids=["one small strip", "two strips"])
def test_inverses_beyond_the_memory_for_them_are_made_in_parts(most, small_tiles, monkeypatch):
    monkeypatch.setattr(triton_solve, "INVERSE_BYTES", most)
    case, options = CASES["strips"]
    compare(case, options, torch.float32, beta=True)


def test_two_runs_are_bitwise_equal(small_tiles):
    case, options = CASES["masked past"]
    tensors, weight = case.tensors(torch.bfloat16, beta=True, sharpness=True), torch.randn(2, 1, 70, 8)
    once, twice = (evaluate(precondition, tensors, weight, impl="triton", **options) for _ in range(2))
    assert all(torch.equal(once[name], twice[name]) for name in once)


@pytest.mark.parametrize(("name", "number"), [("k", torch.nan), ("beta", torch.nan), ("v", torch.inf)])
def test_what_is_not_finite_stays_in_its_document(name, number, small_tiles):
    """Documents that share a block and a strip with it are bitwise as they were."""
    case, options = Case(T=90, H=2, D=8, E=4, keys="close"), {"cu_seqlens": torch.tensor([0, 20, 50, 90])}
    tensors, weight = case.tensors(torch.float32, beta=True, sharpness=True), torch.randn(1, 2, 90, 4)
    clean = evaluate(precondition, tensors, weight, impl="triton", **options)
    tensors[name][0, 0, 30] = number
    dirty = evaluate(precondition, tensors, weight, impl="triton", **options)
    assert dirty["out"][0, 0, 30].isnan().all()
    assert torch.equal(clean["out"][0, 0, :30], dirty["out"][0, 0, :30])
    assert torch.equal(clean["dsharpness"][1], dirty["dsharpness"][1])
    for each in ("out", "dk", "dv", "dbeta"):
        others = torch.ones(2, 90, dtype=torch.bool)
        others[0, 20:50] = False
        assert torch.equal(dirty[each][0][others], clean[each][0][others]), each
        assert each == "out" or dirty[each][0, 0, 20:50].isnan().all()


@pytest.mark.parametrize("name", ["strips", "closest", "packed", "masked past"])
@DTYPES
def test_the_tiles_that_a_gpu_gets(name, dtype):
    case, options = CASES[name]
    compare(case, options, dtype)


@pytest.mark.parametrize("name", ["packed", "masked past"])
@DTYPES
def test_step_sizes_and_learned_sharpness_have_gradients(name, dtype, small_tiles):
    case, options = CASES[name]
    compare(case, options, dtype, beta=True, sharpness=True)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("case", "options", "dtype"),
    [
        (Case(T=33, B=2, H=1, D=5, E=3, keys="close"), {"key_mask": MASK[:, :33]}, torch.bfloat16),
        (Case(T=70, H=1, D=8, E=4, keys="repeated"), {"cu_seqlens": torch.tensor([0, 17, 18, 18, 70])}, torch.float32),
        (Case(T=17, S=5, H=1, D=17, E=4, keys="close"), {}, torch.float16),
    ],
    ids=["masked", "packed", "past"],
)
def test_short_sequences_in_small_tiles(case, options, dtype, small_tiles):
    compare(case, options, dtype, beta=True, sharpness=True)


@pytest.mark.parametrize(("D", "E"), [(3, 256), (80, 65), (129, 1)])
def test_any_head_size(D, E):
    compare(Case(T=40, H=1, D=D, E=E, keys="close"), {}, torch.float32)


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-12, 1e15, 1e37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_zero_small_and_huge_keys(size, dtype, small_tiles):
    """Every third key is that large. Gradients of keys are as large as keys are small: they are compared per key."""
    case = Case(T=40, H=1, D=8, E=4, keys="close")
    tensors = case.tensors()
    tensors["k"][:, :, ::3] *= size
    tensors = {name: x.to(dtype) for name, x in tensors.items()}
    weight = torch.randn(1, 1, 40, 4).to(dtype)
    ours, plain = (evaluate(precondition, tensors, weight, impl=impl) for impl in ("triton", "blockwise"))
    truth = evaluate(oracles.precondition, widened(tensors), weight.double())
    for results in (ours, plain, truth):
        norms = tensors["k"].double().norm(dim=-1, keepdim=True)
        results["dk"] = results["dk"].double() * norms
        results["dk"][norms.expand_as(results["dk"]) < torch.finfo(torch.float32).tiny] = 0
    assert_as_good_as(ours, plain, truth, multiple=2.0, floor=FLOOR[dtype])


@pytest.mark.parametrize("keys", ["close", "closest"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_inside_nothing_is_as_coarse_as_tf32(dtype, keys):
    """Results of 16-bit inputs before they are rounded, in Frobenius norm.

    For bfloat16 solutions are fed back in float16: at most 2u, u = 2^-11 (`docs/mathematics.md`, section 3), for the
    transposed system as well. One product in float16 for P would be off by more, in bfloat16 by 2e-2. Gradients of keys
    have no such bound: they cancel, and the stored y is rounded.
    """
    tensors = Case(T=140, H=1, D=32, E=16, keys=keys).tensors(dtype)
    k, v, weight = tensors["k"], tensors["v"], torch.randn(1, 1, 140, 16).to(dtype)
    truth = evaluate(oracles.precondition, widened({"k": k, "v": v}), weight.double())
    y, dv = torch.empty(v.shape), torch.empty(v.shape)
    system = checked_system(k, v)
    triton_solve.forward(system, v, y, None, SMALL)
    triton_solve.backward(system, weight, v, None, triton_solve.Gradients(dv, None, None, None, None, None), SMALL)
    for name, x in (("out", y), ("dv", dv)):
        off = (x.double() - truth[name]).norm() / truth[name].norm()
        assert off <= (2 * 2**-11 if dtype == torch.bfloat16 else 1e-4), name
