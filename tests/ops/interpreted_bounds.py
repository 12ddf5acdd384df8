"""No kernel reads or writes outside its tensors, and no program depends on another one of its launch.

Every tensor lies between guard zones, in shapes at and next to the borders of tiles.

The zones of floating point tensors are NaN, so that what is read from them shows in a result; those of integers are far
out of range. What is written to them shows afterwards.
"""

import math

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from lucid_attention import lucid_decode, lucid_path_attention, precondition
from lucid_attention.ops.lucid import triton_decode, triton_solve
from lucid_attention.ops.lucid.decode import inverse_key_norms
from lucid_attention.ops.path import tree, triton_pass
from lucid_attention.ops.path import triton_decode as path_triton
from lucid_attention.ops.path.decode import path_decode

from .interpreted_lucid import SMALL
from .interpreted_path import SMALL as SMALL_PATH

ZONE = 512


class Guards:
    """Tensors between zones, and whether the zones are as they were."""

    def __init__(self):
        self.wholes = []
        self.original = torch.Tensor.new_empty

    def around(self, x):
        size = x.numel()
        whole = torch.full((size + 2 * ZONE,), self.filling(x.dtype), dtype=x.dtype)
        whole[ZONE : ZONE + size] = x.flatten()
        self.wholes.append((whole, whole.clone(), size))
        return whole[ZONE : ZONE + size].view(x.shape)

    def filling(self, dtype):
        if dtype == torch.bool:
            return True
        return math.nan if dtype.is_floating_point else 99

    def new_empty(self, like, *shape, dtype=None, **options):
        shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        dtype = dtype or like.dtype
        return self.around(torch.full(tuple(shape), self.filling(dtype), dtype=dtype))

    def check(self):
        assert len(self.wholes) > 5
        for whole, before, size in self.wholes:
            for part in (slice(0, ZONE), slice(ZONE + size, None)):
                assert torch.equal(whole[part].nan_to_num(77), before[part].nan_to_num(77)), "a guard zone was written"


@pytest.fixture
def guards(monkeypatch):
    monkeypatch.setattr(triton_solve, "solve_tiles", lambda *shape: SMALL)
    monkeypatch.setattr(triton_solve, "PACK_ROWS", 16)
    monkeypatch.setattr(triton_decode, "splits_of", lambda n, places: 2)
    found = Guards()
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda self, *shape, **options: found.new_empty(self, *shape, **options)
    )
    return found


