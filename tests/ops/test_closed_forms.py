"""Cases whose answer is known without computing it the same way."""

import math

import pytest
import torch
import torch.nn.functional as F

from lucid_attention import lucid_attention, precondition

from .cases import shifted_keys


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("norm", ["key", "qk", "row_max"])
def test_one_token_stores_and_reads_its_own_value(norm):
    q, k, v = randn(2, 4, 1, 5), randn(2, 2, 1, 5), randn(2, 2, 1, 3)
    torch.testing.assert_close(precondition(k, v, norm=norm), v, rtol=0, atol=0)
    torch.testing.assert_close(lucid_attention(q, k, v, norm=norm), v.repeat_interleave(2, 1))


@pytest.mark.parametrize("norm", ["key", "qk", "row_max"])
@pytest.mark.parametrize("T", [2, 255, 600])
def test_identical_keys_store_differences_of_values(T, norm):
    k, v = randn(1, 2, 1, 5).expand(1, 2, T, 5), randn(1, 2, T, 3)
    expected = torch.cat([v[:, :, :1], v.diff(dim=2)], 2)
    torch.testing.assert_close(precondition(k, v, norm=norm), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["number", "tensor"])
def test_infinite_sharpness_is_softmax_attention(kind):
    q, k, v = randn(2, 6, 300, 64), shifted_keys(2, 2, 300, 64), randn(2, 2, 300, 48)
    sharpness = 1e5 if kind == "number" else torch.full((2,), 1e5, dtype=torch.float64)
    plain = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(lucid_attention(q, k, v, sharpness=sharpness), plain, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("degrees", "sharpness"), [(60, 1.0), (60, 4.0), (90, 2.0), (180, 0.5)], ids=lambda x: f"{x:g}"
)
def test_two_keys_at_a_known_angle_are_solved_by_hand(degrees, sharpness):
    angle = math.radians(degrees)
    k = torch.tensor([[3.0, 0.0], [0.2 * math.cos(angle), 0.2 * math.sin(angle)]], dtype=torch.float64)
    q, v = torch.tensor([[1.0, 2.0], [0.5, -1.0]], dtype=torch.float64), randn(2, 3)
    overlap = math.exp(sharpness * (math.cos(angle) - 1))
    y = torch.stack([v[0], v[1] - overlap * v[0]])
    torch.testing.assert_close(precondition(k[None, None], v[None, None], sharpness=sharpness)[0, 0], y)
    # The softmax sees the keys as they are, of lengths 3 and 0.2.
    first, second = (math.exp((q[1] @ key).item() / math.sqrt(2)) for key in k)
    read = torch.stack([y[0], (first * y[0] + second * y[1]) / (first + second)])
    o = lucid_attention(q[None, None], k[None, None], v[None, None], sharpness=sharpness)
    torch.testing.assert_close(o[0, 0], read)


def test_two_raw_keys_with_the_row_maximum_subtracted_are_solved_by_hand():
    # Scores k_i·k_j/√2 · … with c = 2 and D = 2 are plain inner products: row 1 has (2, 1), its maximum is 2.
    k = torch.tensor([[2.0, 0.0], [1.0, 0.0], [0.0, 3.0]], dtype=torch.float64)
    v = randn(3, 4)
    y0 = v[0]
    y1 = v[1] - y0
    y2 = v[2] - math.exp(-9) * (y0 + y1)
    y = precondition(k[None, None], v[None, None], norm="row_max", sharpness=2.0)[0, 0]
    torch.testing.assert_close(y, torch.stack([y0, y1, y2]))


def test_the_paper_s_matrix_comes_from_rms_normalised_keys():
    """exp(K_RN K_RNᵀ/√d − √d), lower triangular with a unit diagonal: equation (5)."""
    k, v = shifted_keys(1, 1, 40, 7), randn(1, 1, 40, 3)
    k_rn = F.rms_norm(k[0, 0], (7,), eps=0.0)
    P = (k_rn @ k_rn.T / math.sqrt(7) - math.sqrt(7)).exp().tril()
    torch.testing.assert_close(P.diagonal(), torch.ones(40, dtype=torch.float64))
    torch.testing.assert_close(P @ precondition(k, v)[0, 0], v[0, 0], rtol=1e-11, atol=1e-11)
