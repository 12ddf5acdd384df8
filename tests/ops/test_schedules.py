"""The same answers for every schedule: head by head as on a CPU, all heads at once as on an accelerator, any block."""

import pytest
import torch

from lucid_attention.ops.lucid.blockwise import backward, forward
from lucid_attention.ops.lucid.system import Gradients, System
from lucid_attention.ops.triangular import Schedule, pick_schedule, solve_unit_lower_, solve_unit_lower_transposed_

from . import oracles
from .cases import Case, assert_exact, evaluate

B, H, T, S, D, E = 2, 3, 30, 9, 4, 5
SCHEDULES = {
    "head by head, block 1": Schedule(1, 1, 1),
    "head by head, block 7": Schedule(1, 7, 49),
    "head by head, wide tiles": Schedule(1, 7, 7 * 23),
    "head by head, one block": Schedule(1, 1000, 1000 * 1000),
    "two of three heads": Schedule(2, 16, 256),
    "one batch row": Schedule(4, 16, 300),
    "all heads, block 1": Schedule(6, 1, 4),
    "all heads, block 7": Schedule(6, 7, 49),
    "all heads, block 64": Schedule(100, 64, 64 * 64),
}


def problem(norm: str) -> tuple[dict[str, torch.Tensor], torch.Tensor, dict[str, torch.Tensor]]:
    tensors = Case(T=T, B=B, H=H, S=S, D=D, E=E).tensors(beta=True, sharpness=True)
    key_mask = torch.rand(B, S + T) > 0.2
    dy = torch.randn(B, H, T, E, dtype=torch.float64)
    return tensors, dy, {"key_mask": key_mask, "norm": norm, "strength": 0.9}


def run(
    schedule: Schedule, tensors: dict[str, torch.Tensor], dy: torch.Tensor, key_mask, norm, strength
) -> dict[str, torch.Tensor]:
    """Forward and backward of the block-wise solve as the operator calls them."""
    sharpness = tensors["sharpness"].expand(B, H)
    x = tensors
    system = System(x["k"], x["k_past"], x["y_past"], key_mask, None, x["beta"], norm, sharpness, strength)
    y, z = torch.empty_like(x["v"]), torch.empty_like(x["v"])
    winners = torch.empty(B, H, S + T, dtype=torch.int64) if norm == "row_max" else None
    forward(system, x["v"], y, z, winners, schedule)
    names = ("v", "k", "k_past", "y_past", "beta")
    grads = Gradients(*(torch.empty_like(x[name]) for name in names), torch.empty(B, H, dtype=torch.float64))
    backward(system, dy, y, z, winners, grads, schedule)
    out = {f"d{name}": getattr(grads, f"d{name}") for name in names}
    return {"out": y, "dsharpness": grads.dsharpness.sum(0), **out}


@pytest.mark.parametrize("norm", ["key", "row_max"])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_every_schedule_gives_the_equation_forward_and_backward(schedule, norm):
    tensors, dy, options = problem(norm)
    truth = evaluate(oracles.precondition, tensors, dy, **options)
    assert_exact(run(schedule, tensors, dy, **options), truth)


@pytest.mark.parametrize("norm", ["key", "row_max"])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_every_schedule_without_options_gives_the_equation(schedule, norm):
    """No past, mask, step sizes or learned sharpness: other buffers, and e^−c inside the products."""
    tensors = Case(T=T, B=B, H=H, D=D, E=E).tensors()
    dy = torch.randn(B, H, T, E, dtype=torch.float64)
    truth = evaluate(oracles.precondition, tensors, dy, norm=norm, sharpness=1.3, strength=0.9)
    k, v = tensors["k"], tensors["v"]
    system = System(k, norm=norm, sharpness=1.3, strength=0.9)
    y, dv, dk = torch.empty_like(v), torch.empty_like(v), torch.empty_like(k)
    winners = torch.empty(B, H, T, dtype=torch.int64) if norm == "row_max" else None
    forward(system, v, y, None, winners, schedule)
    backward(system, dy, y, None, winners, Gradients(dv, dk, None, None, None, None), schedule)
    assert_exact({"out": y, "dv": dv, "dk": dk}, truth)


@pytest.mark.parametrize("new", [1, 2, 255, 256, 257, 5000])
@pytest.mark.parametrize("past", [0, 1, 100_000])
@pytest.mark.parametrize("heads", [1, 7, 4096])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_schedule_fits_its_problem(device, heads, past, new):
    schedule = pick_schedule(torch.device(device), heads, new, past)
    assert 1 <= schedule.heads <= heads
    assert 1 <= schedule.block <= min(256, new)
    assert schedule.elements >= schedule.block**2  # a diagonal block is one tile
    budget = 2**18 if device == "cpu" else 2**26
    assert schedule.heads * schedule.elements <= max(budget, schedule.heads * schedule.block**2)


def test_an_accelerator_takes_all_heads_at_once_and_a_cpu_what_fits_its_cache():
    assert pick_schedule(torch.device("cuda"), 32, 4096).heads == 32
    assert pick_schedule(torch.device("cpu"), 32, 4096).heads == 1
    assert pick_schedule(torch.device("cpu"), 32, 16).heads == 32


@pytest.mark.parametrize("size", [1, 5, 64])
def test_what_stands_on_and_above_the_diagonal_is_not_read(size):
    matrix = torch.randn(3, size, size, dtype=torch.float64) / 4
    y = torch.randn(3, size, 2, dtype=torch.float64)
    P = matrix.tril(-1) + torch.eye(size, dtype=torch.float64)
    upper = torch.ones(size, size).triu().bool()
    for filling in (float("nan"), float("inf")):
        broken = matrix.masked_fill(upper, filling)
        for solve, system in ((solve_unit_lower_, P), (solve_unit_lower_transposed_, P.mT)):
            x = y.clone()
            solve(broken, x)
            torch.testing.assert_close(x, torch.linalg.solve(system, y))
