"""Classification and question answering heads of the own decoder: those of Llama around our layers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PreTrainedModel,
)

from lucid_attention import enable_lucid
from lucid_attention.models.decoder.configuration import LucidConfig
from lucid_attention.models.decoder.modeling import (
    LucidForQuestionAnswering,
    LucidForSequenceClassification,
    LucidForTokenClassification,
)

from .cases import SHAPE, padded, prompts

HEADS: dict[str, tuple[type[PreTrainedModel], type[PreTrainedModel]]] = {
    "sequences": (LucidForSequenceClassification, LlamaForSequenceClassification),
    "tokens": (LucidForTokenClassification, LlamaForTokenClassification),
    "answers": (LucidForQuestionAnswering, LlamaForQuestionAnswering),
}


def outputs(model: PreTrainedModel, side: str, labels: dict[str, Any]) -> dict[str, torch.Tensor]:
    inputs = padded(prompts(9, 4, 6), side)
    # The heads of sequences find padding by its token.
    inputs["input_ids"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, 0)
    out = model.eval()(**inputs, **labels)
    real = inputs["attention_mask"].bool()
    tensors = {name: out[name] for name in ("loss", "logits", "start_logits", "end_logits") if name in out}
    return {name: x[real] if x.shape[:2] == real.shape else x for name, x in tensors.items() if x is not None}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.shows("heads for classification and question answering", model="decoder")
def test_with_softmax_attention_the_heads_are_those_of_llama(head: str, side: str) -> None:
    torch.manual_seed(0)
    ours, theirs = HEADS[head]
    config = LlamaConfig(**SHAPE, num_labels=3)
    llama = theirs(config)
    mine = ours(LucidConfig.from_llama(config, attention="softmax", num_labels=3))
    lucid = ours(LucidConfig.from_llama(config, num_labels=3))
    for model in (mine, lucid):
        # Llama's model for answers calls its decoder "transformer".
        model.load_state_dict({name.replace("transformer.", "model."): x for name, x in llama.state_dict().items()})
    labels = {"labels": torch.tensor([0, 2, 1])} if head == "sequences" else {}
    found, expected = outputs(mine, side, labels), outputs(llama, side, labels)
    assert found.keys() == expected.keys()
    for name, x in found.items():
        torch.testing.assert_close(x, expected[name], rtol=1e-4, atol=1e-5)
    assert any((x - found[name]).abs().max() > 1e-3 for name, x in outputs(lucid, side, labels).items())


def test_a_reward_model_is_saved_trained_and_found_by_its_auto_class(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = LucidForSequenceClassification(LucidConfig(**SHAPE, num_labels=1))
    model.save_pretrained(tmp_path)
    enable_lucid()
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert type(again) is LucidForSequenceClassification
    assert again.config.num_labels == 1
    inputs = padded(prompts(9, 4), "right")
    inputs["input_ids"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, 0)
    torch.testing.assert_close(again(**inputs).logits, model.eval()(**inputs).logits)
    chosen, rejected = again(**inputs).logits[:, 0]
    torch.nn.functional.logsigmoid(chosen - rejected).backward()
    assert again.score.weight.grad.abs().max() > 0
    assert again.model.layers[0].self_attn.k_proj.weight.grad.abs().max() > 0
