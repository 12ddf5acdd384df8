"""One process of `test_decoder_parallel.py`: loads a checkpoint divided by heads, and saves what it computes.

torchrun --nproc-per-node 2 tensor_parallel_worker.py CHECKPOINT
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers.distributed import DistributedConfig

from lucid_attention.models.decoder.modeling import LucidForCausalLM


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    try:
        model = LucidForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_plan="auto"))
    except ValueError as error:
        (folder / f"error_{rank}.txt").write_text(str(error))
        return
    inputs = torch.load(folder / "inputs.pt")
    with torch.no_grad():
        logits = model(**inputs, use_cache=False).logits
        generated = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    loss = model(**inputs, labels=inputs["input_ids"]).loss
    loss.backward()
    k_proj = model.model.layers[0].self_attn.k_proj.weight
    found = {"logits": logits, "generated": generated, "loss": loss.detach(), "gradient": k_proj.grad.full_tensor()}
    found["rows"] = k_proj.to_local().shape[0]
    torch.save(found, folder / f"found_{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
