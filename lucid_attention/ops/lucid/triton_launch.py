"""The launches of one decoding step."""

import torch
from torch import Tensor

from ..triton_tiles import architecture, on_device, padded_size, precisions, registers, splits_of
from .triton_configs import step_tile
from .triton_step import step_combine_kernel, step_split_kernel

# Of float32 keys: a step waits for memory, and pieces of a wide head for tensor cores would spill registers.
STEP_PRECISION = "ieee"


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y_past: Tensor,
    y: Tensor,
    norms: Tensor,
    o: Tensor,
    sharpness: Tensor,
    *,
    key_mask: Tensor | None,
    beta: Tensor | None,
    count: int,
    counts: Tensor | None,
    table: Tensor | None,
    strength: float,
    scale: float,
    norm: str,
) -> None:
    """Write o [B, H·G, 1, E], contiguous, and y: its place in the cache if y is y_past, else [B, H, 1, E].

    k, y_past, norms: [B, H, places, *], or [pages, H, page size, *] with `table` [B, P]. The number of keys before the
    new one is `count` or, per sequence or for all, in `counts` on the device.
    """
    B, H, D, E = q.shape[0], k.shape[1], k.shape[3], v.shape[3]
    n, G, in_place = B * H, q.shape[1] // k.shape[1], y is y_past
    q, v, k, y_past = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, v, k, y_past))
    features, values, rows = padded_size(D), padded_size(E), padded_size(G + 1)
    where = architecture(k.device)
    multiply, tile = precisions(where, k.dtype), step_tile(where, k.dtype, features, values)
    page = 0 if table is None else k.shape[2]
    places = k.shape[2] if table is None else table.shape[1] * page
    splits = splits_of(n, places)
    maxima, sums = (q.new_empty(n, splits, rows, dtype=torch.float32) for _ in range(2))
    parts = q.new_empty(n, splits, rows, values, dtype=torch.float32)
    mask = None if key_mask is None else (key_mask if key_mask.stride(-1) == 1 else key_mask.contiguous())
    mask = None if mask is None else mask.view(torch.uint8)
    # Arguments that are absent are never read.
    table_or, counts_or, mask_or = (q if x is None else x for x in (table, counts, mask))
    strides = {
        "H": H, "count": count, "q_stride_b": q.stride(0), "q_stride_h": q.stride(1), "k_stride_b": k.stride(0),
        "k_stride_h": k.stride(1), "k_stride_t": k.stride(2), "n_stride_b": norms.stride(0),
        "n_stride_h": norms.stride(1), "n_stride_t": norms.stride(2),
        "stride_mask": 0 if mask is None else mask.stride(0), "stride_table": 0 if table is None else table.stride(0),
        "stride_counts": 0 if counts is None or counts.numel() == 1 else counts.stride(0), "splits": splits,
        "scale": scale,
    }  # fmt: skip
    sizes = {
        "G": G, "D": D, "FEATURES": features, "E": E, "VALUES": values, "ROWS": rows, "PAGE": page,
        "COUNTED": counts is not None, "MASKED": mask is not None, "QK": norm == "qk", "num_warps": tile.warps,
        "num_stages": tile.stages,
    }  # fmt: skip
    with on_device(k):
        step_split_kernel[(n * splits,)](
            q, k, y_past, norms, mask_or, table_or, counts_or, sharpness, maxima, sums, parts,
            y_stride_b=y_past.stride(0), y_stride_h=y_past.stride(1), y_stride_t=y_past.stride(2), COLUMNS=tile.cols,
            PRECISION=STEP_PRECISION, PRODUCT=multiply.values, **strides, **sizes,
            **registers(step_split_kernel, k.device),
        )  # fmt: skip
        width = min(64, values)
        step_combine_kernel[(n, values // width)](
            q, k, v, y, norms, mask_or, table_or, counts_or, sharpness,
            sharpness if beta is None else beta.reshape(n).float().contiguous(), maxima, sums, parts, o,
            v_stride_b=v.stride(0), v_stride_h=v.stride(1), y_stride_b=y.stride(0), y_stride_h=y.stride(1),
            y_stride_t=y.stride(2), strength=strength, WIDTH=width, IN_PLACE=in_place, BETA=beta is not None,
            **strides, **sizes, **registers(step_combine_kernel, k.device),
        )  # fmt: skip
