"""Every attention has as many parameters as softmax attention of the same heads, so that comparisons are fair.

The paper compares whole models, so the parameters of a decoder layer count: attention and SwiGLU MLP (5632 for a width
of 2048). They differ by at most 2 % for heads of 64 features or more. Smaller heads are not tested: there rounding
decides.
"""

import pytest
import torch

from .contract import ATTENTIONS, every_name

# Width, query heads, key/value heads, head_dim.
SIZES = {
    "the paper's": (2048, 32, 4, 64),
    "the paper's, its head size": (2048, 32, 4, 68),
    "ungrouped": (2048, 32, 32, 64),
    "few wide heads": (2048, 8, 8, 256),
    "half as wide": (1024, 16, 4, 64),
    "half as wide, ungrouped": (1024, 16, 16, 64),
    "quarter": (512, 8, 2, 64),
    "quarter, ungrouped": (512, 4, 4, 128),
}


def parameters(name: str, size: tuple[int, int, int, int]) -> int:
    """The parameters of a decoder layer with two norms and an MLP."""
    width, heads, kv_heads, head_dim = size
    with torch.device("meta"):
        attention = ATTENTIONS[name](width, heads, num_kv_heads=kv_heads, head_dim=head_dim)
    return sum(each.numel() for each in attention.parameters()) + 3 * width * round(2.75 * width) + 2 * width


@every_name
@pytest.mark.parametrize("size", SIZES)
def test_a_layer_has_the_parameters_of_softmax_attention_within_two_percent(name: str, size: str) -> None:
    expected = parameters("softmax", SIZES[size])
    assert abs(parameters(name, SIZES[size]) / expected - 1) < 0.02


def test_published_sizes_are_the_defaults_where_they_match() -> None:
    """GLA's own expansions are 1/2 and 1; Gated DeltaNet's proportions are kept, at 4 instead of 6 matrices."""
    for name in ("gla", "gated_delta"):
        module = ATTENTIONS[name](64, 4)
        assert (module.head_dim, module.value_dim) == (8, 16)
    delta = ATTENTIONS["delta"](64, 4, num_kv_heads=2)
    assert (delta.head_dim, delta.value_dim) == (16, 16)
