"""A dense stand-in for torch's kernel for sequences of different lengths, which runs on GPUs only."""

import torch


def stand_in(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa):
    """What the documentation of `varlen_attn` says, for window_size=(-1, 0): causal, aligned at the end."""
    assert window_size == (-1, 0)
    assert query.shape[2] % 8 == 0
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    (document, behind), (key_document, key_behind) = (
        _places(borders, x.shape[0]) for borders, x in ((cu_seq_q, query), (cu_seq_k, key))
    )
    visible = (document[:, None] == key_document) & (key_behind >= behind[:, None])
    groups = query.shape[1] // key.shape[1]
    q, k, v = query.transpose(0, 1), *(x.transpose(0, 1).repeat_interleave(groups, 0) for x in (key, value))
    return ((q @ k.mT * scale).masked_fill(~visible, -torch.inf).softmax(-1) @ v).transpose(0, 1)


def _places(borders, length):
    """The sequence of each position, and how many positions of it come from there on."""
    position = torch.arange(length, device=borders.device, dtype=torch.int32)
    sequence = torch.searchsorted(borders[1:].contiguous(), position, right=True)
    return sequence, borders[sequence + 1] - position
