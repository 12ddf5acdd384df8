"""Packed documents: several in one row of a batch, which must not see each other."""

import torch
import torch.nn.functional as F
from torch import Tensor


# `document_borders` reads values, which a compiled graph cannot. With fullgraph=True the compiler therefore stops with
# an error; traced, the function would overlook documents.
@torch.compiler.disable
def document_borders(positions: Tensor) -> Tensor | None:
    """Where documents begin and end, counted over all rows one behind the other: int32 [n + 1].

    positions: [B, T]. A token begins a document if its position is not above that of the token before it. None if
    every row is one document.
    """
    begins = F.pad(positions[:, 1:] <= positions[:, :-1], (1, 0))
    if not bool(begins.any()):
        return None
    begins[:, 0] = True
    return F.pad(begins.flatten().nonzero()[:, 0], (0, 1), value=begins.numel()).to(torch.int32)


def one_row(x: Tensor) -> Tensor:
    """[B, H, T, D] -> [1, H, B·T, D]: the rows of a batch one behind the other."""
    return x.transpose(0, 1).flatten(1, 2)[None]


def separate_rows(x: Tensor, B: int) -> Tensor:
    """[1, H, B·T, D] -> [B, H, T, D]."""
    return x[0].unflatten(1, (B, -1)).transpose(0, 1)
