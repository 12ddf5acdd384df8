"""The part of a checkpoint's README.md that says what LUCID is in it and how it is loaded."""

import math
import re
from typing import Any

from .dropin.hooks import layer_types
from .dropin.settings import LucidSettings, full_layers

CARD_FILE = "README.md"
BEGIN, END = "<!-- lucid convert: this part is written by the command -->", "<!-- end of lucid convert -->"
_PART = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END) + "\n*", re.DOTALL)
# What a model card of the Hugging Face Hub begins with: licence, languages, data.
_FRONT_MATTER = re.compile(r"\A---\r?\n.*?\n---\r?\n", re.DOTALL)
# At the default sharpness √D, unrelated keys of this size and above hardly touch each other.
LARGE_HEAD = 64


def with_card(original: str, config: Any, settings: LucidSettings) -> str:
    """The text of a README.md with the part about LUCID in front, after its front matter. original: may be empty."""
    text = without_card(original)
    front = found[0] if (found := _FRONT_MATTER.match(text)) else ""
    return front + _part(config, settings) + text.removeprefix(front)


def without_card(text: str) -> str:
    """The text of a README.md as it was before `with_card`."""
    return _PART.sub("", text, count=1)


def _part(config: Any, settings: LucidSettings) -> str:
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layers = list(settings.layers) if settings.layers is not None else full_layers(layer_types(config))
    by_default = settings.sharpness is None
    sharpness = f"√{size} = {math.sqrt(size):.3g}, the default" if by_default else f"{settings.sharpness:g}"
    limits = [
        "The weights are those of the softmax model. Until the model is trained further, LUCID of strength above 0 "
        "changes its outputs, and its quality has to be measured.",
        "Training that starts from here is smoother with a ramp: `StrengthRamp`, `SharpnessRamp`.",
    ]
    if by_default and size >= LARGE_HEAD:
        limits.append(
            f"With heads of {size} and this sharpness LUCID is nearly softmax attention where keys are unrelated; a "
            "sharpness of about 4 lets it act."
        )
    lines = [
        BEGIN,
        "",
        f"# A {config.model_type} with LUCID attention",
        "",
        "Attention reads P⁻¹V in the place of V, where P says how alike the keys are (*LUCID: Attention with "
        "Preconditioned Representations*). Made by `lucid convert` of lucid-attention; programs without that package "
        "refuse this checkpoint.",
        "",
        "```python",
        "import lucid_attention, transformers",
        "",
        "lucid_attention.enable_lucid()",
        'model = transformers.AutoModelForCausalLM.from_pretrained("THIS FOLDER")',
        "```",
        "",
        "Other tools open it with `lucid run TOOL ...`. `lucid convert --to softmax` gives the softmax model back.",
        "",
        "| setting | |",
        "|---|---|",
        f"| layers with LUCID | {', '.join(map(str, layers))} of {config.num_hidden_layers} |",
        f"| strength s | {settings.strength:g} (0 is softmax attention, 1 is LUCID) |",
        f"| sharpness c | {sharpness} |",
        "",
        "Limits:",
        "",
        *(f"- {limit}" for limit in limits),
        "",
        END,
        "",
        "",
    ]
    return "\n".join(lines)
