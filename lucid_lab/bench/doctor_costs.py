"""What `lucid doctor` measures: time and peak memory of LUCID against torch's attention, on one shape per device."""

import statistics
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lucid_attention.ops import self_check
from lucid_attention.ops.lucid.api import lucid_attention
from lucid_attention.ops.lucid.decode import inverse_key_norms, lucid_decode

from .harness import Run, device_clock, race

SDPA = "SDPA"
BUDGET = 3.0
WARM_UP = 3
ATTENTION, DECODE = ("blockwise", "triton"), ("torch", "numba", "triton")


class Cost(NamedTuple):
    """Median seconds, and peak memory beyond the inputs where the device tells it; ratios to SDPA."""

    what: str
    impl: str
    seconds: float
    time_ratio: float
    megabytes: float | None = None
    memory_ratio: float | None = None


class Sizes(NamedTuple):
    """H heads of size D; N tokens, and S in the cache of a decoding step."""

    H: int
    N: int
    D: int
    S: int
    dtype: torch.dtype

    @classmethod
    def of(cls, device: torch.device) -> "Sizes":
        if device.type == "cpu":
            return cls(4, 1024, 64, 4096, torch.float32)
        return cls(8, 8192, 128, 32768, torch.bfloat16)

    @property
    def name(self) -> str:
        return f"{self.H} heads × {self.D}, {str(self.dtype).removeprefix('torch.')}"


def measure(device: torch.device, wrong: set[tuple[str, str]]) -> list[Cost]:
    """Forward, forward with backward, and one decoding step. wrong: (operator, implementation) to leave out."""
    sizes = Sizes.of(device)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, sizes.H, sizes.N, sizes.D, device=device, dtype=sizes.dtype) for _ in range(3))
    costs = []
    usable = [impl for impl in ATTENTION if not self_check.cannot_run(impl, device, sizes.dtype)]
    usable = [impl for impl in usable if not {("lucid_attention", impl), ("precondition", impl)} & wrong]
    for backward in (False, True):
        runs: dict[str, Run] = {SDPA: partial(_attend, _sdpa, q, k, v, backward)}
        for impl in usable:
            runs[impl] = partial(_attend, partial(lucid_attention, impl=impl), q, k, v, backward)
        what = f"{'forward + backward' if backward else 'forward'}, {sizes.N} tokens, {sizes.name}"
        costs += _compare(what, runs, device)
    usable = [impl for impl in DECODE if not self_check.cannot_run(impl, device, sizes.dtype)]
    costs += _decode_costs(sizes, device, [impl for impl in usable if ("lucid_decode", impl) not in wrong])
    return costs


def _decode_costs(sizes: Sizes, device: torch.device, usable: list[str]) -> list[Cost]:
    k, y = (torch.randn(1, sizes.H, sizes.S, sizes.D, device=device, dtype=sizes.dtype) for _ in range(2))
    new, norms = k[:, :, -1:], inverse_key_norms(k)
    runs: dict[str, Run] = {SDPA: partial(F.scaled_dot_product_attention, new, k, y)}
    for impl in usable:
        runs[impl] = partial(lucid_decode, new, k, new, y[:, :, 1:], norms, impl=impl)
    return _compare(f"one token behind {sizes.S - 1}, {sizes.name}", runs, device)


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _attend(attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, backward: bool) -> object:
    if not backward:
        with torch.no_grad():
            return attention(q, k, v)
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    return torch.autograd.grad(attention(q, k, v).sum(), (q, k, v))


def _compare(what: str, runs: dict[str, Run], device: torch.device) -> list[Cost]:
    for call in runs.values():
        for _ in range(WARM_UP):
            call()
    times = race(runs, budget=BUDGET, seed=what, clock=device_clock(device))
    seconds = {name: statistics.median(values) for name, values in times.items()}
    memory = {name: _peak(call, device) for name, call in runs.items()}
    peer = memory[SDPA]
    return [
        Cost(
            what,
            name,
            seconds[name],
            seconds[name] / seconds[SDPA],
            None if used is None else used / 1e6,
            None if used is None or not peer else used / peer,
        )
        for name, used in memory.items()
    ]


def _peak(call: Run, device: torch.device) -> int | None:
    """Peak memory of a call beyond what was there before, in bytes. On a CPU `lucid bench memory` measures it."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = call()
    torch.cuda.synchronize(device)
    del result
    return torch.cuda.max_memory_allocated(device) - before
