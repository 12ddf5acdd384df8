"""The launches of one decoding step: three, whatever the data."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..softmax.one_token import Token, groups_of
from ..triton_tiles import architecture, on_device, padded_size, precisions, registers, splits_of
from .triton_configs import path_step_tile
from .triton_step import path_step_combine_kernel, path_step_prepare_kernel, path_step_split_kernel


@dataclass(frozen=True)
class Made:
    """Contiguous outputs. o: [B, H·G, 1, E]; y: [B, H, 1, E]; live: [B, H, L + 1, D] and product: [B, H, D, D]."""

    o: Tensor
    y: Tensor
    live: Tensor
    product: Tensor


def step(token: Token, w: Tensor, beta: Tensor, product: Tensor, live: Tensor, pending: int, made: Made) -> None:
    """Write the outputs of one token. live: [B, H, L, D], the live keys before it."""
    q, k, v, y_past, norms = token.q, token.k, token.v, token.y_past, token.inverse_norms
    (_, H, total, D), E, n, solves = k.shape, v.shape[3], k.shape[0] * k.shape[1], norms is not None
    k, y_past, live = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, y_past, live))
    w, beta, product, v, q = (x.contiguous() for x in (w, beta, product, v, q))
    G = groups_of(token)
    features, values, rows = padded_size(D), padded_size(E), padded_size(G + solves)
    where = architecture(k.device)
    multiply, tile = precisions(where, k.dtype), path_step_tile(where, features, values)
    splits = splits_of(n, total)
    buffer = [q.new_empty(n, rows, features, dtype=torch.float32) for _ in range(2)]
    maxima, sums = (q.new_empty(n, splits, rows, dtype=torch.float32) for _ in range(2))
    parts = q.new_empty(n, splits, rows, values, dtype=torch.float32)
    c = token.sharpness
    c = c.reshape(n).float() if isinstance(c, Tensor) else maxima.new_full((n,), c)
    mask = token.key_mask
    if mask is not None:
        mask = (mask if mask.stride(-1) == 1 else mask.contiguous()).view(torch.uint8)
    # Arguments that are absent are never read.
    mask_or, norms_or = (q if x is None else x for x in (mask, norms))
    counts = {"H": H, "count": total - 1, "live": live.shape[2], "stride_mask": 0 if mask is None else mask.stride(0)}
    strides = {
        "k_stride_b": k.stride(0), "k_stride_h": k.stride(1), "k_stride_t": k.stride(2),
        **{f"n_stride_{letter}": 0 if norms is None else norms.stride(i) for i, letter in enumerate("bht")},
    }  # fmt: skip
    sizes = {
        "G": G, "D": D, "FEATURES": features, "ROWS": rows, "SOLVES": solves, "MASKED": mask is not None,
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip
    piece, width = min(32, features), min(64, values)
    with on_device(k):
        path_step_prepare_kernel[(n, features // piece)](
            q, k, w, beta, product, live, norms_or, mask_or, c, *buffer, made.product, made.live, **counts, **strides,
            alive_stride_b=live.stride(0), alive_stride_h=live.stride(1), alive_stride_t=live.stride(2),
            scale=token.scale, PIECE=piece, DEPTH=piece, PRECISION=multiply.keys, **sizes,
            **registers(path_step_prepare_kernel, k.device),
        )  # fmt: skip
        path_step_split_kernel[(n * splits,)](
            *buffer, made.live, k, y_past, norms_or, mask_or, c, maxima, sums, parts, pending=pending, splits=splits,
            y_stride_b=y_past.stride(0), y_stride_h=y_past.stride(1), y_stride_t=y_past.stride(2), E=E, VALUES=values,
            COLUMNS=tile.cols, PIECE=min(tile.keys, features), PRECISION=multiply.keys, PRODUCT=multiply.values,
            **counts, **strides, **sizes, **registers(path_step_split_kernel, k.device),
        )  # fmt: skip
        path_step_combine_kernel[(n, values // width)](
            buffer[0], made.live, v, mask_or, maxima, sums, parts, made.y, made.o, splits=splits, E=E, VALUES=values,
            WIDTH=width, **counts, **sizes, **registers(path_step_combine_kernel, k.device),
        )  # fmt: skip
