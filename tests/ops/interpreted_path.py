"""The Triton kernels of PaTH and LUCID-PaTH in Triton's interpreter, against float64.

See `interpreted_lucid.py` for how it is run, and for the rule: at most twice the error of `blockwise`, and a floor. In
float32 the floor is the precision of products in tf32x3: where a gradient is zero, as dq of one token, it is the
difference of two equal numbers that were made in two ways. The truth multiplies every Householder factor, token by
token (`path_cases.py`).
"""

import pytest
import torch

from lucid_attention.ops.path import tree, triton_decode, triton_pass
from lucid_attention.ops.path.api import path_triton_op
from lucid_attention.ops.path.decode import path_decode
from lucid_attention.ops.path.system import checked_path_system
from lucid_attention.ops.path.triton_pass import PathTileSizes
from lucid_attention.ops.triton_tiles import Tile

from .cases import assert_as_good_as, error, keys_of, widened
from .path_cases import OPERATORS, PathCase, call, evaluate, five_masks, packed_up, truth

FLOOR = {torch.float32: 1e-5, torch.bfloat16: 1e-4, torch.float16: 1e-4}
DTYPES = pytest.mark.parametrize("dtype", FLOOR, ids=lambda dtype: str(dtype).removeprefix("torch."))
TILE = Tile(16, 16, 16, 16, out=16)
SMALL = PathTileSizes(TILE, TILE, TILE)
BORDERS = torch.tensor([0, 37, 38, 38, 64, 70, 100])
CASES = {
    "one token": (PathCase(T=1, B=2, G=2, beta="2"), {}),
    "one leaf": (PathCase(T=14, G=2, D=1, E=4, beta="edges"), {}),
    "three levels": (PathCase(T=100, H=1, G=2, D=7, E=5, keys="close", beta="small"), {}),
    "four levels": (PathCase(T=200, H=1, D=4, E=18, keys="repeated", w="repeated", beta="edges"), {}),
    "equal keys": (PathCase(T=70, H=1, D=8, keys="equal", beta="small"), {}),
    "runs": (PathCase(T=120, H=1, keys="runs", w="runs", beta="2"), {}),
    "masked": (PathCase(T=40, B=5, H=1, D=4, keys="close", beta="small"), {"key_mask": five_masks(40)}),
    "packed": (PathCase(T=100, G=2, D=4, keys="close", beta="small"), {"cu_seqlens": BORDERS}),
    "packed and masked": (
        PathCase(T=100, H=1, D=4, keys="close", beta="edges"),
        {"cu_seqlens": BORDERS, "key_mask": torch.arange(100)[None] % 9 > 1},
    ),
    "past": (PathCase(T=40, S=21, B=2, G=2, H=1, D=5, E=7, keys="close", beta="small"), {}),
    "masked past": (PathCase(T=20, S=35, B=5, H=1, D=4, keys="close", beta="small"), {"key_mask": five_masks(55)}),
    "scale": (PathCase(T=40, H=1, D=4), {"scale": -0.7}),
    "all at once": (
        PathCase(T=50, S=9, H=1, G=2, D=5, keys="close", beta="edges"),
        {"key_mask": torch.arange(59)[None] % 7 > 0, "scale": 0.4},
    ),
    "short documents": (PathCase(T=40, H=1, D=4, keys="close"), {"cu_seqlens": torch.tensor([0, 3, 20, 40])}),
}
QUICK = {("all at once", "lucid_path"), ("short documents", "path")}