@pytest.mark.parametrize("T", [1, 32, 33, 65])
@pytest.mark.parametrize("S", [0, 1, 32])
@pytest.mark.parametrize("sizes", [(16, 17), (5, 33)], ids=str)
def test_the_solve_keeps_to_its_tensors(guards, T, S, sizes):
    D, E = sizes
    k, v = guards.around(torch.randn(1, 2, T, D) + 1).requires_grad_(), guards.around(torch.randn(1, 2, T, E))
    beta, mask = guards.around(torch.rand(1, 2, T)), guards.around(torch.rand(1, S + T) > 0.2)
    past = borders = None
    if S:
        past = guards.around(torch.randn(1, 2, S, D) + 1).requires_grad_(), guards.around(torch.randn(1, 2, S, E))
    else:
        borders = guards.around(torch.tensor([0, T // 3, T // 3, T]))
    y = precondition(k, v, past=past, key_mask=mask, cu_seqlens=borders, beta=beta, impl="triton")
    grads = torch.autograd.grad(y, [k] if past is None else [k, past[0]], guards.around(torch.randn(y.shape)))
    assert all(x.isfinite().all() for x in (y, *grads))
    guards.check()


@pytest.mark.parametrize("S", [0, 1, 32, 65])
@pytest.mark.parametrize("sizes", [(16, 17), (5, 33)], ids=str)
def test_a_decoding_step_keeps_to_its_tensors(guards, S, sizes):
    D, E = sizes
    q, k, v = (guards.around(torch.randn(2, *shape)) for shape in ((6, 1, D), (2, S + 1, D), (2, 1, E)))
    y_past, mask = guards.around(torch.randn(2, 2, S, E)), guards.around(torch.rand(2, S + 1) > 0.2)
    norms = guards.around(inverse_key_norms(k))
    for key_mask in (None, mask):
        step = lucid_decode(q, k, v, y_past, norms, key_mask=key_mask, impl="triton")
        assert step.o.isfinite().all()
        assert step.y.isfinite().all()
    guards.check()


@pytest.mark.parametrize("T", [1, 16, 33])
@pytest.mark.parametrize("S", [0, 17])
def test_path_keeps_to_its_tensors(guards, T, S, monkeypatch):
    monkeypatch.setattr(tree, "LEAF", 16)
    monkeypatch.setattr(triton_pass, "BLOCK_LEAVES", 2)
    monkeypatch.setattr(triton_pass, "path_tiles", lambda *shape: SMALL_PATH)
    shapes = {"q": (2, T, 5), "k": (1, T, 5), "v": (1, T, 17), "w": (1, T, 5), "beta": (1, T)}
    tensors = {name: guards.around(torch.rand(1, *shape) / 2).requires_grad_() for name, shape in shapes.items()}
    past = borders = None
    if S:
        past = tuple(guards.around(torch.rand(1, 1, S, *last)) for last in ((5,), (17,), ()))
    else:
        borders = guards.around(torch.tensor([0, T // 3, T // 3, T]))
    mask = guards.around(torch.arange(S + T)[None] % 5 > 0)
    o = lucid_path_attention(**tensors, past=past, key_mask=mask, cu_seqlens=borders, impl="triton")
    grads = torch.autograd.grad(o, list(tensors.values()), guards.around(torch.randn(o.shape)))
    assert all(x.isfinite().all() for x in (o, *grads))
    guards.check()


@pytest.mark.parametrize("S", [0, 1, 33])
@pytest.mark.parametrize("sizes", [(16, 17), (5, 33)], ids=str)
def test_a_path_step_keeps_to_its_tensors(guards, S, sizes, monkeypatch):
    monkeypatch.setattr(path_triton, "splits_of", lambda n, places: 2)
    D, E = sizes
    q, k, v, y = (guards.around(torch.randn(2, *x)) for x in ((6, 1, D), (2, S + 1, D), (2, 1, E), (2, S, E)))
    w, beta, product = (guards.around(torch.rand(2, 2, *x)) for x in ((1, D), (1,), (D, D)))
    # Far smaller than those of the keys: `live` and `product` are none of a real sequence, and P would overflow.
    norms = guards.around(inverse_key_norms(k).clamp(max=1) / 100)
    mask = guards.around(torch.rand(2, S + 1) > 0.2)
    for pending in {0, S // 2, S}:
        live = guards.around(torch.randn(2, 2, S - pending, D))
        step = path_decode(
            q, k, v, w, beta, y, product, pending, live=live, inverse_norms=norms, key_mask=mask, impl="triton"
        )
        assert all(x.isfinite().all() for x in step)
    guards.check()


@triton.jit
def planted_kernel(x, out, KIND: tl.constexpr):
    """Every program copies a number, where KIND is "right"."""
    pid = tl.program_id(0)
    place = pid // 2 if KIND == "two write" else pid
    target = x + (pid + 1) if KIND == "one reads" else out + place
    tl.store(target, tl.load(x + pid))
    if KIND == "reads its own":
        tl.store(x + pid, tl.load(out + pid))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("two write", "two programs write to one address"),
        ("one reads", "a program reads what another one writes"),
        ("reads its own", "a program reads what it wrote"),
    ],
)
def test_the_log_of_addresses_finds_planted_races(kind, message):
    """Every launch of these tests is checked by it."""
    x, out = torch.zeros(5), torch.zeros(5)
    planted_kernel[(4,)](x, out, KIND="right")
    with pytest.raises((AssertionError, InterpreterError), match=message):
        planted_kernel[(4,)](x, out, KIND=kind)
