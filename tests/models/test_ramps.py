"""Ramps of the strength and of the sharpness, and what sets them."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

from lucid_attention import LucidConfig, LucidForCausalLM, Ramp, enable_lucid, set_sharpness, set_strength
from lucid_attention.models.preconditioner import Preconditioner
from lucid_attention.nn.attention import LucidAttention

IDS = torch.arange(2, 18).repeat(2, 1) % 5 + 3
DATA = [{"input_ids": row, "labels": row} for row in IDS.repeat(8, 1)]
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
ROOT = math.sqrt(8)


def dropin() -> Any:
    torch.manual_seed(0)
    return enable_lucid(AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=31, **SIZES)))


def own(attention: Any = "lucid", **options: Any) -> LucidForCausalLM:
    torch.manual_seed(0)
    return LucidForCausalLM(LucidConfig(vocab_size=31, **SIZES, attention=attention, attention_options=options))


MODELS = {
    "drop-in": dropin,
    "own": own,
    "hybrid": lambda: own(["lucid", "delta"], lucid={"sharpness": 2.0}, delta={"conv_size": 2}),
}
SETTERS: dict[str, Any] = {"strength": set_strength, "sharpness": set_sharpness}
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
both = pytest.mark.parametrize("name", SETTERS)


def value(model: Any, name: str) -> float:
    """The value that all heads of all LUCID layers compute with."""
    found = []
    for module in model.modules():
        if isinstance(module, Preconditioner):
            found += getattr(module, name).tolist()
        elif isinstance(module, LucidAttention):
            found.append(module.strength if name == "strength" else module.fixed_sharpness or ROOT)
    assert len(set(found)) == 1
    return found[0]


@both
@every_model
def test_a_value_acts_and_is_saved_and_other_options_stay(make: Any, name: str, tmp_path: Path) -> None:
    model = make().eval()
    before = getattr(model.config, "attention_options", {})
    with torch.no_grad():
        one = model(IDS).logits
        SETTERS[name](model, 0.25)
        changed = model(IDS).logits
    assert not torch.allclose(one, changed, atol=1e-5)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert value(model, name) == value(again, name) == 0.25
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, changed)
    if "delta" in before:
        assert again.config.attention_options == before | {"lucid": before["lucid"] | {name: 0.25}}


@every_model
def test_a_large_sharpness_is_softmax_attention(make: Any) -> None:
    """Tokens differ here, so no two keys have the same direction."""
    model = make().eval()
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        set_sharpness(model, 1e6)
        sharp = model(ids).logits
        set_strength(model, 0.0)
        torch.testing.assert_close(sharp, model(ids).logits)


def test_what_cannot_be_set_is_refused() -> None:
    with pytest.raises(ValueError, match="must have LUCID layers"):
        set_strength(own("softmax"), 0.5)
    with pytest.raises(ValueError, match="strength"):
        set_strength(own(), 1.5)
    for learned in (own(learn_sharpness=True), enable_lucid(dropin(), learned=["sharpness"])):
        with pytest.raises(ValueError, match="sharpness of this model is learned"):
            set_sharpness(learned, 3.0)


WRONG: list[tuple[Any, Any, dict[str, Any]]] = [
    ("slope", 3, {}),
    *(("strength", steps, {}) for steps in (0, 1.5, True, math.inf)),
    ("strength", 2, {"end": 2.0}),
    *(("sharpness", 3, wrong) for wrong in ({"start": 0.0}, {"end": -1.0}, {"start": math.nan})),
]


@pytest.mark.parametrize(("name", "steps", "options"), WRONG)
def test_a_ramp_without_meaning_is_refused(name: Any, steps: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Ramp(name, steps, **options)


def test_the_strength_rises_in_a_straight_line_to_its_end() -> None:
    ramp = Ramp("strength", 4, start=0.2, end=0.6)
    values = [ramp.value(step, 10, 8) for step in range(7)]
    assert values == pytest.approx([0.2, 0.3, 0.4, 0.5, 0.6, 0.6, 0.6])
    assert Ramp("strength", 0.5).value(3, 12, 8) == pytest.approx(0.5)


class Watch(Ramp):
    """A ramp that also records the value of every step."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        super().on_step_begin(args, state, control, model=model, **kwargs)
        self.seen.append(value(model, self.name))


# The ramp, and the values of the four steps of a training.
TRAININGS: dict[str, tuple[int, dict[str, Any], list[float]]] = {
    "strength": (3, {}, [0, 1 / 3, 2 / 3, 1]),
    "sharpness": (2, {"start": 32.0}, [32.0, math.sqrt(32.0 * ROOT), ROOT, ROOT]),
}


def train(model: Any, folder: Path, ramp: Any, *, resume: bool = False) -> list[dict[str, Any]]:
    """The entries of the log with a loss."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=4,
        per_device_train_batch_size=2,
        save_steps=2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        learning_rate=1e-3,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=DATA, callbacks=[ramp])
    trainer.train(resume_from_checkpoint=resume)
    return [entry for entry in trainer.state.log_history if "loss" in entry]


@both
@every_model
def test_training_follows_the_ramp_logs_and_saves_it_and_resumes(make: Any, name: str, tmp_path: Path) -> None:
    steps, options, expected = TRAININGS[name]
    ramp = Watch(name, steps, **options)
    log = train(make(), tmp_path, ramp)
    assert ramp.seen == pytest.approx(expected)
    assert [entry[f"lucid_{name}"] for entry in log] == pytest.approx([*expected[1:], expected[-1]])
    for step in (2, 4):
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / f"checkpoint-{step}")
        assert value(saved, name) == pytest.approx((*expected, expected[-1])[step])
    shutil.rmtree(tmp_path / "checkpoint-4")
    ramp = Watch(name, steps, **options)
    resumed = train(make(), tmp_path, ramp, resume=True)
    assert ramp.seen == pytest.approx(expected[2:])
    assert [entry["loss"] for entry in resumed] == pytest.approx([entry["loss"] for entry in log], rel=1e-5)
