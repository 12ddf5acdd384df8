"""LUCID in Trainer, in pipelines and with the flattening collator."""

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    pipeline,
)

from tests.models.architectures.cases import VOCABULARY, greedy, lucid_model, softmax_model, tokens


def tokenizer():
    words = {f"w{i}": i for i in range(VOCABULARY)}
    plain = Tokenizer(WordLevel(words, unk_token="w1"))
    plain.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="w0", unk_token="w1", padding_side="left")


def text(ids):
    return " ".join(f"w{i}" for i in ids.tolist())


@pytest.mark.shows("`pipeline`", model="drop-in")
def test_a_pipeline_generates_what_the_model_generates():
    model, ids = lucid_model("qwen3"), tokens(2)
    lengths = (12, 7)
    write = pipeline("text-generation", model=model, tokenizer=tokenizer())
    prompts = [text(row[:n]) for row, n in zip(ids, lengths, strict=True)]
    options = {"do_sample": False, "max_new_tokens": 5, "return_full_text": False, "batch_size": 2}
    for row, n, answer in zip(ids, lengths, write(prompts, **options), strict=True):
        expected = greedy(model, row[None, :n], 5)[0]
        assert answer[0]["generated_text"].split() == text(expected).split()
        assert not torch.equal(expected, greedy(softmax_model("qwen3"), row[None, :n], 5)[0])


def arguments(path, **options):
    return TrainingArguments(
        path,
        max_steps=2,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )


@pytest.mark.parametrize("options", [{}, {"bf16": True, "gradient_checkpointing": True}], ids=["plain", "bf16"])
@pytest.mark.shows("`Trainer`", model="drop-in")
def test_trainer_trains_saves_and_the_model_comes_back_with_lucid(tmp_path, options):
    model = lucid_model("gemma3", layers=[2], strength=0.5)
    before = model.model.layers[2].self_attn.k_proj.weight.detach().clone()
    data = [{"input_ids": row, "labels": row} for row in tokens(4)]
    trainer = Trainer(model, arguments(tmp_path, **options), train_dataset=data)
    result = trainer.train()
    assert result.global_step == 2
    assert torch.tensor(result.training_loss).isfinite()
    assert not torch.equal(model.model.layers[2].self_attn.k_proj.weight, before)
    trainer.save_model(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert again.config._attn_implementation == "lucid"
    assert again.config.lucid == {
        "layers": [2],
        "strength": 0.5,
        "sharpness": None,
        "learned": [],
        "center": "none",
        "whiten": False,
    }
    # Trainer leaves its model wrapped in autocast: compare with a fresh model of the same weights.
    expected = lucid_model("gemma3", layers=[2], strength=0.5)
    expected.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(again(tokens(2)).logits, expected(tokens(2)).logits)
