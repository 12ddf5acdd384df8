"""Ramps that move a pretrained model to LUCID in training, by its strength s or by its sharpness c.

    P = I + s · stril exp(c (cos θ_ij − 1))

At s = 0, and at c → ∞, a softmax model is itself. At s = 1 and c = √D it is LUCID. A ramp of c is the gentle one for
real models: similar keys meet first, and the model learns along while c falls.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel, TrainerCallback

from ..nn.attention import LucidAttention
from ..ops.checks import check_positive, check_strength
from .decoder.configuration import LucidConfig
from .preconditioner import NAME, LucidSettings, Preconditioner


def set_strength(model: PreTrainedModel, strength: float) -> None:
    """Set s of every LUCID layer, in the model and in the configuration that is saved with it."""
    check_strength(strength)
    _set(model, "strength", strength)


def set_sharpness(model: PreTrainedModel, sharpness: float | None) -> None:
    """Set c of every LUCID layer, in the model and in the configuration that is saved with it. None: √D."""
    check_positive("sharpness", sharpness, optional=True)
    _set(model, "sharpness", sharpness)


def _set(model: PreTrainedModel, name: str, value: float | None) -> None:
    config, layers = model.config, _layers(model)
    if any(_is_learned(layer, name) for layer in layers):
        raise ValueError(f"the {name} of this model is learned: it cannot be set")
    if isinstance(config, LucidConfig):
        for layer in layers:
            setattr(layer, "fixed_sharpness" if name == "sharpness" else name, value)
        options = {attention: config.options_of(attention) for attention in dict.fromkeys(config.layer_attentions)}
        options["lucid"][name] = value
        config.attention_options = options
        return
    settings = LucidSettings.from_dict(getattr(config, NAME) | {name: value})
    setattr(config, NAME, settings.to_dict())
    for layer in layers:
        layer.set_values(settings)


def _layers(model: PreTrainedModel) -> list[Any]:
    layers = [module for module in model.modules() if isinstance(module, (LucidAttention, Preconditioner))]
    if not layers:
        raise ValueError(f"model must have LUCID layers, got {type(model).__name__} without any")
    return layers


def _is_learned(layer: Any, name: str) -> bool:
    if isinstance(layer, Preconditioner):
        return name in layer.learned
    return name == "sharpness" and layer.log_sharpness is not None


def strength_of(model: PreTrainedModel) -> float:
    """s of the model's LUCID layers."""
    return _one(model, "strength", lambda layer: layer.strength)


def sharpness_of(model: PreTrainedModel) -> float:
    """c of the model's LUCID layers, √D where none is set."""
    return _one(model, "sharpness", lambda layer: layer.fixed_sharpness or math.sqrt(layer.head_dim))


def _one(model: PreTrainedModel, name: str, value_of: Callable[[Any], float]) -> float:
    layers = _layers(model)
    if any(_is_learned(layer, name) for layer in layers):
        raise ValueError(f"the {name} of this model is learned: it has no single value")
    if isinstance(layers[0], Preconditioner):
        # The configuration has the value unrounded.
        settings = LucidSettings.from_dict(getattr(model.config, NAME))
        return layers[0].initial(settings)[name]
    values = {value_of(layer) for layer in layers}
    if len(values) != 1:
        raise ValueError(f"model must have LUCID layers of one {name}, got {sorted(values)}")
    return values.pop()


class _Ramp(TrainerCallback, ABC):
    """A setting that follows a course in training. It depends on the training step only, so a resumed run continues
    with the value that it had.

    steps: number of steps until the end is reached; below 1, a fraction of the whole training.
    """

    # The name of the setting in the entries of the log.
    name: str

    def __init__(self, steps: int | float) -> None:
        if isinstance(steps, bool) or not isinstance(steps, (int, float)) or not 0 < steps < math.inf:
            raise ValueError(f"steps must be a positive finite number, got {steps!r}")
        if steps >= 1 and steps != int(steps):
            raise ValueError(f"steps must be a whole number, or a fraction of the training below 1, got {steps!r}")
        self.steps = steps

    def share(self, step: int, max_steps: int) -> float:
        """How much of the way lies behind training step `step`, counted from 0: from 0 to 1."""
        return min(1.0, step / (self.steps * max_steps if self.steps < 1 else self.steps))

    @abstractmethod
    def apply(self, model: Any, step: int, max_steps: int) -> None:
        """Set the value of training step `step`."""

    @abstractmethod
    def value_of(self, model: Any) -> float:
        """The present value."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if hasattr(model, "peft_config"):
            names = [name for name, module in model.named_modules() if isinstance(module, Preconditioner)]
            if not any("modules_to_save" in name for name in names):
                # LucidForCausalLM has its values in the configuration.
                way_out = f"add modules_to_save=[{NAME!r}] to its LoraConfig" if names else "train all weights instead"
                raise ValueError(
                    f"{type(self).__name__} changes values that this adapter would be saved without: {way_out}"
                )

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.apply(model, state.global_step, state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, model: Any = None, **kwargs: Any) -> None:
        # Trainer has copied the entry by now: `logs` is shown, `log_history` is kept.
        for entry in filter(None, (logs, state.log_history[-1] if state.log_history else None)):
            entry[self.name] = self.value_of(model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        # Trainer has counted the step by now, and evaluates and saves next: set the value of the step that follows.
        self.apply(model, state.global_step, state.max_steps)


class StrengthRamp(_Ramp):
    """Raises s linearly during training, so that a small model becomes LUCID without a jump in its loss.

        Trainer(model, ..., callbacks=[StrengthRamp(steps=1000)])

    On a model with trained, similar keys a small s costs much already: see `SharpnessRamp`.

    Args:
        steps: number of steps until `end` is reached; below 1, a fraction of the whole training.
        start: s at the first step.
        end: s from step `steps` on.
    """

    name = "lucid_strength"

    def __init__(self, steps: int | float, *, start: float = 0.0, end: float = 1.0) -> None:
        super().__init__(steps)
        check_strength(start)
        check_strength(end)
        self.start, self.end = start, end

    def strength(self, step: int, max_steps: int) -> float:
        """s in training step `step`, counted from 0."""
        return self.start + (self.end - self.start) * self.share(step, max_steps)

    def apply(self, model: Any, step: int, max_steps: int) -> None:
        set_strength(model, self.strength(step, max_steps))

    def value_of(self, model: Any) -> float:
        return strength_of(model)


class SharpnessRamp(_Ramp):
    """Lowers c geometrically during training, from far above √D, where LUCID does next to nothing, down to √D.

        Trainer(model, ..., callbacks=[SharpnessRamp(steps=1000)])

    Args:
        steps: number of steps until `end` is reached; below 1, a fraction of the whole training.
        start: c at the first step.
        end: c from step `steps` on; None for √D.
    """

    name = "lucid_sharpness"

    def __init__(self, steps: int | float, *, start: float = 64.0, end: float | None = None) -> None:
        super().__init__(steps)
        check_positive("start", start)
        check_positive("end", end, optional=True)
        self.start, self.end = start, end

    def apply(self, model: Any, step: int, max_steps: int) -> None:
        share = self.share(step, max_steps)
        if share == 1:
            set_sharpness(model, self.end)
            return
        if self.end is None:
            set_sharpness(model, None)
        end = sharpness_of(model) if self.end is None else self.end
        set_sharpness(model, self.start * (end / self.start) ** share)

    def value_of(self, model: Any) -> float:
        return sharpness_of(model)
