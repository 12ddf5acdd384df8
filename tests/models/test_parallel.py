"""Two processes, with half of the heads or half of the batch each, compute what one does."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.architectures.cases import lucid_model
from tests.models.decoder.cases import padded, prompts

WORKER = Path(__file__).with_name("parallel_worker.py")


def in_two_processes(folder: Path, divided: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [*command, str(WORKER), str(folder), divided], env=environment, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stderr[-3000:]


def learned(name: str) -> Any:
    """LUCID in another architecture, with other values in every head, all of them learned."""
    model: Any = lucid_model(name, learned=["sharpness", "strength"], strength=0.5, center="learned", whiten=True)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter_name, weight in model.named_parameters():
            if ".lucid." in parameter_name:
                weight.add_(0.3 * torch.rand(weight.shape, generator=generator))
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "divided"),
    [("llama", "heads"), ("phi3", "heads"), ("llama", "batch")],
)
@pytest.mark.shows("tensor parallelism", model="drop-in")
def test_two_processes_compute_what_one_does(name: str, divided: str, tmp_path: Path) -> None:
    model = learned(name)
    model.save_pretrained(tmp_path)
    # Rows of one length for the batch: the mean over tokens is that of the processes.
    inputs = padded(prompts(9, 9 if divided == "batch" else 6))
    torch.save(inputs, tmp_path / "inputs.pt")
    in_two_processes(tmp_path, divided)
    with torch.no_grad():
        logits = model(**inputs, use_cache=False).logits
        generated = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    loss = model(**inputs, labels=inputs["input_ids"]).loss
    loss.backward()
    found = [torch.load(tmp_path / f"found_{rank}.pt") for rank in range(2)]
    torch.testing.assert_close((found[0]["loss"] + found[1]["loss"]) / 2, loss.detach(), rtol=1e-4, atol=1e-4)
    for one in found:
        torch.testing.assert_close(one["logits"], logits, rtol=1e-4, atol=1e-4)
        assert torch.equal(one["generated"], generated)
        for weight_name, weight in model.named_parameters():
            torch.testing.assert_close(
                one["gradients"][weight_name], weight.grad, rtol=1e-3, atol=1e-4, msg=weight_name
            )
        # Otherwise both would have computed all.
        kind = "qkv_proj" if name == "phi3" else "k_proj"
        k_proj = f"model.layers.0.self_attn.{kind}.weight"
        parts = 2 if divided == "heads" else 1
        assert one["rows"][k_proj] == model.get_parameter(k_proj).shape[0] // parts
