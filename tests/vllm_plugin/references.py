"""Write tiny checkpoints, and the tokens that generate() of this package chooses, into the folder that is given.

Runs in the environment of the package, whose Transformers is newer than vLLM's: python references.py FOLDER
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from lucid_attention import LucidConfig, LucidForCausalLM, enable_lucid
from lucid_attention.models.convert import as_dropin

WORDS = ["<pad>", "<bos>", "<eos>", "<unk>", *(f"w{i}" for i in range(93))]
TEMPLATE = "<bos>{% for message in messages %} {{ message['content'] }}{% endfor %}"
NEW = 12
# A top logit must lead by this much: then another order of sums in float32 chooses the same token.
MARGIN = 1e-3
SHAPE: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    # The smallest that vLLM's own attention on CPUs has.
    "head_dim": 32,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}
# Configuration, its fields, and the arguments of enable_lucid.
DROPINS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}, {"center": "calibrated", "whiten": True}),
    "qwen2": ("Qwen2Config", {"hidden_size": 128}, {}),
    "qwen3": ("Qwen3Config", {"rms_norm_eps": 1e-5}, {"layers": [0, 2], "sharpness": 3.0}),
    "mistral": ("MistralConfig", {"sliding_window": None}, {"learned": ["strength", "sharpness"]}),
    "gemma3": (
        "Gemma3TextConfig",
        {"query_pre_attn_scalar": 3, "tie_word_embeddings": True, **WINDOWS},
        {"sharpness": 1.0},
    ),
}
DECODERS: dict[str, dict[str, Any]] = {
    "decoder": {"attention": "lucid", "attention_options": {"sharpness": 4.0}, "attention_bias": True},
    "decoder_mixed": {
        "attention": ["lucid", "softmax", "lucid"],
        "attention_options": {"lucid": {"strength": 0.8, "center": "learned", "whiten": True, "learn_sharpness": True}},
        "qk_norm": True,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0},
        "tie_word_embeddings": True,
    },
}
PLAIN = "plain"


def prompts() -> list[list[int]]:
    """Prompts of many lengths. Repeated tokens have the same keys up to their positions, so P is far from I."""
    numbers = torch.Generator().manual_seed(0)
    found = []
    for length in (1, 2, 7, 20, 33, 64, 90, 150):
        few = torch.randint(4, len(WORDS), (5,), generator=numbers)
        found.append(few[torch.randint(5, (length,), generator=numbers)].tolist())
    # The beginning of another one, and itself again: what a cache of prefixes finds. The last one is of a chat.
    return [*found, found[-1][:100], [*found[-1][:80], 5, 6, 7], found[-1], [1, *found[3]]]


def sharpen(model: Any, scale: float) -> None:
    """Similar keys, and logits that are far apart."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2:
                weight.mul_(scale)
            elif name.endswith("bias"):
                weight.normal_()
        model.get_input_embeddings().weight.add_(0.05)
        # No special tokens, which servers leave out of their text.
        model.get_output_embeddings().weight[:4] = 0


def scatter(model: Any) -> None:
    """Another map of the keys, sharpness and strength in every head, where the settings let heads differ."""
    numbers = torch.Generator().manual_seed(1)
    for name, x in model.state_dict().items():
        kind = name.rpartition(".")[2]
        if kind in ("center", "matrix", "key_center", "key_matrix"):
            x.add_(0.3 * torch.randn(x.shape, generator=numbers))
        elif kind == "log_sharpness":
            x.add_(0.5 * torch.rand(x.shape, generator=numbers))
    for name, x in model.named_parameters():
        if name.endswith((".strength", ".sharpness")):
            x.data.mul_(0.3 + 0.7 * torch.rand(x.shape, generator=numbers))


def answers(model: Any) -> tuple[list[list[int]], float]:
    """The new tokens for every prompt alone, and the smallest lead of a chosen token over the next one."""
    found, leads = [], []
    for prompt in prompts():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NEW,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        found.append(out.sequences[0, len(prompt) :].tolist())
        best = torch.stack(out.logits).topk(2).values
        leads.append(float((best[..., 0] - best[..., 1]).min()))
    return found, min(leads)


def dropin(name: str, seed: int) -> tuple[Any, Any]:
    """A plain model, and the same with LUCID."""
    kind, fields, settings = DROPINS[name]
    pair = []
    for _ in range(2):
        config = getattr(transformers, kind)(**{**SHAPE, **fields})
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        sharpen(model, 6.0)
        pair.append(model.eval())
    enable_lucid(pair[1], **settings)
    scatter(pair[1])
    return pair[0], pair[1]


def decoder(name: str, seed: int) -> tuple[Any, Any]:
    """Our decoder as `lucid convert` writes it for vLLM, with softmax attention in every layer and with its own."""
    pair = []
    for fields in ({**DECODERS[name], "attention": "softmax", "attention_options": {}}, DECODERS[name]):
        torch.manual_seed(seed)
        model = LucidForCausalLM(LucidConfig(**{**SHAPE, **fields}))
        sharpen(model, 6.0)
        scatter(model)
        pair.append(as_dropin(model.eval()))
    return pair[0], pair[1]


def write(folder: Path) -> None:
    """All checkpoints, and references.json with the expected tokens."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, chat_template=TEMPLATE, **special)
    expected = {}
    for name in [*DROPINS, *DECODERS]:
        for seed in range(20):
            softmax, model = dropin(name, seed) if name in DROPINS else decoder(name, seed)
            found, lead = answers(model)
            plain = answers(softmax)
            if min(lead, plain[1]) > MARGIN:
                break
        else:
            raise RuntimeError(f"{name}: no seed whose tokens are chosen with a lead of {MARGIN}")
        for each, place in ((model, name), (softmax, PLAIN))[: 2 if name == "llama" else 1]:
            each.save_pretrained(folder / place)
            tokenizer.save_pretrained(folder / place)
        expected[name] = {"prompts": prompts(), "tokens": found, "softmax": plain[0], "lead": lead, "seed": seed}
    (folder / "references.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
