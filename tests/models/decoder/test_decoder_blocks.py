"""Blocks of tokens that see each other in the own decoder: block diffusion."""

from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from lucid_attention import LucidForCausalLM
from lucid_lab.training.presets import tiny


@torch.no_grad()
def test_a_decoder_with_blocks_denoises_block_by_block_on_its_cache(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = LucidForCausalLM(tiny(attention_options={"block": 8, "sharpness": 1.5})).double().eval()
    ids = torch.randint(3, 12, (2, 28))
    whole = model(ids).logits
    changed = ids.clone()
    changed[:, 15] += 20
    differs = (model(changed).logits != whole).any(-1).all(0)
    assert differs.tolist() == [False] * 8 + [True] * 20
    cache = DynamicCache(config=model.config)
    for start in range(0, 28, 8):
        block = ids[:, start : start + 8]
        # A guess of the running block is taken back; its last visit is final.
        model(torch.full_like(block, 2), past_key_values=cache)
        cache.crop(-block.shape[1])
        torch.testing.assert_close(model(block, past_key_values=cache).logits, whole[:, start : start + 8])
    mask = torch.ones_like(ids)
    mask[1, 19:] = 0
    torch.testing.assert_close(model(ids, attention_mask=mask).logits[1, :19], model(ids[1:, :19]).logits[0])
    model.save_pretrained(tmp_path)
    again = LucidForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, trust_remote_code=False)
    assert torch.equal(again(ids).logits, whole)


def test_single_tokens_of_blocks_are_refused() -> None:
    model, ids = LucidForCausalLM(tiny(attention_options={"block": 8})).eval(), torch.randint(3, 12, (1, 24))
    with pytest.raises(ValueError, match="past must end at a border of blocks"):
        model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
