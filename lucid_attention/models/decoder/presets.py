"""Named configurations. Each is a function, so that a variation is an argument: `paper_1b(attention="softmax")`.

Every preset takes `attention`, the name of an attention, and further fields of `LucidConfig`, which override its own.
"""

from typing import Any

from .configuration import LucidConfig, every

# Published shapes: a new model keeps the vocabulary of its preset whatever data it reads, since its cost depends on it.
OWN_VOCABULARY = ("gemma3_1b", "gemma3_4b", "qwen2_5_1_5b")


def tiny(attention: str | list[str] = "lucid", **overrides: Any) -> LucidConfig:
    """A model for tests and examples: two layers, trained in seconds."""
    shape = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    return _config(shape, attention, overrides)


def small(attention: str | list[str] = "lucid", **overrides: Any) -> LucidConfig:
    """A model of the size of GPT-2, about 100M parameters."""
    shape = {
        "vocab_size": 32_000,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    }
    return _config(shape, attention, overrides)


def paper_1b(
    attention: str | list[str] = "lucid", rope_theta: float | None = 10_000.0, **overrides: Any
) -> LucidConfig:
    """The paper's model of section 4.1, 1.11B parameters with softmax or LUCID attention.

    The heads of every attention have 68 features, although 32 · 68 ≠ 2048.

    Args:
        attention: as in `LucidConfig`.
        rope_theta: 10 000 for training at 2048 tokens, 64 000 for tuning at 65 536.
        overrides: further fields of `LucidConfig`.
    """
    shape = {
        "vocab_size": 32_000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 68,
        "rope_theta": rope_theta,
        "max_position_embeddings": 65_536,
    }
    return _config(shape, attention, overrides)


def paper_16_layer(attention: str | list[str] = "lucid", **overrides: Any) -> LucidConfig:
    """The paper's model for longer contexts (appendix, ablations), trained at 4096 and 32 768 tokens.

    The paper gives 16 layers, model dimension 2048, feed-forward dimension 4096, a vocabulary of 256 000 and 32 heads
    of 64 features, also tried as 128 heads of 16 (`num_attention_heads=128, num_key_value_heads=128, head_dim=16`). It
    does not mention grouped heads, the kind of MLP or tied embeddings. This preset has no grouped heads, Llama's gated
    MLP, and untied embeddings.
    """
    shape = {
        "vocab_size": 256_000,
        "hidden_size": 2048,
        "intermediate_size": 4096,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 64,
        "max_position_embeddings": 32_768,
    }
    return _config(shape, attention, overrides)


def gemma3_1b(attention: str = "lucid", **overrides: Any) -> LucidConfig:
    """A model of the shape of Gemma 3 1B, for measuring costs: five layers with a window of 512, then one without.

    The shape and the mix of layers are Gemma's. The architecture is ours, with two norms per layer instead of four and
    without scaled embeddings, so Gemma's weights do not fit.

    Args:
        attention: the attention of the layers without a window.
        overrides: further fields of `LucidConfig`; `attention_options` by name are merged with those of the preset.
    """
    shape = {
        "vocab_size": 262_144,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32_768,
    }
    return _gemma3(shape, 512, attention, overrides)


def gemma3_4b(attention: str = "lucid", **overrides: Any) -> LucidConfig:
    """A model of the shape of the language model in Gemma 3 4B, with windows of 1024. Otherwise as `gemma3_1b`.

    Gemma stretches the positions of the layers without a window by 8 (linear scaling). This preset does not,
    since it changes no cost.
    """
    shape = {
        "vocab_size": 262_208,
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
    }
    return _gemma3(shape, 1024, attention, overrides)


def qwen2_5_1_5b(attention: str | list[str] = "lucid", **overrides: Any) -> LucidConfig:
    """Qwen 2.5 1.5B with another attention. Its weights load by name."""
    shape = {
        "vocab_size": 151_936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "max_position_embeddings": 131_072,
        "rope_theta": 1_000_000.0,
        "attention_bias": "qkv",
        "tie_word_embeddings": True,
        "bos_token_id": 151_643,
        "eos_token_id": 151_643,
    }
    return _config(shape, attention, overrides)


def _config(shape: dict[str, Any], attention: str | list[str], overrides: dict[str, Any]) -> LucidConfig:
    return LucidConfig(**(shape | {"attention": attention} | overrides))


def _gemma3(shape: dict[str, Any], window: int, attention: str, overrides: dict[str, Any]) -> LucidConfig:
    overrides = dict(overrides)
    # Gemma's layers with a window have another rotary base than those without.
    options: dict[str, Any] = {"sliding": {"window": window, "rope_base": 10_000.0}}
    for name, given in overrides.pop("attention_options", {}).items():
        options[name] = options.get(name, {}) | given
    common = {
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "rope_theta": 1_000_000.0,
        "qk_norm": True,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    }
    shape = shape | common | overrides
    layers = every(6, attention, otherwise="sliding", layers=shape["num_hidden_layers"])
    if "sliding" not in layers:
        options.pop("sliding")
    return LucidConfig(**({"attention": layers, "attention_options": options} | shape))
