"""Every attention module on a pretended GPU: training, prefill and decoding."""

import copy
from typing import Any

import pytest
import torch
from nn.contract import HIDDEN, build

from lucid_attention import ATTENTIONS

from .pretended_cuda import moved, pretended, pretending, real
from .running import names

B, T, STEPS = 2, 9, 3
# A masked token is absent from PaTH: a pass over several tokens reads the mask, once forward and once backward.
READS_ITS_MASK = {"path": 2, "lucid_path": 2}


def run(module: Any, x: torch.Tensor, mask: torch.Tensor | None) -> list[torch.Tensor]:
    """Train on T tokens; then a prefill of T tokens and single tokens behind it."""
    module(x[:, :T], key_mask=None if mask is None else mask[:, :T])[0].cos().sum().backward()
    results = [weight.grad for weight in module.parameters() if weight.grad is not None]
    with torch.no_grad():
        past = None
        for start, stop in [(0, T), *((i, i + 1) for i in range(T, T + STEPS))]:
            o, past = module(x[:, start:stop], past=past, key_mask=None if mask is None else mask[:, :stop])
            results.append(o)
    return results


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@names(*ATTENTIONS)
def test_modules_train_and_decode_without_waiting(name: str, masked: bool):
    module = build(name)
    x, mask = torch.randn(B, T + STEPS, HIDDEN, dtype=torch.float64), torch.ones(B, T + STEPS, dtype=torch.bool)
    mask[0, :2] = False
    there = moved(copy.deepcopy(module))
    expected = run(module, x, mask if masked else None)
    with pretending() as waits:
        found = run(there, pretended(x), pretended(mask) if masked else None)
    for here, other in zip(expected, found, strict=True):
        torch.testing.assert_close(real(other), here, rtol=1e-8, atol=1e-10)
    # The last one is the prefill's.
    assert len(waits) == (READS_ITS_MASK.get(name, 0) + (name in READS_ITS_MASK)) * masked, waits
