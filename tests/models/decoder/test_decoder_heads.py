"""Classification with the own decoder: the head of Llama around our layers."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

from lucid_attention import enable_lucid
from lucid_attention.models.decoder.configuration import LucidConfig
from lucid_attention.models.decoder.modeling import LucidForSequenceClassification

from .cases import SHAPE, padded, prompts


def labelled(side: str) -> dict[str, torch.Tensor]:
    inputs = padded(prompts(9, 4, 6), side)
    # The head finds padding by its token.
    inputs["input_ids"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, 0)
    return inputs | {"labels": torch.tensor([0, 2, 1])}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.shows("heads for classification", model="decoder")
def test_with_softmax_attention_the_head_is_that_of_llama(side: str) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, num_labels=3)
    llama = LlamaForSequenceClassification(config).eval()
    expected = llama(**labelled(side))
    for attention in ("softmax", "lucid"):
        ours = LucidForSequenceClassification(LucidConfig.from_llama(config, attention=attention, num_labels=3)).eval()
        ours.load_state_dict(llama.state_dict())
        found = ours(**labelled(side))
        if attention == "softmax":
            torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(found.loss, expected.loss, rtol=1e-4, atol=1e-5)
        else:
            assert (found.logits - expected.logits).abs().max() > 1e-3


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
