"""The error of the solve in float32, and with P rounded to bfloat16."""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lucid_attention.ops.lucid.api import precondition

from ..report import fact
from ..results import Benchmark, Case, Column, Record, Settings

D = 64
KINDS = ("independent", "cosine 0.9", "cosine 0.99", "equal", "runs of 64")
OURS, ROUNDED = "float32 inside", "P rounded to bfloat16"


def _keys(kind: str, N: int) -> Tensor:
    torch.manual_seed(0)
    if kind == "equal":
        return torch.randn(1, 1, 1, D).repeat(1, 1, N, 1)
    if kind == "runs of 64":
        return torch.randn(1, 1, -(-N // 64), D).repeat_interleave(64, 2)[:, :, :N]
    cosine = float(kind.split()[1]) if kind.startswith("cosine") else 0.0
    # With a common mean of this size, two random keys have this cosine.
    return torch.randn(1, 1, N, D) + math.sqrt(cosine / (1 - cosine))


def _rounded(k: Tensor, v: Tensor) -> Tensor:
    """The solve in float32, with P rounded to bfloat16."""
    unit = F.normalize(k, dim=-1)
    P = (math.sqrt(D) * (unit @ unit.mT - 1)).exp().bfloat16().float()
    return torch.linalg.solve_triangular(P, v, upper=False, unitriangular=True)


def _measure(kind: str, N: int, threads: int) -> Record:
    k, v = _keys(kind, N), torch.randn(1, 1, N, D)
    truth = precondition(k.double(), v.double(), impl="reference")

    def error(y: Tensor) -> str:
        return f"{((y - truth).norm() / truth.norm()).item():.0e}"

    facts: dict[str, int | str] = {
        "keys": kind,
        "N": N,
        OURS: error(precondition(k, v)),
        ROUNDED: error(_rounded(k, v)),
    }
    return Record("accuracy", threads, facts, {})


def _cases(settings: Settings) -> list[Case]:
    lengths = (256,) if settings.quick else (1024, 4096)
    threads = settings.threads[0]
    return [
        Case(
            f"accuracy {kind} {N}", f"{kind} N={N}", threads, partial(_measure, kind, N, threads), fixed=1e-6 * N**2 / 4
        )
        for kind in KINDS
        for N in lengths
    ]


BENCHMARK = Benchmark(
    name="accuracy",
    about=(
        f"Relative error of Y (Frobenius norm, against the dense float64 solve of the same float32 inputs), D = {D}: "
        "ours, which keeps float32 inside, and a solve in float32 whose matrix P was rounded to bfloat16."
    ),
    limits="",
    cases=_cases,
    columns=tuple(Column(name, fact(name)) for name in ("keys", "N", OURS, ROUNDED)),
)
