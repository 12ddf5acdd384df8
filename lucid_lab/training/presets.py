"""Named configurations. Each is a function, so that a variation is an argument: `paper_1b(attention="softmax")`.

Every preset takes `attention`, the name of an attention, and further fields of `LucidConfig`, which override its own.
"""

from typing import Any

from lucid_attention.models.decoder.configuration import LucidConfig, every

# Published shapes: a new model keeps the vocabulary of its preset whatever data it reads, since its cost depends on it.
OWN_VOCABULARY = ("gemma3_1b", "gemma3_4b", "qwen2_5_1_5b")


# Sizes of a preset, in this order.
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)


def tiny(attention: str | list[str] = "lucid", **overrides: Any) -> LucidConfig:
    """A model for tests and examples: two layers, trained in seconds."""
    sizes = (512, 64, 176, 2, 4, 2, 512)
    return _config(sizes, attention, overrides)


def small(attention: str | list[str] = "lucid", **overrides: Any) -> LucidConfig:
    """A model of the size of GPT-2, about 100M parameters."""
    sizes = (32_000, 768, 2048, 12, 12, 4, 2048)
    return _config(sizes, attention, overrides, tie_word_embeddings=True)


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
    sizes = (32_000, 2048, 5632, 22, 32, 4, 65_536)
    return _config(sizes, attention, overrides, head_dim=68, rope_theta=rope_theta)


def paper_16_layer(attention: str | list[str] = "lucid", **overrides: Any) -> LucidConfig:
    """The paper's model for longer contexts (appendix, ablations), trained at 4096 and 32 768 tokens.

    The paper gives 16 layers, model dimension 2048, feed-forward dimension 4096, a vocabulary of 256 000 and 32 heads
    of 64 features, also tried as 128 heads of 16 (`num_attention_heads=128, num_key_value_heads=128, head_dim=16`). It
    does not mention grouped heads, the kind of MLP or tied embeddings. This preset has no grouped heads, Llama's gated
    MLP, and untied embeddings.
    """
    sizes = (256_000, 2048, 4096, 16, 32, 32, 32_768)
    return _config(sizes, attention, overrides, head_dim=64)


def gemma3_1b(attention: str = "lucid", **overrides: Any) -> LucidConfig:
    """A model of the shape of Gemma 3 1B, for measuring costs: five layers with a window of 512, then one without.

    The shape and the mix of layers are Gemma's. The architecture is ours, with two norms per layer instead of four and
    without scaled embeddings, so Gemma's weights do not fit.

    Args:
        attention: the attention of the layers without a window.
        overrides: further fields of `LucidConfig`; `attention_options` by name are merged with those of the preset.
    """
    sizes = (262_144, 1152, 6912, 26, 4, 1, 32_768)
    return _gemma3(sizes, 512, attention, overrides)


def gemma3_4b(attention: str = "lucid", **overrides: Any) -> LucidConfig:
    """A model of the shape of the language model in Gemma 3 4B, with windows of 1024. Otherwise as `gemma3_1b`.

    Gemma stretches the positions of the layers without a window by 8 (linear scaling). This preset does not,
    since it changes no cost.
    """
    sizes = (262_208, 2560, 10_240, 34, 8, 4, 131_072)
    return _gemma3(sizes, 1024, attention, overrides)


def qwen2_5_1_5b(attention: str | list[str] = "lucid", **overrides: Any) -> LucidConfig:
    """Qwen 2.5 1.5B with another attention. Its weights load by name."""
    sizes = (151_936, 1536, 8960, 28, 12, 2, 131_072)
    return _config(
        sizes,
        attention,
        overrides,
        rope_theta=1_000_000.0,
        attention_bias="qkv",
        tie_word_embeddings=True,
        bos_token_id=151_643,
        eos_token_id=151_643,
    )


def _config(
    sizes: tuple[int, ...], attention: str | list[str], overrides: dict[str, Any], **fields: Any
) -> LucidConfig:
    return LucidConfig(**(dict(zip(SIZES, sizes, strict=True)) | fields | {"attention": attention} | overrides))


def _gemma3(sizes: tuple[int, ...], window: int, attention: str, overrides: dict[str, Any]) -> LucidConfig:
    overrides = dict(overrides)
    # Gemma's layers with a window have another rotary base than those without.
    options: dict[str, Any] = {"sliding": {"window": window, "rope_base": 10_000.0}}
    for name, given in overrides.pop("attention_options", {}).items():
        options[name] = options.get(name, {}) | given
    layers = every(6, attention, otherwise="sliding", layers=overrides.get("num_hidden_layers", sizes[3]))
    if "sliding" not in layers:
        options.pop("sliding")
    return _config(
        sizes,
        layers,
        overrides,
        attention_options=options,
        head_dim=256,
        hidden_act="gelu_pytorch_tanh",
        rope_theta=1_000_000.0,
        qk_norm=True,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
