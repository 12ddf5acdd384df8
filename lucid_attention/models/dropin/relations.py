"""Dense masks that are neither padding nor packed documents: trees, shared prefixes, and what LUCID cannot take.

A token's y = v − Σ P y over the keys that it sees, and these y must be the ones of the same text. So P is defined for
any relation "sees" that goes back in the sequence and is closed: who sees a token sees all that this token sees.
"""

import torch
from torch import Tensor

MUST = (
    "attention_mask must be causal, with padding, packed documents or a tree: LUCID solves for the values in the order"
)


def read_relation(shown: Tensor) -> tuple[Tensor, Tensor]:
    """The keys that take part, [B, S + T], and what every query sees, with at least itself. Refuses other relations.

    shown: [B, 1, T, S + T] bool. Costs T³ operations and T² memory: meant for trees of up to a few thousand tokens.
    """
    T, S = shown.shape[2], shown.shape[3] - shown.shape[2]
    past, new = shown[:, 0, :, :S], shown[:, 0, :, S:]
    used = shown[:, 0].any(-1)
    if bool(new.triu(1).any()):
        raise ValueError(
            f"{MUST} of the sequence, got one in which a token sees a later one (bidirectional tokens, a prefix?)"
        )
    own = torch.eye(T, dtype=torch.bool, device=shown.device)
    if bool((used[..., None] & own & ~new).any()):
        raise ValueError(f"{MUST} in which tokens see each other, and themselves, got a token that does not see itself")
    # Rows of padding see nothing: they need not see the past.
    if bool((past.any(1, keepdim=True) & ~past & used[..., None]).any()):
        raise ValueError(
            f"{MUST} in which tokens see each other, got new tokens that see different parts of the cache. A tree must "
            "begin behind a past that all of its tokens see: give the whole tree in one pass"
        )
    steps = new.to(torch.float32)
    # Entry ij counts the tokens that i sees and that see j.
    if bool(((steps @ steps > 0) & ~new).any()):
        raise ValueError(
            f"{MUST} in which tokens see each other: expected that who sees a token sees all that this token sees, got "
            "one that does not (a window, a hole?)"
        )
    return shown[:, 0].any(1), shown | torch.nn.functional.pad(own, (S, 0))
