"""`set_strength` and `StrengthRamp`: the strength s of LUCID in a model, P = I + s·L, and a ramp of s in training.

At s = 0 a pretrained softmax model is exactly itself; at s = 1 it is LUCID. In between ‖P⁻¹‖ ≤ 2/(2 − s).
"""

from typing import Any

from transformers import PreTrainedModel, TrainerCallback

from ..nn.attention import LucidAttention
from ..ops.checks import check_strength
from .decoder.configuration import LucidConfig
from .dropin.settings import NAME, LucidSettings, put_settings, uses_lucid


def set_strength(model: PreTrainedModel, strength: float) -> None:
    """Set s of every LUCID layer, in the model and in the configuration that is saved with it."""
    check_strength(strength)
    config = model.config.get_text_config(decoder=True)
    if uses_lucid(config):
        if getattr(config, NAME, None) is None:
            put_settings(config, LucidSettings())
        # In place: the name of the implementation refers to this dictionary.
        getattr(config, NAME)["strength"] = strength
        return
    layers = [module for module in model.modules() if isinstance(module, LucidAttention)]
    if not layers:
        raise ValueError(f"model must have LUCID layers, got {type(model).__name__} without any")
    for layer in layers:
        layer.strength = strength
    if isinstance(config, LucidConfig):
        options = {name: config.options_of(name) for name in dict.fromkeys(config.layer_attentions)}
        options["lucid"]["strength"] = strength
        config.attention_options = options


def strength_of(model: PreTrainedModel) -> float:
    """s of the model's LUCID layers."""
    config = model.config.get_text_config(decoder=True)
    if uses_lucid(config):
        return LucidSettings.from_dict(getattr(config, NAME, None)).strength
    strengths = {module.strength for module in model.modules() if isinstance(module, LucidAttention)}
    if len(strengths) != 1:
        raise ValueError(f"model must have LUCID layers of one strength, got {sorted(strengths) or 'none'}")
    return strengths.pop()


class StrengthRamp(TrainerCallback):
    """Raises s linearly during training, so that a pretrained model becomes LUCID without a jump in its loss.

        Trainer(model, ..., callbacks=[StrengthRamp(steps=1000)])

    s depends on the training step only, so a resumed run continues with the s that it had.

    Args:
        steps: number of steps until `end` is reached; below 1, a fraction of the whole training.
        start: s at the first step.
        end: s from step `steps` on.
    """

    def __init__(self, steps: int | float, *, start: float = 0.0, end: float = 1.0) -> None:
        check_strength(start)
        check_strength(end)
        if isinstance(steps, bool) or not isinstance(steps, (int, float)) or not steps > 0:
            raise ValueError(f"steps must be a positive number, got {steps!r}")
        if steps >= 1 and steps != int(steps):
            raise ValueError(f"steps must be a whole number, or a fraction of the training below 1, got {steps!r}")
        self.steps, self.start, self.end = steps, start, end

    def strength(self, step: int, max_steps: int) -> float:
        """s in training step `step`, counted from 0."""
        length = self.steps * max_steps if self.steps < 1 else self.steps
        return self.start + (self.end - self.start) * min(1.0, step / length)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        set_strength(model, self.strength(state.global_step, state.max_steps))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, model: Any = None, **kwargs: Any) -> None:
        # Trainer has copied the entry by now: `logs` is shown, `log_history` is kept.
        for entry in filter(None, (logs, state.log_history[-1] if state.log_history else None)):
            entry["lucid_strength"] = strength_of(model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        # Trainer has counted the step by now, and evaluates and saves next: set s of the step that follows.
        set_strength(model, self.strength(state.global_step, state.max_steps))
