"""LUCID as an attention backend of vLLM. Keys and y are in vLLM's own paged cache, in the places of keys and values."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
)

from ..models.preconditioner import LucidSettings, Preconditioner
from .paged import Batch, Cache, Step, attend

# The name in vLLM's table of backends.
NAME = "LUCID"


class LucidBackend(AttentionBackend):
    """Used for the layers with LUCID, whatever backend vLLM chooses for other layers."""

    # y of a token is needed to read it, so one call stores and reads.
    forward_includes_kv_cache_update = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto"]

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type["LucidImpl"]:
        return LucidImpl

    @staticmethod
    def get_builder_cls() -> type["LucidMetadataBuilder"]:
        return LucidMetadataBuilder

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False


@dataclass
class LucidMetadata(AttentionMetadata):
    """What the layers of one pass share."""

    batch: Batch


class LucidMetadataBuilder(AttentionMetadataBuilder[LucidMetadata]):
    """Takes from vLLM's description of a pass what `attend` reads."""

    # vLLM's is abstract.
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> LucidMetadata:
        common = common_attn_metadata
        if common.causal is not True:
            raise ValueError(f"LUCID attention is causal: expected causal=True of vLLM, got {common.causal}")
        borders = common.query_start_loc_cpu.tolist()
        # Rows without new tokens are padding.
        rows = [row for row in range(len(borders) - 1) if borders[row + 1] > borders[row]]
        lengths = common.seq_lens.tolist()
        chosen = torch.tensor(rows, device=common.block_table_tensor.device)
        batch = Batch(
            starts=[borders[row] for row in rows] + borders[-1:],
            lengths=[lengths[row] for row in rows],
            blocks=common.block_table_tensor[chosen].long(),
            slots=common.slot_mapping[: borders[-1]].long(),
        )
        return LucidMetadata(batch)


class LucidImpl(AttentionImpl):
    """softmax(q kᵀ · scale) P⁻¹v of one layer.

    settings: of LUCID; all other arguments are vLLM's.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: Any,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        *,
        settings: LucidSettings,
        **others: Any,
    ) -> None:
        expected = {
            "alibi_slopes": (alibi_slopes, None),
            "sliding_window": (sliding_window, None),
            "logits_soft_cap": (logits_soft_cap or None, None),
            "attn_type": (str(AttentionType(attn_type).value), "decoder"),
            "kv_sharing_target_layer_name": (kv_sharing_target_layer_name, None),
            "decode_context_parallel_size": (self.dcp_world_size, 1),
            "prefill_context_parallel_size": (self.pcp_world_size, 1),
            "kv_cache_dtype": (kv_cache_dtype, "auto"),
            **{name: (value, None) for name, value in others.items()},
        }
        for name, (given, allowed) in expected.items():
            if given != allowed:
                raise ValueError(f"LUCID attention in vLLM needs {name} = {allowed!r}, got {given!r}")
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads
        self.scale, self.kv_cache_dtype = float(scale), kv_cache_dtype
        # Wide, although vLLM makes tensors of the type of the weights.
        self.lucid = Preconditioner(num_kv_heads, head_size, settings).float()
        self.lucid.set_values(settings)
        # What only a checkpoint can say.
        self.missing = {"center", "matrix"} & set(self.lucid.state_dict())
        # 1/‖u‖ of the keys that P is made of, for every place of the cache: [blocks, H, block size].
        self.inverse_norms = torch.empty(0)

    def set_value(self, name: str, x: Tensor) -> None:
        """Take a value of a checkpoint: a tensor of `Preconditioner`."""
        if name not in self.lucid.state_dict():
            raise ValueError(f"the configuration says {self.lucid}, and the checkpoint has {name!r}")
        self.lucid.load_state_dict({name: x}, strict=False)
        self.missing.discard(name)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: LucidMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query, output: [T, H·G, D]; key, value: [T, H, D]; kv_cache: [blocks, H, block size, 2·D]."""
        if output_scale is not None or output_block_scale is not None:
            raise ValueError("LUCID attention in vLLM has no quantized output: expected no output scale, got one")
        if attn_metadata is None:
            # vLLM measures memory or compiles. Nobody reads the result.
            return output.zero_()
        batch = attn_metadata.batch
        T = batch.starts[-1]
        if self.inverse_norms.shape != kv_cache.shape[:3]:
            self.inverse_norms = kv_cache.new_full(kv_cache.shape[:3], torch.nan, dtype=torch.float32)
        new, cache, lucid = (query[:T], key[:T], value[:T], output[:T]), Cache(kv_cache, self.inverse_norms), self.lucid
        attend(Step(*new, cache, batch, lucid.to(query.device), self.scale))
        return output