def compare(operator, case, dtype, options, *, sharpness=True):
    """w and β stay float32, as the modules hand them over."""
    tensors, weight = case.tensors(operator, dtype, sharpness=sharpness), case.weight(operator).to(dtype)
    tensors |= {name: tensors[name].float() for name in ("w", "beta")}
    ours = evaluate(call, operator, tensors, weight, impl="triton", **options)
    plain = evaluate(call, operator, tensors, weight, impl="blockwise", **options)
    expected = evaluate(truth, operator, widened(tensors), weight.double(), **options)
    # As in the doctor: read-outs round values and weights to 16 bits, which the plain formula does not.
    rounded = operator != "precondition" and dtype != torch.float32
    floor = FLOOR[dtype] + (2 * torch.finfo(dtype).eps if rounded else 0)
    # The gradient of the sharpness is a sum over rows that cancels: its unit is that of a result, for every row.
    assert_as_good_as(ours, plain, expected, multiple=2.0, floor=floor, dsharpness=0.1 * case.B * case.T)
    return ours


@pytest.fixture
def small(monkeypatch):
    """Leaves of 16 positions, blocks of 32: short sequences have several levels."""
    monkeypatch.setattr(tree, "LEAF", 16)
    monkeypatch.setattr(triton_pass, "BLOCK_LEAVES", 2)
    monkeypatch.setattr(triton_pass, "path_tiles", lambda *shape: SMALL)


def without_scale(operator, options):
    return {name: x for name, x in options.items() if (operator, name) != ("precondition", "scale")}


@pytest.mark.parametrize(
    ("name", "operator"),
    [
        pytest.param(name, operator, marks=[pytest.mark.quick] if (name, operator) in QUICK else [])
        for name in CASES
        for operator in OPERATORS
    ],
)
def test_values_and_gradients_are_those_of_the_explicit_product(name, operator, small):
    case, options = CASES[name]
    options = without_scale(operator, options)
    ours = compare(operator, case, torch.float32, options)
    mask = options.get("key_mask")
    if mask is not None:
        hidden = ~mask[:, None, case.S :]
        for each in ("out", "dk", "dv", "dw", "dbeta"):
            assert (ours[each][hidden.expand(ours[each].shape[:3])] == 0).all(), each


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("three levels", torch.bfloat16), ("masked", torch.bfloat16), ("packed", torch.float16), ("past", torch.float16)],
)
def test_16_bit_inputs(name, operator, dtype, small):
    case, options = CASES[name]
    compare(operator, case, dtype, options)


@pytest.mark.parametrize("name", ["three levels", "packed", "past"])
def test_two_runs_are_bitwise_equal_and_heads_may_come_in_groups(name, small, monkeypatch):
    case, options = CASES[name]
    tensors, weight = case.tensors("lucid_path", torch.float32, sharpness=True), case.weight("lucid_path").float()
    once = evaluate(call, "lucid_path", tensors, weight, impl="triton", **options)
    monkeypatch.setattr(triton_pass, "BYTES", 1)
    twice = evaluate(call, "lucid_path", tensors, weight, impl="triton", **options)
    assert all(torch.equal(once[each], twice[each]) for each in once)


@pytest.mark.parametrize("operator", ["lucid_path", "precondition"])
@pytest.mark.parametrize("c", [0.3, 39.0])
def test_the_sharpness_may_be_a_number(operator, c, small):
    compare(operator, PathCase(T=40, H=1, keys="close"), torch.float32, {"sharpness": c}, sharpness=False)


@pytest.mark.parametrize("size", [0.0, 1e-18, 1e15])
@pytest.mark.parametrize("S", [0, 5])
def test_zero_small_and_large_keys(size, S, small):
    """They have a direction, or none. Of such lengths a float32 dk says nothing."""
    case = PathCase(T=40, H=1, S=S, keys="close", beta="small")
    tensors, weight = case.tensors("precondition", torch.float32), case.weight("precondition").float()
    tensors["k"][:, :, ::3] *= size
    ours = evaluate(call, "precondition", tensors, weight, impl="triton")
    plain = evaluate(call, "precondition", tensors, weight, impl="blockwise")
    expected = evaluate(truth, "precondition", widened(tensors), weight.double())
    for results in (ours, plain, expected):
        results.pop("dk")
    assert_as_good_as(ours, plain, expected, multiple=2.0, floor=FLOOR[torch.float32])


