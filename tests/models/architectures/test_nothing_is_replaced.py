"""LUCID wraps and replaces no function of Transformers, PEFT and accelerate."""

import subprocess
import sys

import pytest

from tests.models.tools_of_others import environment

PROGRAM = """
import importlib, inspect, sys, tempfile
import torch

PACKAGES = ("transformers", "peft", "accelerate")
for name in ("peft", "accelerate", "transformers.generation.utils", "transformers.cache_utils", "transformers.trainer",
             "transformers.masking_utils", "transformers.models.llama.modeling_llama", "transformers.integrations.peft",
             "transformers.models.auto.modeling_auto", "transformers.generation.continuous_batching"):
    importlib.import_module(name)

def functions():
    found = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] not in PACKAGES or module is None:
            continue
        for name, value in list(vars(module).items()):
            if inspect.isfunction(value):
                found[f"{module_name}.{name}"] = value
            elif inspect.isclass(value) and value.__module__.partition(".")[0] in PACKAGES:
                for attribute, inner in list(vars(value).items()):
                    inner = getattr(inner, "__func__", inner)
                    inner = inner.fget if isinstance(inner, property) else inner
                    if inspect.isfunction(inner):
                        found[f"{value.__module__}.{value.__qualname__}.{attribute}"] = inner
    return found

before, finders = functions(), list(sys.meta_path)
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from peft import LoraConfig, PeftModel, get_peft_model
import lucid_attention
from lucid_attention import LucidConfig, LucidForCausalLM, enable_lucid

lucid_attention.enable_lucid()
shape = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=20)
ids = torch.arange(3, 9)[None]
with tempfile.TemporaryDirectory() as folder:
    model = enable_lucid(LlamaForCausalLM(LlamaConfig(**shape)))
    model.save_pretrained(folder)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), LoraConfig(
        target_modules="all-linear", modules_to_save=["lucid"], task_type="CAUSAL_LM"))
    arguments = TrainingArguments(folder, max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True)
    data = [{"input_ids": ids[0], "labels": ids[0]}]
    Trainer(model, arguments, train_dataset=data).train()
    model.generate(input_ids=ids, max_new_tokens=2, cache_implementation="static", disable_compile=True)
LucidForCausalLM(LucidConfig(**shape)).generate(ids, max_new_tokens=2)
after = functions()
changed = [name for name, function in before.items() if after.get(name) is not function]
assert not changed, changed
assert len(before) > 5000, len(before)
assert sys.meta_path == finders
print("nothing changed")
"""


@pytest.mark.slow
def test_no_function_of_other_packages_changes():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment(), capture_output=True, text=True, timeout=280
    )
    assert "nothing changed" in done.stdout, done.stderr[-3000:]
