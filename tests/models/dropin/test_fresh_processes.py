"""LUCID checkpoints in fresh processes: one without this package, one that knows it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.models.decoder.cases import decoder
from tests.models.dropin.cases import lucid_model, tokens
from tests.models.dropin.test_saved_choice import logits

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]

WITHOUT_THE_PACKAGE = """
import json, sys
sys.modules["lucid_attention"] = None
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedConfig, pipeline

assert not hasattr(PreTrainedConfig.to_json_file, "__wrapped__"), "the process knows LUCID"
found = {}
for name in ("llama", "own"):
    for loader in (AutoConfig, LlamaConfig, AutoModelForCausalLM, LlamaForCausalLM):
        for options in ({}, {"attn_implementation": None}, {"attn_implementation": "sdpa"}):
            for more in ({}, {"ignore_mismatched_sizes": True}):
                try:
                    loader.from_pretrained(name, **options, **more)
                    outcome = "opened"
                except Exception as error:
                    outcome = str(error)
                found[f"{name} {loader.__name__} {options} {more}"] = outcome
    try:
        pipeline("text-generation", model=name)
        found[f"{name} pipeline"] = "opened"
    except Exception as error:
        found[f"{name} pipeline"] = str(error)
plain = AutoModelForCausalLM.from_pretrained("plain")
found["plain"] = plain.config._attn_implementation
print(json.dumps(found))
"""

WITH_THE_PACKAGE = """
import torch
from lucid_attention import enable_lucid
enable_lucid()
from transformers import AutoModelForCausalLM, LlamaForCausalLM

torch.set_num_threads(1)
ids = torch.load("ids.pt")
found = {}
with torch.no_grad():
    for loader in (AutoModelForCausalLM, LlamaForCausalLM):
        for options in ({}, {"attn_implementation": None}):
            model = loader.from_pretrained("llama", **options).eval()
            found[f"{loader.__name__} {options}"] = model(ids).logits
    own = AutoModelForCausalLM.from_pretrained("own").eval()
    found["own"] = own(ids[:, :8] % 48).logits
torch.save(found, "logits.pt")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from lucid_attention.models.convert import convert

    path = tmp_path_factory.mktemp("fresh")
    lucid_model("llama", layers=[1], strength=0.5).save_pretrained(path / "llama")
    decoder().save_pretrained(path / "own")
    convert(path / "llama", path / "plain", to="softmax")
    torch.save(tokens(2), path / "ids.pt")
    return path


def run(code, folder, **environment):
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**inherited, "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_the_package_nothing_opens_and_the_error_names_it(folder):
    found = json.loads(run(WITHOUT_THE_PACKAGE, folder).splitlines()[-1])
    assert found.pop("plain") == "sdpa"
    assert len(found) == 50
    for case, outcome in found.items():
        assert "pip install lucid-attention" in outcome, f"{case}: {outcome}"


def test_with_the_package_everything_opens_as_lucid(folder):
    run(WITH_THE_PACKAGE, folder, PYTHONPATH=str(ROOT))
    found = torch.load(folder / "logits.pt")
    own = decoder()
    with torch.no_grad():
        assert torch.equal(found.pop("own"), own(tokens(2)[:, :8] % 48).logits)
    expected = logits(lucid_model("llama", layers=[1], strength=0.5))
    assert len(found) == 4
    for case, outcome in found.items():
        assert torch.equal(outcome, expected), case
