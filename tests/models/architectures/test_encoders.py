"""Encoders with LUCID: against the same model with a dense attention function, written without the package."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForMaskedLM,
)
from transformers.masking_utils import sdpa_mask

from lucid_attention import enable_lucid

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
OPTIONS = {
    "bert": {},
    "roberta": {},
    "modernbert": {
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "local_attention": 4,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1),
    },
}
SHARPNESS = 1.5
every_encoder = pytest.mark.parametrize("name", OPTIONS)


def dense_lucid(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """softmax(q kᵀ) P⁻¹ v with P = ½ (I + G) over the keys that are not masked; plain softmax in windows."""
    seen = torch.ones(query.shape[0], 1, query.shape[2], query.shape[2], dtype=torch.bool)
    seen = seen if attention_mask is None else seen & attention_mask
    if kwargs.get("sliding_window") is None:
        unit, kept = F.normalize(key, dim=-1), seen.any(2)
        G = torch.exp(SHARPNESS * (unit @ unit.mT - 1)) * (kept[..., None] & kept[..., None, :])
        value = torch.linalg.inv(0.5 * (torch.eye(G.shape[-1]) + G)) @ value
    # Padding may see nothing in a window; its output is not used.
    hidden = ~seen & seen.any(-1, keepdim=True)
    weights = (query @ key.mT * scaling).masked_fill(hidden, -math.inf).softmax(-1)
    return (weights @ value).transpose(1, 2), None


AttentionInterface.register("dense_lucid", dense_lucid)
AttentionMaskInterface.register("dense_lucid", sdpa_mask)


def encoder(name: str):
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(AutoConfig.for_model(name, **SHAPE | OPTIONS[name]))
    for weight in model.parameters():
        # Large enough that LUCID is not softmax attention.
        torch.nn.init.normal_(weight, std=0.5)
    return model.double().eval()


def padded() -> dict[str, Tensor]:
    """Two rows of 12 and 7 tokens, some of them equal."""
    ids = torch.randint(2, 12, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(12) < torch.tensor([[12], [7]])
    return {"input_ids": ids.masked_fill(~mask, 0), "attention_mask": mask.long()}


@every_encoder
def test_an_encoder_is_the_dense_equation_with_padding_and_trains_masked_tokens(name):
    inputs = padded()
    labels = torch.where(inputs["attention_mask"] == 1, inputs["input_ids"], -100)
    dense, softmax = encoder(name), encoder(name)(**inputs, labels=labels)
    dense.set_attn_implementation("dense_lucid")
    ours = enable_lucid(encoder(name), sharpness=SHARPNESS)
    assert type(ours).__name__ == f"Lucid{type(dense).__name__}"
    expected, got = (model(**inputs, labels=labels) for model in (dense, ours))
    shown = inputs["attention_mask"].bool()
    torch.testing.assert_close(got.logits[shown], expected.logits[shown])
    assert (got.logits - softmax.logits)[shown].abs().max() > 1e-3
    (expected.loss + got.loss).backward()
    for (which, weight), other in zip(dense.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(other.grad, weight.grad, msg=which)
    # Padding changes nothing.
    alone = ours(input_ids=inputs["input_ids"][1:, :7]).logits
    torch.testing.assert_close(alone[0], got.logits[1, :7])


@every_encoder
def test_an_encoder_opens_again_as_it_was_saved_and_learns(name, tmp_path):
    model, inputs = enable_lucid(encoder(name), sharpness=2.0, strength=0.5, learned=["sharpness"]), padded()
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    losses = []
    for _ in range(3):
        losses.append(model(**inputs, labels=inputs["input_ids"]).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    values = [weight for key, weight in model.named_parameters() if key.endswith("lucid.sharpness")]
    assert values
    assert not any(torch.equal(weight, torch.full_like(weight, 2.0)) for weight in values)
    model.eval().save_pretrained(tmp_path)
    again = AutoModelForMaskedLM.from_pretrained(tmp_path, dtype=torch.float64, trust_remote_code=False)
    assert type(again) is type(model)
    assert torch.equal(again(**inputs).logits, model(**inputs).logits)


def test_what_an_encoder_cannot_do_is_refused():
    with pytest.raises(ValueError, match="must not hold 'strength' for an encoder"):
        enable_lucid(encoder("bert"), learned=["strength"])
    model, ids = enable_lucid(encoder("bert")), padded()["input_ids"]
    causal = torch.ones(2, 1, 12, 12, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match="of an encoder must be padding"):
        model(ids, attention_mask=causal)
    stock = encoder("bert")
    enable_lucid()
    stock.set_attn_implementation("lucid")
    with pytest.raises(ValueError, match="asks for a mask that shows later tokens"):
        stock(ids)
