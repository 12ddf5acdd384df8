"""Tensor parallelism: every process has some of the heads, as in Transformers' Llama."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .configuration import LucidConfig

# Attentions whose weights are projections of heads, and norms that all heads share.
DIVISIBLE = ("lucid", "softmax", "sliding")


def tensor_parallel_plan(config: "LucidConfig") -> dict[str, str]:
    """How Transformers divides the weights of a `LucidModel`."""
    plan = {
        **{f"layers.*.self_attn.{name}_proj": "colwise" for name in ("q", "k", "v")},
        "layers.*.self_attn.o_proj": "rowwise",
        **{f"layers.*.mlp.{name}_proj": "colwise" for name in ("gate", "up")},
        "layers.*.mlp.down_proj": "rowwise",
    }
    if config.qk_norm:
        plan |= {f"layers.*.self_attn.{name}_norm": "replicated_with_grad_allreduce" for name in ("q", "k")}
    if "lucid" in config.layer_attentions and config.options_of("lucid").get("learn_beta"):
        plan["layers.*.self_attn.b_proj"] = "colwise"
    return plan


def check_divisible(config: "LucidConfig", processes: int) -> None:
    """Refuse weights that cannot be divided among so many processes."""
    others = [name for name in dict.fromkeys(config.layer_attentions) if name not in DIVISIBLE]
    if others:
        raise ValueError(
            f"tensor parallelism is possible with the attentions {', '.join(DIVISIBLE)}, got {', '.join(others)}, "
            "whose weights cannot be divided by heads. Divide the batch instead (DDP, FSDP)"
        )
    if "lucid" in config.layer_attentions and config.options_of("lucid").get("learn_sharpness"):
        raise ValueError("tensor parallelism needs a fixed sharpness, got attention_options with learn_sharpness=True")
    heads = config.num_key_value_heads
    if heads is None or heads % processes:
        raise ValueError(
            "tensor parallelism gives every process the same number of heads: expected num_key_value_heads to be a "
            f"multiple of {processes}, got {heads}"
        )
