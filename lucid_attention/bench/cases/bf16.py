"""Full passes in bfloat16. The solve works in float32 inside, torch's attention may not."""

import torch

from ..results import Benchmark, Case, Settings
from .peers import OURS, SDPA
from .solve import COLUMNS, Setup, Shape, case

SHAPES = (Shape(64, 8, 8), Shape(64, 32, 4))
FORWARD_LIMIT = {Shape(64, 32, 4): 1.5}


def _cases(settings: Settings) -> list[Case]:
    lengths = (256,) if settings.quick else (1024, 2048, 4096)
    return [
        case(
            Setup(
                "bf16",
                shape,
                N,
                backward,
                torch.bfloat16,
                threads,
                (SDPA, OURS),
                shape.bound if backward else FORWARD_LIMIT.get(shape),
            ),
            settings,
        )
        for threads in settings.threads[:1]
        for shape in SHAPES
        for backward in (False, True)
        for N in lengths
    ]


BENCHMARK = Benchmark(
    name="bf16",
    about=(
        "The same in bfloat16. The solve runs in float32 inside; torch's attention uses 16-bit matrix products where "
        "the CPU has them, so the ratio depends on the CPU more than in float32."
    ),
    limits=(
        "forward+backward: the bound of float32, 1 + H_kv/H; forward: 1.5 for 32/4 heads, none for 8/8 (reported only)."
    ),
    minutes="about 2 minutes where the CPU has no 16-bit products, less elsewhere",
    cases=_cases,
    columns=COLUMNS,
)