@pytest.mark.parametrize("operator", OPERATORS)
def test_whatever_stands_at_a_masked_place_changes_nothing(operator, small):
    case = PathCase(T=40, S=11, B=5, H=1, G=2, D=4)
    tensors, mask, weight = case.tensors(operator, torch.float32), five_masks(51), case.weight(operator).float()
    clean = evaluate(call, operator, tensors, weight, key_mask=mask, impl="triton")
    for name, x in tensors.items():
        hidden = ~mask[:, None, : case.S] if name in ("k_past", "y_past", "inverse_norms") else ~mask[:, None, case.S :]
        if x.ndim > 1:
            x[hidden.expand(x.shape[:3])] = torch.nan
    dirty = evaluate(call, operator, tensors, weight, key_mask=mask, impl="triton")
    assert all(torch.equal(clean[each], dirty[each]) for each in clean)


@pytest.mark.parametrize(("name", "number"), [("k", torch.nan), ("w", torch.nan), ("v", torch.inf)])
def test_what_is_not_finite_stays_in_its_document(name, number, small):
    """Other documents are bitwise as they were. Inside its own it may reach earlier positions of a leaf."""
    case, options = PathCase(T=60, H=2, G=2, D=4, keys="close"), {"cu_seqlens": torch.tensor([0, 13, 40, 60])}
    tensors, weight = case.tensors("lucid_path", torch.float32, sharpness=True), case.weight("lucid_path").float()
    clean = evaluate(call, "lucid_path", tensors, weight, impl="triton", **options)
    tensors[name][0, 0, 20] = number
    dirty = evaluate(call, "lucid_path", tensors, weight, impl="triton", **options)
    assert dirty["out"][0, 0, 20].isnan().all()
    # dv does not depend on v.
    assert not dirty["dk"][0, 0, 20].isfinite().any()
    for each, x in dirty.items():
        if each == "dsharpness":
            assert torch.equal(x[1:], clean[each][1:])
            continue
        others = torch.ones(x.shape[1:3], dtype=torch.bool)
        others[: x.shape[1] // 2, 13:40] = False
        assert torch.equal(x[0][others], clean[each][0][others]), each


@pytest.mark.parametrize("sizes", [(1, 1), (17, 65), (256, 256)], ids=str)
def test_any_head_size(sizes, small):
    compare("lucid_path", PathCase(T=20, H=1, D=sizes[0], E=sizes[1], keys="close", beta="small"), torch.float32, {})


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_own_tiles_and_leaves(dtype, operator):
    compare(operator, PathCase(T=330, S=10, H=1, G=2, D=20, E=12, keys="closest", beta="small"), dtype, {})


def test_any_layout_of_the_inputs(small):
    tensors = PathCase(T=32, D=16, E=16).tensors("lucid_path", torch.float32)
    expected = call("lucid_path", tensors, impl="triton")
    turned = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in tensors.items()}
    assert torch.equal(call("lucid_path", turned, impl="triton"), expected)


