"""The decoder with other heads than a language model's, and the entries of all its models in the Auto classes."""

import transformers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)

from .configuration import MODEL_TYPE, LucidConfig
from .modeling import LucidForCausalLM, LucidModel, LucidPreTrainedModel


class _LucidHead(LucidPreTrainedModel):
    """Transformers' heads make their decoder with `AutoModel`, which must know ours."""

    def __init__(self, config: LucidConfig) -> None:
        register_decoder()
        super().__init__(config)


class LucidForSequenceClassification(GenericForSequenceClassification, _LucidHead):
    """One label or score per sequence, read at its last token: also a reward model (num_labels=1).

    A batch of several sequences needs config.pad_token_id, with padding on either side.
    """


class LucidForTokenClassification(GenericForTokenClassification, _LucidHead):
    """One label per token."""


class LucidForQuestionAnswering(GenericForQuestionAnswering, _LucidHead):
    """Begin and end of an answer in the text."""


def register_decoder() -> None:
    """Register the model type with the Auto classes of Transformers. Further calls change nothing."""
    AutoConfig.register(MODEL_TYPE, LucidConfig, exist_ok=True)
    for auto, model in (
        (AutoModel, LucidModel),
        (AutoModelForCausalLM, LucidForCausalLM),
        (AutoModelForSequenceClassification, LucidForSequenceClassification),
        (AutoModelForTokenClassification, LucidForTokenClassification),
        (AutoModelForQuestionAnswering, LucidForQuestionAnswering),
    ):
        auto.register(LucidConfig, model, exist_ok=True)
        # `transformers serve` looks up the class that a configuration names as an attribute of the package.
        # Transformers executes its package twice, so that there are two modules of this name, of one type.
        setattr(type(transformers), model.__name__, model)
