"""A model that learns in seconds: embeddings, attention layers with or without MLPs, an output.

It is smaller than `LucidForCausalLM` and has the settings that controls need: no MLP, a token shift, embeddings of any
size.
"""

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lucid_attention.nn.attention import ATTENTIONS


class Shifted(nn.Module):
    """A projection that also sees the token before: y_t + s·y_{t−1}, with a learned s for every channel."""

    def __init__(self, projection: nn.Linear) -> None:
        super().__init__()
        self.projection = projection
        self.before = nn.Parameter(torch.zeros(projection.out_features))

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, T, width] -> [B, T, out]."""
        y: Tensor = self.projection(x)
        return y + self.before * F.pad(y, (0, 0, 1, -1))


class SmallLayer(nn.Module):
    """Attention and, if mlp > 0, an MLP, each after a norm and beside a residual."""

    def __init__(self, attention: nn.Module, width: int, mlp: float) -> None:
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(width), attention
        inner = round(mlp * width)
        self.mlp = (
            nn.Sequential(nn.RMSNorm(width), nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))
            if inner
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, T, width]."""
        o, _ = self.attention(self.norm(x))
        x = x + o
        return x if self.mlp is None else x + self.mlp(x)


class SmallModel(nn.Module):
    """Embeddings, layers of one attention, an output.

    tables: sizes of the embedding tables, one for every number in a token. answers: size of the output.
    attention: a name in ATTENTIONS. options: more arguments of its constructor.
    mlp: inner size of the MLPs over width, 0 for no MLP. token_shift: keys and values also see the token before.
    embedding_std: standard deviation of the embeddings at the start.
    """

    def __init__(
        self,
        tables: list[int],
        answers: int,
        *,
        attention: str,
        options: dict[str, Any],
        layers: int,
        width: int,
        heads: int,
        head_dim: int,
        rope: bool,
        mlp: float,
        token_shift: bool,
        embedding_std: float,
    ) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList([nn.Embedding(size, width) for size in tables])
        for table in self.embeddings:
            nn.init.normal_(table.weight, std=embedding_std)  # type: ignore[arg-type]
        variant, arguments = ATTENTIONS[attention], dict(options)
        if variant.takes_rotary:
            arguments["rope_base"] = 10_000.0 if rope else None
        numbered = "layer_index" in inspect.signature(variant).parameters
        self.layers = nn.ModuleList()
        for index in range(layers):
            if numbered:
                arguments["layer_index"] = index
            module = variant(width, heads, head_dim=head_dim, **arguments)
            if token_shift:
                for name in ("k_proj", "v_proj"):
                    setattr(module, name, Shifted(getattr(module, name)))
            self.layers.append(SmallLayer(module, width, mlp))
        self.norm = nn.RMSNorm(width)
        self.out = nn.Linear(width, answers)

    def hidden(self, inputs: Tensor) -> Tensor:
        """inputs: [B, T], or [B, T, tables] -> [B, T, width], normalised."""
        columns = inputs[..., None] if inputs.ndim == 2 else inputs
        x = sum(table(columns[..., i]) for i, table in enumerate(self.embeddings))
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.norm(x)
        return y

    def forward(self, inputs: Tensor) -> Tensor:
        """inputs: [B, T], or [B, T, tables] -> logits [B, T, answers]."""
        logits: Tensor = self.out(self.hidden(inputs))
        return logits
