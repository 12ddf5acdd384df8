"""Values of LUCID that change in training: a pretrained model moves to LUCID by its strength s or its sharpness c.

    P = I + s · stril exp(c (cos θ_ij − 1))

At s = 0, and at c → ∞, a softmax model is itself. At s = 1 and c = √D it is LUCID. A ramp of c is the gentle one for
real models: similar keys meet first, and the model learns along while c falls.
"""

import math
from typing import Any

from transformers import PreTrainedModel, TrainerCallback

from ..nn.attention import LucidAttention
from ..ops.checks import check_positive, check_strength
from .decoder.configuration import LucidConfig
from .preconditioner import LEARNABLE, NAME, LucidSettings, Preconditioner

# Where a ramp begins and ends; None is √D.
COURSES: dict[str, tuple[float, float | None]] = {"strength": (0.0, 1.0), "sharpness": (64.0, None)}


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
    if isinstance(config, LucidConfig):
        options = {attention: config.options_of(attention) for attention in dict.fromkeys(config.layer_attentions)}
        options["lucid"][name] = value
        learned = [name for layer in layers if name == "sharpness" and layer.log_sharpness is not None]
    else:
        learned = [one for one in layers[0].learned if one == name]
    if learned:
        raise ValueError(f"the {name} of this model is learned: it cannot be set")
    if isinstance(config, LucidConfig):
        config.attention_options = options
        for layer in layers:
            setattr(layer, "fixed_sharpness" if name == "sharpness" else name, value)
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


class Ramp(TrainerCallback):
    """Changes the strength or the sharpness of a model during training, so that its loss does not jump.

        Trainer(model, ..., callbacks=[Ramp("sharpness", steps=1000)])

    The value depends on the training step only, so a resumed run continues with the value that it had. The strength
    follows a straight line, by default from 0 to 1: on a model with trained, similar keys a small s costs much already.
    The sharpness falls geometrically, by default from 64 to √D.

    Args:
        name: "strength" or "sharpness".
        steps: number of steps until `end` is reached; below 1, a fraction of the whole training.
        start: the value at the first step; None for 0 or 64.
        end: the value from step `steps` on; None for 1 or √D.
    """

    def __init__(self, name: str, steps: int | float, *, start: float | None = None, end: float | None = None) -> None:
        if name not in LEARNABLE:
            raise ValueError(f"name must be {' or '.join(LEARNABLE)}, got {name!r}")
        if isinstance(steps, bool) or not isinstance(steps, (int, float)) or not 0 < steps < math.inf:
            raise ValueError(f"steps must be a positive finite number, got {steps!r}")
        if steps >= 1 and steps != int(steps):
            raise ValueError(f"steps must be a whole number, or a fraction of the training below 1, got {steps!r}")
        self.name, self.steps = name, steps
        self.start = COURSES[name][0] if start is None else start
        self.end = COURSES[name][1] if end is None else end
        for value in (self.start, self.end):
            if name == "strength":
                check_strength(value)
            else:
                check_positive(name, value, optional=True)

    def value(self, step: int, max_steps: int, head_dim: int) -> float:
        """The value of training step `step`, counted from 0. head_dim: D of √D."""
        share = min(1.0, step / (self.steps * max_steps if self.steps < 1 else self.steps))
        end = math.sqrt(head_dim) if self.end is None else self.end
        if self.name == "strength":
            return self.start + (end - self.start) * share
        return self.start * (end / self.start) ** share

    def apply(self, model: Any, step: int, max_steps: int) -> float:
        """Set the value of training step `step`, and return it."""
        value = self.value(step, max_steps, _layers(model)[0].head_dim)
        # The end is saved as it was given: None stays √D.
        reached = step >= (self.steps * max_steps if self.steps < 1 else self.steps)
        _set(model, self.name, self.end if reached else value)
        return value

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if hasattr(model, "peft_config"):
            names = [name for name, module in model.named_modules() if isinstance(module, Preconditioner)]
            if not any("modules_to_save" in name for name in names):
                # LucidForCausalLM has its values in the configuration.
                way_out = f"add modules_to_save=[{NAME!r}] to its LoraConfig" if names else "train all weights instead"
                raise ValueError(f"a Ramp changes values that this adapter would be saved without: {way_out}")

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.apply(model, state.global_step, state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        # Trainer has counted the step by now, and logs, evaluates and saves next: set the value of the next step.
        self.apply(model, state.global_step, state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, model: Any = None, **kwargs: Any) -> None:
        value = self.value(state.global_step, state.max_steps, _layers(model)[0].head_dim)
        # Trainer has copied the entry by now: `logs` is shown, `log_history` is kept.
        for entry in filter(None, (logs, state.log_history[-1] if state.log_history else None)):
            entry[f"{NAME}_{self.name}"] = value
