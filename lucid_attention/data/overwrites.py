"""Memory update with a key and a value in one token: the latest value of a key wins.

`synthetic.MemoryUpdate` spells a write as two tokens, which takes a model of two layers. Here one layer is enough, so
what is measured is the attention, not how layers work together.
"""

import torch
from torch import Tensor

IGNORED = -100


def overwrites(
    batch: int, keys: int, length: int, generator: torch.Generator, *, values: int = 64, key_tokens: int = 64
) -> tuple[Tensor, Tensor]:
    """Inputs [batch, length, 2] of (key, value) and labels [batch, length]: what is to be said at each position.

    The first length − keys tokens write: each one of `keys` keys, drawn at random from `key_tokens`, with a fresh
    value; every key is written at least once. The last ones ask for each key once, with `values` in the place of a
    value. Labels are −100 where nothing is asked.
    """
    writes = length - keys
    if not 1 <= keys <= min(key_tokens, writes):
        raise ValueError(
            f"keys must be 1 to {min(key_tokens, writes)} for length {length} and key_tokens {key_tokens}, got {keys}"
        )
    names = _permutations(batch, key_tokens, generator)[:, :keys]
    which = torch.randint(keys, (batch, writes), generator=generator)
    # The first write of every key at a place of its own.
    places = _permutations(batch, writes, generator)[:, :keys]
    which.scatter_(1, places, torch.arange(keys).expand(batch, keys))
    written = torch.randint(values, (batch, writes), generator=generator)
    asked = _permutations(batch, keys, generator)
    latest = torch.where(which[:, None] == asked[:, :, None], torch.arange(writes), -1).amax(-1)
    key = torch.cat([names.gather(1, which), names.gather(1, asked)], 1)
    value = torch.cat([written, torch.full_like(asked, values)], 1)
    labels = torch.full((batch, length), IGNORED)
    labels[:, writes:] = written.gather(1, latest)
    return torch.stack([key, value], -1), labels


def _permutations(batch: int, size: int, generator: torch.Generator) -> Tensor:
    return torch.rand(batch, size, generator=generator).argsort(-1)
