"""Packed documents: several in one row of a batch, which must not see each other."""

import torch
import torch.nn.functional as F
from torch import Tensor


def document_borders(positions: Tensor, *, cached: bool = False) -> Tensor | None:
    """Where documents begin and end, counted over all rows one behind the other: int32 [n + 1], on the CPU.

    positions: [B, T]. A token begins a document if its position is not above that of the token before it. None if
    every row is one document. In a graph the answer is never None, unless it decides about a cache (`cached`), and it
    is on the device of the positions.
    """
    begins = F.pad(positions[:, 1:] <= positions[:, :-1], (1, 0))
    if torch.compiler.is_compiling() and not cached:
        return borders(begins)
    if not torch.compiler.is_compiling():
        # The only wait for the device in a pass: operators do not wait for borders on the CPU.
        begins = begins.cpu()
    return borders(begins) if _any(begins) else None


# A compiled graph cannot read values: torch.compile leaves the graph here, with fullgraph=True it stops with an error.
@torch.compiler.disable
def _any(x: Tensor) -> bool:
    return bool(x.any())


def borders(begins: Tensor) -> Tensor:
    """int32 [n + 1] for n tokens that begin a document, with every row's first. begins: [B, T] bool.

    In a graph, whose shapes must not depend on values: [B·T + 1], with empty documents at the end.
    """
    row_starts = torch.arange(begins.shape[1], device=begins.device) == 0
    begins = (begins | row_starts).flatten()
    index = torch.arange(begins.shape[0] + 1, device=begins.device)
    if torch.compiler.is_compiling():
        # The end as a tensor: a number would fix B·T for the whole graph.
        starts = torch.where(begins, index[:-1], index[-1:]).sort().values
    else:
        starts = index[:-1][begins]
    return torch.cat([starts, index[-1:]]).to(torch.int32)


def one_row(x: Tensor) -> Tensor:
    """[B, H, T, D] -> [1, H, B·T, D]: the rows of a batch one behind the other."""
    return x.transpose(0, 1).flatten(1, 2)[None]


def separate_rows(x: Tensor, B: int) -> Tensor:
    """[1, H, B·T, D] -> [B, H, T, D]."""
    return x[0].unflatten(1, (B, -1)).transpose(0, 1)
