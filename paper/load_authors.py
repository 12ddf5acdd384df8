"""A checkpoint of the authors' code as one of ours: python paper/load_authors.py THEIRS OUT [TEXT]

THEIRS: a folder with config.json and weights, of their LUCID or softmax model (a Llama with `attention_type`) or of
their LUCID-PaTH or PaTH (flash-linear-attention's). OUT: a folder that `lucid` and Transformers open.

Their P has an `eps` in its key norm (1e-5), ours has none: for keys of mean square m the diagonal of theirs is
exp(−√D · eps/(m + eps)) instead of 1. The largest deviation of all keys of TEXT (default: some of Python's docstrings)
is printed, and a model in which it exceeds 1 % is refused.
"""

import math
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from lucid_attention import LucidConfig, LucidForCausalLM
from lucid_attention.files import read_json
from lucid_lab.evals.haystacks import read_prose

LARGEST_DEVIATION = 0.01
KINDS = {"lucid": "lucid", "oglucid": "lucid", "llama": "softmax"}
# flash-linear-attention's names, and β's projection.
NAMES = (
    (r"\bmodel\.embeddings\.", "model.embed_tokens."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.mlp_norm\.", ".post_attention_layernorm."),
    (r"\.attn\.", ".self_attn."),
    (r"\.(bt_proj|beta_proj)\.", ".b_proj."),
    (r"\.w_conv1d\.weight$", ".w_conv.weight"),
)


def our_config(theirs: dict[str, Any]) -> LucidConfig:
    """Our configuration for theirs. What we do not have is refused."""
    for name in ("use_forget_gate", "use_qknorm", "use_qk_norm"):
        if theirs.get(name):
            raise ValueError(f"{name}=true has no counterpart here: expected false")
    if theirs.get("which_rmsnorm", "exp_k_norm") != "exp_k_norm":
        raise ValueError(f"which_rmsnorm must be exp_k_norm, got {theirs['which_rmsnorm']!r}")
    shared = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "tie_word_embeddings")
    ours = {name: theirs[name] for name in (*shared, "bos_token_id", "eos_token_id") if name in theirs}
    if theirs["model_type"].endswith("path_attn"):
        options = {
            "w_rank": 32 if theirs.get("use_low_rank_w", True) else None,
            "conv_size": 3 if theirs.get("use_w_shortconv", True) else None,
        }
        heads = theirs["num_heads"]
        return LucidConfig(
            **ours,
            attention="lucid_path" if theirs["model_type"].startswith("lucid") else "path",
            attention_options=options,
            num_attention_heads=heads,
            num_key_value_heads=theirs.get("num_kv_heads") or heads,
            head_dim=theirs["hidden_size"] // heads,
            rms_norm_eps=theirs.get("norm_eps", 1e-6),
            max_position_embeddings=theirs.get("max_position_embeddings", 2048),
        )
    kind = theirs.get("attention_type")
    if kind not in KINDS:
        raise ValueError(f"attention_type must be one of {', '.join(KINDS)}, got {kind!r}")
    beta = {"learn_beta": True, "double_beta": True} if theirs.get("use_beta") else {}
    more = ("num_attention_heads", "num_key_value_heads", "rms_norm_eps")
    ours |= {name: theirs[name] for name in more if name in theirs}
    return LucidConfig(
        **ours,
        attention=KINDS[kind],
        attention_options=beta,
        head_dim=theirs.get("head_dim"),
        max_position_embeddings=theirs["max_position_embeddings"],
        rope_theta=theirs.get("rope_theta", 10_000.0) if theirs.get("use_rope", True) else None,
    )


def our_name(name: str) -> str:
    for pattern, ours in NAMES:
        name = re.sub(pattern, ours, name)
    return name


def load(config: dict[str, Any], weights: dict[str, Tensor]) -> LucidForCausalLM:
    """Our model with their weights. Every weight of both has its counterpart, or it is an error."""
    model = LucidForCausalLM(our_config(config))
    ours = {our_name(name): weight for name, weight in weights.items()}
    ours = {name: weight.squeeze(1) if name.endswith("w_conv.weight") else weight for name, weight in ours.items()}
    model.load_state_dict(ours, strict=True)
    return model.eval()


@torch.no_grad()
def deviation(model: LucidForCausalLM, ids: Tensor, eps: float) -> float:
    """By how much at most a diagonal entry of their P is below 1, over all keys of a text: [1, T]."""
    D, smallest = model.config.head_dim, [math.inf]

    def note(module: nn.Module, inputs: Any, k: Tensor) -> None:
        squares = k.unflatten(-1, (-1, D)).double().square().mean(-1)
        smallest.append(squares.min().item())

    hooks = [layer.self_attn.k_proj.register_forward_hook(note) for layer in model.model.layers]
    model(ids)
    for hook in hooks:
        hook.remove()
    return 1 - math.exp(-math.sqrt(D) * eps / (min(smallest) + eps))


def read_weights(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
    for file in sorted(folder.glob("pytorch_model*.bin")):
        weights |= torch.load(file, weights_only=True)
    return weights


def main(theirs: Path, out: Path, text: str) -> None:
    config = read_json(theirs / "config.json")
    model = load(config, read_weights(theirs))
    tokenizer = AutoTokenizer.from_pretrained(theirs, trust_remote_code=False)
    ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=2048)["input_ids"]
    eps = config.get("rms_norm_eps", config.get("norm_eps", 1e-5))
    largest = deviation(model, ids, eps) if "lucid" in str(model.config.attention) else 0.0
    print(f"their eps = {eps:g} lowers the diagonal of P by at most {largest:.2g} on {ids.shape[1]} tokens")
    if largest > LARGEST_DEVIATION:
        raise SystemExit(f"refused: ours has no eps, and the difference would exceed {LARGEST_DEVIATION:g}")
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    default = " ".join(read_prose("prose").sentences[:200])
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]).read_text() if len(sys.argv) > 3 else default)
