"""Shared by the contract tests: every attention of `ATTENTIONS`, and further settings that run the whole contract.

A new name in `ATTENTIONS` needs no line here; `SETTINGS` adds variations. `ToyAttention` runs the contract as a new
attention would: one class and one line.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lucid_attention import ATTENTIONS as REGISTERED
from lucid_attention.nn.causal import CausalAttention


class ToyAttention(CausalAttention):
    """Softmax attention over values that a gate of their own token has scaled."""

    title = "gated values"

    def __init__(self, hidden_size: int, num_heads: int, **options: Any) -> None:
        super().__init__(hidden_size, num_heads, **options)
        self.gate = nn.Linear(hidden_size, self.num_kv_heads)

    def gates(self, x: Tensor) -> Tensor:
        return self.gate(x).sigmoid().transpose(1, 2)

    def values(self, x: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        return v * self.gates(x)[..., None]

    def analysis_inputs(self, x: Tensor, q: Tensor, k: Tensor, key_mask: Tensor | None) -> dict[str, Any]:
        # P = I: W = A diag(gates).
        return {"preconditioned": True, "strength": 0.0, "beta": self.gates(x)}


ATTENTIONS: dict[str, type[CausalAttention]] = {**REGISTERED, "toy": ToyAttention}
B, T, HIDDEN = 3, 11, 24
GROUPED: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax, qk_norm": ("softmax", {"qk_norm": True}),
    "softmax, no rotary": ("softmax", {"rope_base": None}),
    "sliding, narrow": ("sliding", {"window": 3}),
    "lucid, qk_norm": ("lucid", {"qk_norm": True}),
    "lucid, qk": ("lucid", {"norm": "qk"}),
    "lucid, row_max": ("lucid", {"norm": "row_max"}),
    "lucid, beta": ("lucid", {"learn_beta": True}),
    "lucid, beta to 2": ("lucid", {"learn_beta": True, "double_beta": True}),
    "lucid, sharpness": ("lucid", {"sharpness": 4.0}),
    "lucid, strength": ("lucid", {"strength": 0.5}),
    "lucid, qk, all learned": ("lucid", {"norm": "qk", "learn_beta": True, "learn_sharpness": True, "sharpness": 1.5}),
    "lucid, row_max, all learned": ("lucid", {"norm": "row_max", "learn_beta": True, "learn_sharpness": True}),
    "lucid, reference": ("lucid", {"impl": "reference", "learn_beta": True, "learn_sharpness": True}),
    "deltaformer, beta to 2": ("deltaformer", {"double_beta": True, "rope_base": None}),
    "forgetting, rotary": ("forgetting", {"rope_base": 1e4, "qk_norm": True}),
    "diff, qk_norm": ("diff", {"qk_norm": True, "layer_index": 3}),
    "delta, doubled": ("delta", {"double_beta": True}),
    "delta, no convolution": ("delta", {"conv_size": None}),
    "delta, reference": ("delta", {"impl": "reference"}),
    "gla, convolution": ("gla", {"conv_size": 3}),
    "gsa, convolution": ("gsa", {"conv_size": 4, "num_slots": 3}),
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in ATTENTIONS} | SETTINGS
# A window counts padding, too: a row with padding between tokens does not equal its tokens alone.
WINDOWED = {"sliding, narrow"}
every_name = pytest.mark.parametrize("name", ATTENTIONS)
every_case = pytest.mark.parametrize("case", CASES)
every_case_without_window = pytest.mark.parametrize("case", [case for case in CASES if case not in WINDOWED])


def build(case: str, **options: Any) -> CausalAttention:
    """The attention of a case, in float64, with weights that differ between heads."""
    torch.manual_seed(1)
    name, settings = CASES[case]
    module = ATTENTIONS[name](HIDDEN, **(GROUPED | settings | options)).double()
    for parameter in module.parameters():
        # Norms and learned inverse_norms start equal for all heads. Change them, so that a mix-up of heads shows.
        if parameter.ndim < 2:
            parameter.data += 0.3 * torch.rand_like(parameter)
    return module


def inputs(batch: int = B, length: int = T) -> Tensor:
    """Tokens with a common mean: their keys are correlated."""
    return torch.randn(batch, length, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) + 1


def gradients(module: CausalAttention, output: Tensor, retain_graph: bool = True) -> dict[str, Tensor]:
    """The gradients of a fixed weighted sum of the output, for every parameter."""
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(3)).to(output.dtype)
    names, parameters = zip(*module.named_parameters(), strict=True)
    grads = torch.autograd.grad((output * weight).sum(), parameters, retain_graph=retain_graph)
    return dict(zip(names, grads, strict=True))


def in_chunks(
    module: CausalAttention, x: Tensor, sizes: list[int], key_mask: Tensor | None = None
) -> tuple[Tensor, Any]:
    """The output and past of x, fed in chunks of these sizes."""
    outputs: list[Tensor] = []
    past, seen = None, 0
    for chunk in x.split(sizes, 1):
        seen += chunk.shape[1]
        output, past = module(chunk, past=past, key_mask=None if key_mask is None else key_mask[:, :seen])
        outputs.append(output)
        assert past.length == seen
    return torch.cat(outputs, 1), past


def alone(module: CausalAttention, x: Tensor, key_mask: Tensor) -> Tensor:
    """The output of every row alone, without padding: [real tokens, HIDDEN]."""
    rows = [module(row[None, real])[0][0] for row, real in zip(x, key_mask, strict=True)]
    return torch.cat(rows)


def rows(past: Any, order: Tensor) -> Any:
    """The past with its batch rows in another order."""
    return tree_map(lambda leaf: leaf[order] if isinstance(leaf, Tensor) else leaf, past)


def detached(past: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, past)
