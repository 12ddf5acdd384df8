"""One fixed configuration of the PaTH kernels per architecture and shape class. No autotuning; no length.

Every entry compiles for its architecture without spills and within its limits (`make test-gpu-offline`).
"""

from dataclasses import dataclass

from ..triton_tiles import Tile


@dataclass(frozen=True)
class PathTileSizes:
    """Of products (rows × cols of the result, `keys` deep) and of the three kernels of rectangles."""

    product: Tile
    attend: Tile
    apply: Tile
    pull: Tile


def path_tiles(architecture: str, features: int, values: int) -> PathTileSizes:
    """features, values: the padded head sizes. Everything is float32 in memory, whatever the dtype of the inputs."""
    # Where matrix instructions read registers, 64 rows with 128 values spill.
    large = architecture in ("sm_90", "sm_100", "gfx942")
    width = min(128, values)
    return PathTileSizes(
        product=Tile(64, 64, 0, 32),
        attend=Tile(64 if large else 32, 32, min(64, width) if architecture in ("sm_90", "sm_120") else width, 32),
        apply=Tile(64, 32, width if large else min(64, values), 32),
        pull=Tile(32, 32, 32, 32, out=min(128, features)),
    )


def path_step_tile(architecture: str, features: int, values: int) -> Tile:
    """Of a decoding step: `cols` keys at a time, in pieces of `keys` features."""
    return Tile(16, 32 if values <= 128 else 16, values, 32)
