"""Cross entropy over a large vocabulary without holding all logits at once.

At 65 536 tokens and a vocabulary of 32 000 the logits alone take 8 GB. Here logits and their gradients are computed a
few rows at a time. The head costs three matrix products, as usual; nothing is computed twice.
"""

import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from ..data import IGNORED


class _SummedCrossEntropy(torch.autograd.Function):
    """Σ over rows of −log softmax(cap(h Wᵀ + b))[label]; h: [N, D], W: [V, D], b: [V] or None, labels: [N]."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, W: Tensor, b: Tensor | None, labels: Tensor, rows: int, cap: float | None
    ) -> Tensor:
        needed = [ctx.needs_input_grad[i] for i in range(3)]
        # Sums over many rows are float32, also for weights in bfloat16.
        dh = torch.empty_like(h) if needed[0] else None
        dW = torch.zeros(W.shape, dtype=torch.float32, device=W.device) if needed[1] else None
        db = torch.zeros(W.shape[:1], dtype=torch.float32, device=W.device) if b is not None and needed[2] else None
        total = torch.zeros((), dtype=torch.float32, device=h.device)
        for start in range(0, h.shape[0], rows):
            part = slice(start, min(start + rows, h.shape[0]))
            logits = F.linear(h[part], W, b).float()
            if cap is not None:
                logits = cap * torch.tanh(logits / cap)
            total += F.cross_entropy(logits, labels[part], ignore_index=IGNORED, reduction="sum")
            if not any(needed):
                continue
            dlogits = _gradient_of_logits(logits, labels[part], cap).to(h.dtype)
            if dh is not None:
                torch.mm(dlogits, W, out=dh[part])
            if dW is not None:
                dW += dlogits.mT @ h[part]
            if db is not None:
                db += dlogits.sum(0)
        ctx.save_for_backward(dh, dW, db)
        ctx.dtypes = (W.dtype, None if b is None else b.dtype)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, scale: Tensor) -> Any:
        dh, dW, db = ctx.saved_tensors
        return (
            None if dh is None else dh * scale.to(dh.dtype),
            None if dW is None else (dW * scale).to(ctx.dtypes[0]),
            None if db is None else (db * scale).to(ctx.dtypes[1]),
            None,
            None,
            None,
        )


def _gradient_of_logits(logits: Tensor, labels: Tensor, cap: float | None) -> Tensor:
    """softmax − one-hot, times the derivative of the cap; zero for ignored rows. logits: after the cap."""
    gradient = logits.softmax(-1)
    gradient.scatter_add_(1, labels.clamp(min=0)[:, None], torch.full_like(gradient[:, :1], -1))
    if cap is not None:
        gradient *= 1 - (logits / cap).square()
    return gradient.masked_fill_((labels == IGNORED)[:, None], 0)


def summed_cross_entropy(
    h: Tensor, W: Tensor, b: Tensor | None, labels: Tensor, *, rows: int = 1024, cap: float | None = None
) -> Tensor:
    """Σ over rows of the cross entropy of h Wᵀ + b against labels; rows with the label −100 count as zero.

    h: [N, D]. W: [V, D]. b: [V]. labels: [N]. rows: how many rows have logits at a time.
    cap: logits become cap · tanh(logits / cap).
    """
    return _SummedCrossEntropy.apply(h, W, b, labels, rows, cap)


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
