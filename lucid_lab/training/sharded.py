"""FSDP2: weights, gradients and optimiser state divided between processes.

This calls `torch.distributed.fsdp.fully_shard` directly: on a CPU, accelerate silently uses data parallelism instead.
State is saved in shards, as safetensors, which any number of processes can load.
"""

from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

FOLDER = "sharded"


def shard(model: PreTrainedModel) -> None:
    """Divide a model between all processes, in place. Each decoder layer is gathered when it computes."""
    mesh = init_device_mesh(model.device.type, (dist.get_world_size(),))
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def whole_weights(model: nn.Module) -> dict[str, Any]:
    """All weights on the first process; nothing on the others. Every process must call this."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def save_shards(model: nn.Module, optimizer: Optimizer, checkpoint: Path) -> None:
    """Save this process's part of weights and optimiser state. Every process must call this."""
    folder = checkpoint / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    _, _, tensors = _state(model, optimizer)
    dcp.save(tensors, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))


def load_shards(model: nn.Module, optimizer: Optimizer, checkpoint: Path) -> None:
    """Load this process's part of weights and optimiser state. The number of processes may have changed."""
    folder = checkpoint / FOLDER
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{checkpoint} holds no sharded state: it was saved without --parallel fsdp. Resume it without, or start "
            f"another run from its weights with --from {checkpoint} --out ANOTHER"
        )
    weights, state, tensors = _state(model, optimizer)
    dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)))
    set_model_state_dict(model, weights)
    for name, values in state["state"].items():
        for key in values:
            values[key] = tensors[f"optimizer.{name}.{key}"]
    set_optimizer_state_dict(model, optimizer, state)


def _state(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Weights, optimiser state, and a flat dictionary of the tensors of both."""
    weights: dict[str, Any] = get_model_state_dict(model)
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    tensors, seen = {}, set()
    for name, tensor in weights.items():
        # Tied weights are one tensor with two names: save it once.
        memory = (tensor.to_local().data_ptr(), tensor.shape) if isinstance(tensor, DTensor) else id(tensor)
        if memory not in seen or not tensor.numel():
            tensors[f"model.{name}"] = tensor
        seen.add(memory)
    for name, values in state["state"].items():
        tensors |= {f"optimizer.{name}.{key}": value for key, value in values.items()}
    return weights, state, tensors
