"""Cross entropy over a large vocabulary without holding all logits at once.

At 65 536 tokens and a vocabulary of 32 000 the logits alone take 8 GB. Here they are computed a few rows at a time, and
again in the backward pass: a fourth product with the head instead of memory.
"""

import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from ..data import IGNORED


def summed_cross_entropy(
    h: Tensor, W: Tensor, b: Tensor | None, labels: Tensor, *, rows: int = 1024, cap: float | None = None
) -> Tensor:
    """Σ over rows of the cross entropy of h Wᵀ + b against labels; rows with the label −100 count as zero.

    h: [N, D]. W: [V, D]. b: [V]. labels: [N]. rows: how many rows have logits at a time.
    cap: logits become cap · tanh(logits / cap).
    """
    # The gradients of all parts are summed in float32, also for weights in bfloat16.
    wide = W.float() if W.dtype == torch.bfloat16 else W

    def part(h: Tensor, wide: Tensor, b: Tensor | None, labels: Tensor) -> Tensor:
        logits = F.linear(h, wide.to(h.dtype), b).float()
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")

    parts = zip(h.split(rows), labels.split(rows), strict=True)
    return torch.stack([checkpoint(part, x, wide, b, y, use_reentrant=False) for x, y in parts]).sum()


def use_chunked_loss(model: PreTrainedModel, rows: int = 1024) -> None:
    """Make a causal language model compute its loss `rows` tokens at a time. With labels it then returns no logits.

    Only the model's `forward` is replaced: its weights and what is saved stay the same.
    """
    head = model.get_output_embeddings()
    if head is None or not hasattr(model, model.base_model_prefix):
        raise ValueError(f"a chunked loss needs a decoder and a head, got {type(model).__name__}")
    if getattr(model.config, "output_router_logits", False):
        raise ValueError("a chunked loss cannot include router losses: expected output_router_logits=False, got True")
    original_forward = model.forward
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)

    def forward(
        self: Any, *args: Any, labels: Tensor | None = None, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Any:
        if labels is None:
            return original_forward(*args, **kwargs)
        kwargs.pop("logits_to_keep", None)
        h = getattr(self, self.base_model_prefix)(*args, **{**kwargs, "use_cache": False})[0]
        next_tokens, head = labels[:, 1:].flatten(), self.get_output_embeddings()
        h = h[:, :-1].flatten(0, 1)
        loss = summed_cross_entropy(h, head.weight, getattr(head, "bias", None), next_tokens, rows=rows, cap=cap)
        count = (next_tokens != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
        return CausalLMOutput(loss=loss / count)

    model.forward = types.MethodType(forward, model)
