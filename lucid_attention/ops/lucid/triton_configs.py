"""One fixed configuration of the LUCID kernels per architecture and shape class. No autotuning; no length.

Every entry compiles for its architecture without spills and within its limits: `make test-gpu-offline` checks it and
writes `docs/gpu_kernels.md`.
"""

from dataclasses import dataclass

import torch

from ..triton_tiles import Tile


@dataclass(frozen=True)
class SolveTiles:
    """block: rows of a diagonal block; a chunk, two blocks, is solved by one launch; strip: rows whose solution is
    taken to all later rows at once."""

    inverse: Tile
    merge: Tile
    solve: Tile
    update: Tile
    gradient: Tile
    block: int = 64
    strip: int = 512

    @property
    def chunk(self) -> int:
        return 2 * self.block


# Rows of a tile and piece of the head size of the gradients of bfloat16 keys: the largest that spill nothing. 64 rows
# are what the matrix instructions of sm_90 and sm_100 need.
GRADIENT = {"sm_80": (32, 128), "sm_90": (64, 64), "sm_100": (64, 64), "gfx942": (64, 128)}
# The piece of the values in flight there: 32, or what packed documents need to spill nothing (float16 everywhere).
GRADIENT_VALUES = {"sm_90": 16}


def solve_tiles(architecture: str, dtype: torch.dtype, features: int, values: int) -> SolveTiles:
    """dtype: the wider one of keys and values; features, values: the padded head sizes."""
    width = min(128, values)
    whole = 32 if dtype == torch.float32 else features
    rows, out = GRADIENT.get(architecture, (32, 64))
    piece = 16 if dtype == torch.float16 else GRADIENT_VALUES.get(architecture, 32)
    # Whole keys leave less room for values; only here it is too little.
    narrow = architecture == "sm_120" and whole >= 128
    if dtype != torch.bfloat16:
        rows, out = 32, 64 if features <= 128 else 32
    return SolveTiles(
        inverse=Tile(64, 64, width, 32, warps=8 if architecture == "sm_100" else 4),
        merge=Tile(64, 16, width, min(whole, 64)),
        solve=Tile(64, 32, min(32, values), 0),
        update=Tile(64, 32, min(64, width) if narrow else width, whole),
        gradient=Tile(rows, 32, min(piece, values), min(whole, 64), out=out),
    )


def step_tile(architecture: str, dtype: torch.dtype, features: int, values: int) -> Tile:
    """The tile of a decoding step: `cols` keys at a time."""
    wide = dtype != torch.bfloat16 or max(features, values) > 128
    return Tile(16, 16 if wide else 32, values, features)
