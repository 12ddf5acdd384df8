"""The same call on the CPU and on a pretended GPU: equal numbers, every tensor on its device, and the waits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from .pretended_cuda import pretended, pretending, real

Tensors = dict[str, Any]
# The others run with the slow tests.
QUICK = ("lucid", "lucid_path", "delta", "llama")


def names(*all_names: str) -> Any:
    """Parametrize over names; those that are not in `QUICK` are slow."""
    marked = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in all_names]
    return pytest.mark.parametrize("name", marked)


def on_both(call: Callable[[Tensors], Any], tensors: Tensors, *, host: tuple[str, ...] = ()) -> list[str]:
    """What waits for the device in `call` and in the backward of what it returns. Checks that both devices agree.

    host: names of tensors that stay on the CPU.
    """
    expected = _outputs_and_gradients(call, tree_map(_copy, tensors))
    with pretending() as waits:
        moved = {name: x if name in host else tree_map(_moved, x) for name, x in tensors.items()}
        found = _outputs_and_gradients(call, moved)
        waits = list(waits)
    assert len(found) == len(expected)
    for here, there in zip(expected, found, strict=True):
        torch.testing.assert_close(real(there), here, rtol=1e-9, atol=1e-11)
    return waits


def _copy(x: Any) -> Any:
    return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


def _moved(x: Any) -> Any:
    return pretended(x) if isinstance(x, Tensor) else x


def _outputs_and_gradients(call: Callable[[Tensors], Any], tensors: Tensors) -> list[Tensor]:
    outputs = [x for x in tree_leaves(call(tensors)) if isinstance(x, Tensor)]
    inputs = [x for x in tree_leaves(tensors) if isinstance(x, Tensor) and x.requires_grad]
    loss = sum(x.cos().sum() for x in outputs if x.requires_grad)
    if isinstance(loss, Tensor):
        loss.backward()
    return [x.detach() for x in outputs] + [x.grad for x in inputs if x.grad is not None]