KINDS = {
    "plain": (PathCase(T=20, H=1, G=2), {}),
    "masked": (PathCase(T=20, B=2, H=1), {"key_mask": torch.arange(40).view(2, 20) % 9 > 1}),
    "packed": (PathCase(T=20, H=1), {"cu_seqlens": torch.tensor([0, 3, 20])}),
    "past": (PathCase(T=9, S=6, H=1), {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_opcheck_finds_nothing(kind, small):
    case, options = KINDS[kind]
    tensors = case.tensors("lucid_path", torch.float32, sharpness=True)
    given = packed_up({name: x.requires_grad_() for name, x in tensors.items()})
    system = checked_path_system(**given, solves=True, **options)
    torch.library.opcheck(path_triton_op.forward, system.operator_inputs(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_compiled_call_is_one_graph_and_equals_the_plain_one(operator, small):
    torch._dynamo.reset()
    case, options = KINDS["past"]
    tensors, weight = case.tensors(operator, torch.float32), case.weight(operator).float()
    plain = evaluate(call, operator, tensors, weight, impl="triton", **options)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    ours = evaluate(compiled, operator, tensors, weight, impl="triton", **options)
    assert all(error(ours[each], plain[each]) <= 1e-6 for each in plain)


def test_autocast_does_not_reach_into_a_pass(small):
    case, _ = KINDS["plain"]
    tensors = case.tensors("precondition", torch.float32)
    plain = call("precondition", tensors, impl="triton")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(call("precondition", tensors, impl="triton"), plain)


STEPS = {
    "first token": PathCase(T=1, B=2, G=2),
    "second token": PathCase(T=2, D=1, E=3),
    "grouped": PathCase(T=70, B=2, G=3, D=20, E=7, keys="close"),
    "long": PathCase(T=400, H=1, G=4, D=36, E=16, keys="closest"),
    "wide": PathCase(T=40, H=1, G=17, D=256, E=256, keys="close"),
}


def cached(case, dtype, solves, given, pending):
    """Arguments of `path_decode`: any cache and any product will do."""
    B, H, T, D, E = case.B, case.H, case.T, case.D, case.E
    keys = keys_of(case.keys, B, H, T, D).to(dtype)
    out = {"q": torch.randn(B, H * case.G, 1, D).to(dtype), "k": keys, "v": torch.randn(B, H, 1, E).to(dtype)}
    w = torch.nn.functional.normalize(torch.randn(B, H, 1, D), dim=-1)
    out |= {"w": w, "beta": 2 * torch.rand(B, H, 1), "y_past": torch.randn(B, H, T - 1, E).to(dtype)}
    out |= {"product": 0.8 * torch.linalg.qr(torch.randn(B, H, D, D)).Q, "pending": pending}
    if given:
        out["live"] = 0.9 * keys[:, :, pending:-1].float()
    if solves:
        out["inverse_norms"] = 0.9 / keys.float().norm(dim=-1)
        out["sharpness"] = torch.linspace(0.7, 2.1, H)
    return out


def compare_step(arguments, dtype, **options):
    ours = path_decode(**arguments, **options, impl="triton")
    plain = path_decode(**arguments, **options, impl="torch")
    wide = {n: x.double() if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}
    expected = path_decode(**wide, **options, impl="torch")
    for name in ("o", "y", "live", "product"):
        one, two, three = (getattr(x, name) for x in (ours, plain, expected))
        assert one.dtype == two.dtype, name
        assert error(one, three) <= 2 * error(two, three) + FLOOR[dtype], name


@pytest.fixture(params=[1, 5], ids=["one program", "split"])
def splits(request, monkeypatch):
    monkeypatch.setattr(triton_decode, "splits_of", lambda n, places: request.param)


@pytest.mark.quick
def test_a_step_reads_pending_and_live_keys_once(splits):
    compare_step(cached(STEPS["grouped"], torch.bfloat16, True, True, 40), torch.bfloat16)


@pytest.mark.parametrize(("part", "solves"), [(0.0, True), (0.6, True), (0.6, False), (1.0, False)])
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_step_is_that_of_the_plain_formula(name, dtype, part, solves, splits):
    case = STEPS[name]
    pending = int(part * (case.T - 1))
    compare_step(cached(case, dtype, solves, part < 1, pending), dtype)


@DTYPES
def test_a_step_knows_masks_and_every_option(dtype, splits):
    case = STEPS["grouped"]
    mask = torch.arange(140).view(2, 70) % 7 > 1
    last = torch.ones(2, 70, dtype=torch.bool)
    last[1, -1] = False
    for key_mask in (mask, last, torch.zeros_like(mask)):
        compare_step(cached(case, dtype, True, True, 30), dtype, key_mask=key_mask, scale=0.4)
        compare_step(cached(case, dtype, False, False, 30), dtype, key_mask=key_mask)
