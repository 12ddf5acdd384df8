"""Trainers of TRL on the drop-in and on the own decoder: packing without leaks, and references that are LUCID too."""

import math
from itertools import pairwise

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

from lucid_attention import LucidConfig, LucidForCausalLM, enable_lucid
from tests.models.architectures.cases import VOCABULARY, softmax_model, tokens

SETTINGS = {"layers": [1], "strength": 0.75, "sharpness": 2.0}
KINDS = ["dropin", "own"]
WORDS = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(VOCABULARY - 3))]


def text(length, seed):
    return " ".join(WORDS[3 + int(i) % (VOCABULARY - 3)] for i in tokens(1, length, seed)[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama and an own decoder with its weights, with a tokenizer of words."""
    folder = tmp_path_factory.mktemp("trl")
    llama = softmax_model("llama")
    own = LucidForCausalLM(LucidConfig.from_llama(llama.config, attention=["softmax", "lucid"]))
    own.load_state_dict(llama.state_dict())
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    enable_lucid(llama, **SETTINGS)
    for kind, model in (("dropin", llama), ("own", own)):
        model.save_pretrained(folder / kind)
        tokenizer.save_pretrained(folder / kind)
    return folder


def load(folder, kind, auto=AutoModelForCausalLM, **options):
    return auto.from_pretrained(folder / kind, **options)


def arguments(cls, folder, **options):
    common = {"max_steps": 2, "per_device_train_batch_size": 2, "logging_steps": 1, "bf16": False, "use_cpu": True}
    return cls(str(folder / "run"), report_to=[], save_strategy="no", **{**common, **options})


def documents():
    return Dataset.from_list([{"text": text(length, length)} for length in (5, 9, 13, 7, 3, 10)])


def preferences():
    return Dataset.from_list(
        [{"prompt": text(5, i) + " ", "chosen": text(6, i + 10), "rejected": text(4, i + 20)} for i in range(4)]
    )


def losses(trainer, name="loss"):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


PACKINGS = {
    "packing": {"packing": True, "packing_strategy": "bfd", "max_length": 24},
    "padding_free": {"padding_free": True, "max_length": None},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.shows("TRL: SFT, packed and padding-free", model="drop-in")
@pytest.mark.shows("TRL: SFT, packed and padding-free", model="decoder")
def test_packed_documents_do_not_see_each_other(folder, kind, packing):
    """TRL's own batches against one document at a time, in float64."""
    model = load(folder, kind).double()
    options = {**PACKINGS[packing], "gradient_checkpointing": False, "per_device_train_batch_size": 3}
    trainer = SFTTrainer(model, arguments(SFTConfig, folder, **options), train_dataset=documents())
    found = 0
    for batch in trainer.get_train_dataloader():
        assert batch["input_ids"].shape[0] == 1
        with torch.no_grad():
            packed = trainer.model.eval()(**{k: v for k, v in batch.items() if k != "labels"}).logits
        starts = [*(batch["position_ids"][0] == 0).nonzero()[:, 0].tolist(), packed.shape[1]]
        loss, count = 0.0, 0
        for start, stop in pairwise(starts):
            ids = batch["input_ids"][:, start:stop]
            with torch.no_grad():
                alone = model(ids).logits
                torch.testing.assert_close(packed[:, start:stop], alone, rtol=1e-9, atol=1e-9)
                softmax = softmax_model("llama").double()(ids).logits
            # Otherwise a fall back to softmax attention would pass.
            assert stop - start < 3 or (alone - softmax)[:, 2:].abs().max() > 1e-2
            loss += float(torch.nn.functional.cross_entropy(alone[0, :-1], ids[0, 1:], reduction="sum"))
            count += stop - start - 1
        assert len(starts) > 2
        found += len(starts) - 1
        assert float(trainer.compute_loss(trainer.model, batch).detach()) == pytest.approx(loss / count, rel=1e-5)
    assert found == 6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.shows("TRL: DPO", model="drop-in")
@pytest.mark.shows("TRL: DPO", model="decoder")
def test_a_dpo_reference_is_the_same_model(folder, kind):
    """Before the first step both models agree: the loss is ln 2, and no reward differs from 0."""
    model = load(folder, kind)
    trainer = DPOTrainer(model, args=arguments(DPOConfig, folder, max_steps=1), train_dataset=preferences())
    assert trainer.ref_model is not model
    if kind == "dropin":
        assert trainer.ref_model.config.lucid == SETTINGS | {"learned": [], "center": "none", "whiten": False}
    trainer.train()
    assert losses(trainer)[0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses(trainer, "rewards/chosen")[0] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_that_sft_trained_comes_back(folder, kind, tmp_path):
    options = {"packing": True, "max_length": 24, "learning_rate": 0.1}
    trainer = SFTTrainer(
        load(folder, kind),
        arguments(SFTConfig, folder, **options),
        train_dataset=documents(),
        peft_config=LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"),
    )
    trainer.train()
    trainer.save_model(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(folder / kind)
    with torch.no_grad():
        untrained, ids = load(folder, kind)(tokens(2)).logits, tokens(2)
        found = PeftModel.from_pretrained(base, tmp_path).eval()(ids).logits
        expected = trainer.model.eval()(ids).logits
    assert torch.equal(found, expected)
    assert (found - untrained).abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_loaded_by_its_path(folder, kind, tmp_path):
    """TRL asks for attn_implementation=None here, and finds the class of the own decoder by the Auto classes."""
    load(folder, kind).save_pretrained(tmp_path)
    trainer = SFTTrainer(
        str(tmp_path),
        arguments(SFTConfig, folder),
        train_dataset=documents(),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder / kind),
    )
    with torch.no_grad():
        found, expected = (model.eval()(tokens(2)).logits for model in (trainer.model, load(folder, kind)))
    assert torch.equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.shows("TRL: reward models", model="drop-in")
@pytest.mark.shows("TRL: reward models", model="decoder")
def test_a_reward_model_is_trained_and_saved(folder, kind, tmp_path):
    model = load(folder, kind, AutoModelForSequenceClassification, num_labels=1)
    trainer = RewardTrainer(model, args=arguments(RewardConfig, folder), train_dataset=preferences())
    trainer.train()
    assert all(map(math.isfinite, losses(trainer)))
    trainer.save_model(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    with torch.no_grad():
        found, expected = (one.eval()(tokens(2)).logits for one in (again, trainer.model))
    assert torch.equal(found, expected)
    if kind == "dropin":
        assert again.config.lucid == SETTINGS | {"learned": [], "center": "none", "whiten": False}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("cls", "settings"), [(GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)])
@pytest.mark.shows("TRL: GRPO, RLOO", model="drop-in")
@pytest.mark.shows("TRL: GRPO, RLOO", model="decoder")
def test_a_policy_starts_at_its_reference(folder, kind, cls, settings):
    options = {"num_generations": 2, "max_completion_length": 4, "beta": 0.1}
    trainer = cls(
        load(folder, kind),
        lambda completions, **_: [float(len(words)) for words in completions],
        args=arguments(settings, folder, **options),
        train_dataset=preferences().select_columns(["prompt"]),
    )
    trainer.train()
    assert losses(trainer, "kl")[0] == pytest.approx(0, abs=1e-5)
