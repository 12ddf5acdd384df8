"""Tensor parallelism of the own decoder: two processes with half of the heads each compute what one does."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from lucid_attention.models.decoder.configuration import LucidConfig, check_divisible

from .cases import SHAPE, decoder, padded, prompts

WORKER = Path(__file__).with_name("tensor_parallel_worker.py")


def in_two_processes(folder: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [*command, str(WORKER), str(folder)], env=environment, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stderr[-3000:]


CASES: dict[str, tuple[str | list[str], dict[str, Any]]] = {
    "lucid": ("lucid", {"attention_options": {"learn_beta": True, "sharpness": 1.5}, "qk_norm": True}),
    "mix": (["sliding", "lucid"], {"attention_options": {"sliding": {"window": 4}}, "attention_bias": "qkv"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.shows("tensor parallelism", model="decoder")
def test_two_processes_compute_what_one_does(case: str, tmp_path: Path) -> None:
    attention, overrides = CASES[case]
    # Without the token of padding: its row of the embedding would stay zero in one process only.
    model = decoder(attention, **overrides, pad_token_id=None)
    model.save_pretrained(tmp_path)
    inputs = padded(prompts(9, 6))
    torch.save(inputs, tmp_path / "inputs.pt")
    in_two_processes(tmp_path)
    with torch.no_grad():
        logits = model(**inputs, use_cache=False).logits
        generated = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    loss = model(**inputs, labels=inputs["input_ids"]).loss
    loss.backward()
    k_proj = model.model.layers[0].self_attn.k_proj.weight
    for rank in range(2):
        found = torch.load(tmp_path / f"found_{rank}.pt")
        # Otherwise both would have computed all.
        assert found["rows"] == k_proj.shape[0] // 2
        torch.testing.assert_close(found["logits"], logits, rtol=1e-4, atol=1e-4)
        assert torch.equal(found["generated"], generated)
        torch.testing.assert_close(found["loss"], loss.detach(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found["gradient"], k_proj.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_weights_that_cannot_be_divided_are_refused_before_they_are_loaded(tmp_path: Path) -> None:
    decoder("delta").save_pretrained(tmp_path)
    in_two_processes(tmp_path)
    for rank in range(2):
        assert "got delta, whose weights cannot be divided" in (tmp_path / f"error_{rank}.txt").read_text()


def test_the_plan_is_that_of_llama() -> None:
    assert LucidConfig(**SHAPE).base_model_tp_plan == LlamaConfig.base_model_tp_plan
    assert decoder().tp_plan["lm_head"] == "colwise_gather_output"
    assert decoder().tp_plan["model.layers.*.self_attn.q_proj"] == "colwise"


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "a state": ({"attention": ["lucid", "gla"]}, 2, "attentions lucid, softmax, sliding, got gla"),
    "pairs of heads": ({"attention": "diff"}, 2, "got diff"),
    "a learned sharpness": ({"attention_options": {"learn_sharpness": True}}, 2, "needs a fixed sharpness"),
    "too few heads": ({}, 4, "num_key_value_heads to be a multiple of 4, got 2"),
}


@pytest.mark.parametrize(("overrides", "processes", "complaint"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_divided_is_refused(overrides: dict[str, Any], processes: int, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        check_divisible(LucidConfig(**SHAPE, **overrides), processes)
