"""Small models of the own decoder with correlated keys, and prompts for them."""

from typing import Any

import torch
from torch import Tensor

from lucid_attention import ATTENTIONS
from lucid_attention.models.decoder.configuration import LucidConfig
from lucid_attention.models.decoder.modeling import LucidForCausalLM
from lucid_attention.nn.causal import Past

# Attentions whose past can be cropped.
CROPPABLE = [name for name, attention in ATTENTIONS.items() if attention.past_type is Past]
VOCABULARY, NEW_TOKENS = 48, 8
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    # Without an end token every generated text has the same length.
    "eos_token_id": None,
}


def decoder(attention: str | list[str] = "lucid", **overrides: Any) -> LucidForCausalLM:
    """A model whose embeddings, and so its keys, share a direction: P is far from the identity."""
    torch.manual_seed(0)
    model = LucidForCausalLM(LucidConfig(**(SHAPE | {"attention": attention} | overrides)))
    with torch.no_grad():
        model.model.embed_tokens.weight[1:] += 0.4
        for parameter in model.parameters():
            # Norms and learned inverse_norms are initially equal for all heads, which would hide a mix-up of heads.
            if parameter.ndim == 1:
                parameter += 0.2 * torch.rand_like(parameter)
    return model.eval()


def prompts(*lengths: int, seed: int = 1) -> list[Tensor]:
    """Token sequences of these lengths, each [T]."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in lengths]


def padded(rows: list[Tensor], side: str = "left") -> dict[str, Tensor]:
    """Rows as one batch with its attention_mask."""
    length = max(len(row) for row in rows)
    # Token 7 at padding: no output may depend on it.
    input_ids = torch.full((len(rows), length), 7)
    attention_mask = torch.zeros(len(rows), length, dtype=torch.long)
    for index, row in enumerate(rows):
        where = slice(length - len(row), length) if side == "left" else slice(0, len(row))
        input_ids[index, where], attention_mask[index, where] = row, 1
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def greedy(model: LucidForCausalLM, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    """The new tokens: [B, NEW_TOKENS]."""
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False} | options
    return model.generate(**inputs, **options)[:, inputs["input_ids"].shape[1] :]


def relative(x: Tensor, truth: Tensor) -> float:
    """The largest error, relative to the largest value."""
    return float((x - truth).abs().max() / truth.abs().max())
