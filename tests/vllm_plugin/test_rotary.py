"""The rotary embeddings of our decoder and of vLLM are the same, for every rope_type that is served."""

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from lucid_attention import LucidConfig
from lucid_attention.models.decoder.rotary import make_rotary
from lucid_attention.vllm.configs import ROPE_TYPES

HEADS, D, LENGTH, T = 3, 32, 512, 300
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
FIELDS = {
    "default": {"partial_rotary_factor": 0.5},
    "linear": {"factor": 3.0},
    "llama3": LLAMA3,
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
}


@pytest.mark.parametrize("rope_type", ROPE_TYPES)
def test_positions_turn_queries_as_in_our_decoder(rope_type: str) -> None:
    parameters = {"rope_type": rope_type, "rope_theta": 5000.0, **FIELDS[rope_type]}
    config = LucidConfig(max_position_embeddings=LENGTH, rope_parameters=parameters)
    ours = make_rotary(D, config)
    q, positions = torch.randn(T, HEADS, D), torch.arange(T)
    with set_current_vllm_config(VllmConfig()):
        theirs = get_rope(D, max_position=LENGTH, rope_parameters=parameters, is_neox_style=True)
    found = theirs.forward_native(positions, q.flatten(1).clone(), q.flatten(1).clone())[0].view(T, HEADS, D)
    expected = ours(q.transpose(0, 1)[None], positions)[0].transpose(0, 1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    plain = make_rotary(D, LucidConfig(rope_theta=5000.0))(q.transpose(0, 1)[None], positions)[0].transpose(0, 1)
    assert not torch.allclose(found, plain, atol=1e-2)
