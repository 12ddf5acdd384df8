"""One process of `test_parallel.py`: loads a checkpoint, takes its part of the work, and saves what it computes.

torchrun --nproc-per-node 2 parallel_worker.py CHECKPOINT heads|batch
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from lucid_attention import enable_lucid


def main(folder: Path, divided: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    enable_lucid()
    options: dict[str, Any] = {"distributed_config": DistributedConfig(tp_plan="auto")} if divided == "heads" else {}
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, **options)
    inputs = torch.load(folder / "inputs.pt")
    with torch.no_grad():
        logits = model(**inputs, use_cache=False).logits
        generated = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    run = model
    if divided == "batch":
        inputs, run = {name: x[rank::2] for name, x in inputs.items()}, DistributedDataParallel(model)
    loss = run(**inputs, labels=inputs["input_ids"]).loss
    loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    found = {"logits": logits, "generated": generated, "loss": loss.detach(), "rows": {}, "gradients": {}}
    for name, gradient in gradients.items():
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        found["gradients"][name] = whole
        found["rows"][name] = (gradient.to_local() if isinstance(gradient, DTensor) else gradient).shape[0]
    torch.save(found, folder / f"found_{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
    dist.destroy_process_group()
