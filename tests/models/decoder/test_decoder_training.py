"""Training the own decoder: loss, gradients, checkpointing, Transformers' Trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from lucid_attention import ATTENTIONS
from lucid_attention.models.decoder.modeling import LucidForCausalLM

from .cases import VOCABULARY, decoder, padded, prompts

every_name = pytest.mark.parametrize("name", ATTENTIONS)


def gradients(model: LucidForCausalLM, **inputs: Any) -> dict[str, Tensor]:
    model.zero_grad()
    model(**inputs).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def batch() -> dict[str, Tensor]:
    inputs = padded(prompts(9, 6), "right")
    return inputs | {"labels": inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)}


@every_name
@pytest.mark.shows("gradient checkpointing", model="decoder")
def test_checkpointing_gives_the_same_gradients_and_they_reach_every_weight(name: str) -> None:
    model = decoder(name).double().train()
    plain = gradients(model, **batch())
    assert all(gradient.abs().max() > 0 for gradient in plain.values())
    model.gradient_checkpointing_enable()
    assert model.model.layers[0].gradient_checkpointing
    torch.testing.assert_close(gradients(model, **batch()), plain)


def test_checkpointing_leaves_no_half_filled_cache() -> None:
    model = decoder().train()
    model.gradient_checkpointing_enable()
    assert model(**batch(), use_cache=True).past_key_values is None


def test_the_loss_is_that_of_the_next_token() -> None:
    model, inputs = decoder(), batch()
    outputs = model(**inputs)
    expected = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())
    torch.testing.assert_close(outputs.loss, expected)
    # Trainer passes num_items_in_batch when it accumulates gradients: the sum divided by that number.
    shared = model(**inputs, num_items_in_batch=torch.tensor(26)).loss
    torch.testing.assert_close(shared, expected * int((inputs["labels"][:, 1:] != -100).sum()) / 26)


def test_logits_hidden_states_and_tuples_come_as_asked() -> None:
    model, inputs = decoder(), padded(prompts(9, 9))
    outputs = model(**inputs, output_hidden_states=True)
    torch.testing.assert_close(model(**inputs, logits_to_keep=2).logits, outputs.logits[:, -2:])
    assert [tuple(states.shape) for states in outputs.hidden_states] == [(2, 9, 32)] * 3
    torch.testing.assert_close(outputs.hidden_states[0], model.model.embed_tokens(inputs["input_ids"]))
    torch.testing.assert_close(model.lm_head(outputs.hidden_states[-1]), outputs.logits)
    embedded = model(inputs_embeds=outputs.hidden_states[0], return_dict=False)
    assert isinstance(embedded, tuple)
    torch.testing.assert_close(embedded[0], outputs.logits)


@pytest.mark.shows("packed documents", model="decoder")
def test_packed_rows_train_like_separate_ones() -> None:
    model, texts = decoder().double(), prompts(5, 1, 6, 4)
    packed = DataCollatorWithFlattening()([{"input_ids": text.tolist()} for text in texts])
    assert packed["input_ids"].shape == (1, 16)
    together = gradients(model, **packed)
    rows = padded(texts, "right")
    labels = rows["input_ids"].masked_fill(rows["attention_mask"] == 0, -100)
    torch.testing.assert_close(together, gradients(model, **rows, labels=labels))


class Sentences(torch.utils.data.Dataset):
    """Rows of tokens in which each token follows from the one before."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = 1 + (torch.arange(12) * 5 + index) % (VOCABULARY - 1)
        return {"input_ids": tokens, "labels": tokens}


@pytest.mark.parametrize(
    ("attention", "checkpointing"), [("lucid", True), (["gated_delta", "lucid_path"], False)], ids=["lucid", "mix"]
)
@pytest.mark.shows("`Trainer`", model="decoder")
def test_the_trainer_trains_saves_and_goes_on(attention: str | list[str], checkpointing: bool, tmp_path: Path) -> None:
    model = decoder(attention)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    arguments: dict[str, Any] = {
        "output_dir": str(tmp_path),
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "save_steps": 2,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "gradient_checkpointing": checkpointing,
    }
    trainer = Trainer(model=model, args=TrainingArguments(max_steps=2, **arguments), train_dataset=Sentences())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    assert all(not torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    # A second Trainer continues where the first one stopped.
    again = Trainer(
        model=decoder(attention), args=TrainingArguments(max_steps=3, **arguments), train_dataset=Sentences()
    )
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 3
    reloaded = LucidForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    with torch.no_grad():
        torch.testing.assert_close(reloaded(**padded(prompts(9))).logits, model.eval()(**padded(prompts(9))).logits)
