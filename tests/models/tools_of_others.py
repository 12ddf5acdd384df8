"""Checkpoints with a tokenizer for other tools, and the environment of their processes."""

import os
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lucid_attention import LucidConfig, LucidForCausalLM
from lucid_attention.models.checkpoint import load_model, load_tokenizer
from lucid_attention.models.convert import convert

ROOT = Path(__file__).parents[2]
WORDS = ["<pad>", "<bos>", "<eos>", "<unk>", *(f"w{i}" for i in range(60))]
# Repeated words have the same keys up to their positions, so that P is far from the identity.
PROMPT = " ".join(f"w{i % 5}" for i in range(24))
TEMPLATE = "<bos>{% for message in messages %} {{ message['content'] }}{% endfor %}"
NEW = 8
SIZES: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def write_checkpoints(folder: Path, *, auto_map: bool = False) -> dict[str, Path]:
    """The folders of a Llama, of its conversion, and of the own decoder with the same weights."""
    tokenizer = word_tokenizer()
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**SIZES))
    _sharpen(llama)
    # No special tokens in the answers, which tools leave out of their text.
    llama.lm_head.weight.data[:4] = 0
    own = LucidForCausalLM(LucidConfig(**SIZES, attention="lucid"))
    own.load_state_dict(llama.state_dict())
    folders = {name: folder / name for name in ("softmax", "dropin", "own")}
    saved = folder / "saved"
    for model, path in ((llama, folders["softmax"]), (own, saved if auto_map else folders["own"])):
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
    convert(folders["softmax"], folders["dropin"], layers=[1], auto_map=auto_map)
    if auto_map:
        convert(saved, folders["own"], auto_map=True)
    return folders


def word_tokenizer() -> Any:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, **special)


def _sharpen(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(8 if parameter.ndim == 2 else 1)


@torch.no_grad()
def answer(folder: Path, prompt: str = PROMPT) -> str:
    """What the model in the folder says, greedily, in this process."""
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    new = model.generate(ids, max_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :]
    return str(tokenizer.decode(new, skip_special_tokens=True))


def environment(**changes: str) -> dict[str, str]:
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return {**os.environ, **offline, "PYTHONPATH": paths, **changes}
