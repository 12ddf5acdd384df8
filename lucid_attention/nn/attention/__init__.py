"""One file per attention variant, one line each in `ATTENTIONS`."""

from ..causal import CausalAttention, SoftmaxAttention
from .delta import DeltaAttention
from .deltaformer import DeltaFormerAttention
from .diff import DiffAttention
from .exclusive import ExclusiveAttention
from .forgetting import ForgettingAttention
from .gated import GatedAttention
from .gated_delta import GatedDeltaAttention
from .gla import GlaAttention
from .gsa import GsaAttention
from .lucid import LucidAttention
from .lucid_path import LucidPathAttention
from .path import PathAttention
from .sliding import SlidingAttention

# The registry. Contract tests, models, training, experiments and analysis find an attention here by its name.
ATTENTIONS: dict[str, type[CausalAttention]] = {
    "softmax": SoftmaxAttention,
    "sliding": SlidingAttention,
    "lucid": LucidAttention,
    "path": PathAttention,
    "lucid_path": LucidPathAttention,
    "deltaformer": DeltaFormerAttention,
    "forgetting": ForgettingAttention,
    "gated": GatedAttention,
    "exclusive": ExclusiveAttention,
    "diff": DiffAttention,
    "delta": DeltaAttention,
    "gated_delta": GatedDeltaAttention,
    "gla": GlaAttention,
    "gsa": GsaAttention,
}

__all__ = ["ATTENTIONS", "LucidAttention"]
