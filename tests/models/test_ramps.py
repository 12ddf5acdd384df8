"""Ramps of the strength and of the sharpness, and what sets them."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

from lucid_attention import (
    LucidConfig,
    LucidForCausalLM,
    SharpnessRamp,
    StrengthRamp,
    enable_lucid,
    set_sharpness,
    set_strength,
)
from lucid_attention.models.ramps import sharpness_of, strength_of

IDS = torch.arange(2, 18).repeat(2, 1) % 5 + 3
DATA = [{"input_ids": row, "labels": row} for row in IDS.repeat(8, 1)]


def dropin() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return enable_lucid(AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=31, **sizes)))


def own(attention: Any = "lucid", options: dict[str, Any] | None = None) -> LucidForCausalLM:
    torch.manual_seed(0)
    config = LucidConfig(
        vocab_size=31,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        attention=attention,
        attention_options=options or {},
    )
    return LucidForCausalLM(config)


MODELS = {
    "drop-in": dropin,
    "own": own,
    "hybrid": lambda: own(["lucid", "delta"], {"lucid": {"sharpness": 2.0}, "delta": {"conv_size": 2}}),
}
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


@every_model
def test_a_strength_acts_and_is_saved(make: Any, tmp_path: Path) -> None:
    model = make().eval()
    with torch.no_grad():
        one = model(IDS).logits
        set_strength(model, 0.25)
        quarter = model(IDS).logits
    assert strength_of(model) == 0.25
    assert not torch.allclose(one, quarter, atol=1e-5)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert strength_of(again) == 0.25
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, quarter)


def test_other_options_stay_when_the_strength_is_set() -> None:
    model = MODELS["hybrid"]()
    set_strength(model, 0.5)
    assert model.config.attention_options == {
        "lucid": {"sharpness": 2.0, "strength": 0.5},
        "delta": {"conv_size": 2},
    }


def test_a_model_without_lucid_and_a_wrong_strength_are_refused() -> None:
    with pytest.raises(ValueError, match="must have LUCID layers"):
        set_strength(own("softmax"), 0.5)
    with pytest.raises(ValueError, match="strength"):
        set_strength(own(), 1.5)


def test_the_ramp_is_a_straight_line_to_its_end() -> None:
    ramp = StrengthRamp(4, start=0.2, end=0.6)
    assert [ramp.strength(step, 10) for step in range(7)] == pytest.approx([0.2, 0.3, 0.4, 0.5, 0.6, 0.6, 0.6])
    assert StrengthRamp(0.5).strength(3, 12) == pytest.approx(0.5)


@pytest.mark.parametrize(("steps", "options"), [(0, {}), (1.5, {}), (True, {}), (math.inf, {}), (2, {"end": 2.0})])
def test_a_ramp_with_wrong_steps_or_strengths_is_refused(steps: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        StrengthRamp(steps, **options)


class Watch(StrengthRamp):
    """A ramp that also records the strength of every step."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        super().on_step_begin(args, state, control, model=model, **kwargs)
        self.seen.append(strength_of(model))


def train(model: Any, folder: Path, ramp: Any, *, stop: int | None = None, resume: bool = False) -> Trainer:
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
    return trainer


@every_model
def test_training_raises_the_strength_and_saves_it(make: Any, tmp_path: Path) -> None:
    ramp = Watch(3)
    trainer = train(make(), tmp_path, ramp)
    assert ramp.seen == pytest.approx([0, 1 / 3, 2 / 3, 1])
    logged = [entry["lucid_strength"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == pytest.approx([1 / 3, 2 / 3, 1, 1])
    halfway = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    assert strength_of(halfway) == pytest.approx(2 / 3)
    assert strength_of(AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4")) == 1


def test_a_resumed_run_goes_on_with_the_strength_it_had(tmp_path: Path) -> None:
    whole = train(dropin(), tmp_path / "whole", Watch(3)).state.log_history
    shutil.rmtree(tmp_path / "whole" / "checkpoint-4")
    ramp = Watch(3)
    resumed = train(dropin(), tmp_path / "whole", ramp, resume=True).state.log_history
    assert ramp.seen == pytest.approx([2 / 3, 1])
    losses = [[entry["loss"] for entry in log if "loss" in entry] for log in (whole, resumed)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@every_model
def test_a_sharpness_acts_and_is_saved(make: Any, tmp_path: Path) -> None:
    model = make().eval()
    with torch.no_grad():
        before = model(IDS).logits
        set_sharpness(model, 0.5)
        softer = model(IDS).logits
    assert sharpness_of(model) == 0.5
    assert not torch.allclose(before, softer, atol=1e-5)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert sharpness_of(again) == 0.5
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, softer)


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


class WatchedSharpness(SharpnessRamp):
    """A ramp that also records the sharpness of every step."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        super().on_step_begin(args, state, control, model=model, **kwargs)
        self.seen.append(sharpness_of(model))


@every_model
def test_training_lowers_the_sharpness_geometrically_and_saves_it(make: Any, tmp_path: Path) -> None:
    end = math.sqrt(8)  # heads of 8
    ramp = WatchedSharpness(2, start=32.0)
    trainer = train(make(), tmp_path, ramp)
    halfway = math.sqrt(32.0 * end)
    assert ramp.seen == pytest.approx([32.0, halfway, end, end])
    logged = [entry["lucid_sharpness"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == pytest.approx([halfway, end, end, end])
    assert sharpness_of(AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4")) == pytest.approx(end)


def test_a_resumed_run_goes_on_with_the_sharpness_it_had(tmp_path: Path) -> None:
    options = {"start": 50.0, "end": 2.0}
    whole = train(dropin(), tmp_path / "whole", WatchedSharpness(3, **options)).state.log_history
    shutil.rmtree(tmp_path / "whole" / "checkpoint-4")
    ramp = WatchedSharpness(3, **options)
    resumed = train(dropin(), tmp_path / "whole", ramp, resume=True).state.log_history
    assert ramp.seen == pytest.approx([50.0 * (2 / 50) ** (2 / 3), 2.0])
    losses = [[entry["loss"] for entry in log if "loss" in entry] for log in (whole, resumed)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_learned_sharpness_and_wrong_numbers_are_refused() -> None:
    learned = own(options={"learn_sharpness": True})
    for act in (lambda: set_sharpness(learned, 3.0), lambda: sharpness_of(learned)):
        with pytest.raises(ValueError, match="is learned"):
            act()
    for wrong in ({"start": 0.0}, {"end": -1.0}, {"start": math.nan}, {"start": None}):
        with pytest.raises((ValueError, TypeError), match="must be a positive"):
            SharpnessRamp(3, **wrong)
