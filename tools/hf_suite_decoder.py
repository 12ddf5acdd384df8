"""Transformers' common tests for the own decoder, with the attention of one column. See `hf_suite.py`."""

import json
import os
import unittest
from importlib import import_module
from typing import Any

from lucid_attention.models.decoder import modeling
from lucid_attention.models.decoder.configuration import LucidConfig

# From the clone: the `tests` of Transformers, not ours.
common: Any = import_module("tests.causal_lm_tester")


class LucidModelTester(common.CausalLMModelTester):
    config_class = LucidConfig
    base_model_class = modeling.LucidModel
    causal_lm_class = modeling.LucidForCausalLM
    question_answering_class = modeling.LucidForQuestionAnswering
    sequence_classification_class = modeling.LucidForSequenceClassification
    token_classification_class = modeling.LucidForTokenClassification

    def __init__(self, parent: Any) -> None:
        super().__init__(parent)
        self.attention = json.loads(os.environ["HF_SUITE_COLUMN"])["attention"]


class LucidModelTest(common.CausalLMModelTest, unittest.TestCase):
    model_tester_class = LucidModelTester
    # No attention weights are computed, so tests must not ask for them.
    has_attentions = False
    _torch_compile_train_cls = modeling.LucidForCausalLM
