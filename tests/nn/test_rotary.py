"""The rotary embedding against complex numbers: features i and i + D/2 are one number that is rotated."""

import pytest
import torch
from torch import Tensor

from lucid_attention.nn.rotary import Rotary

B, H, T, D = 2, 3, 7, 8


def turned(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """x times e^{i p θ_j}, in float64. x: [B, H, T, D], positions: [B, T]."""
    half = x.shape[-1] // 2
    numbers = torch.complex(x[..., :half].double(), x[..., half:].double())
    frequencies = torch.tensor([base ** (-j / half) for j in range(half)], dtype=torch.float64)
    angles = positions.double()[:, None, :, None] * frequencies
    numbers = numbers * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([numbers.real, numbers.imag], -1)


@pytest.mark.parametrize("base", [10_000.0, 500_000.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_features_are_turned_as_complex_numbers(dtype: torch.dtype, base: float) -> None:
    x = (torch.randn(B, H, T, D) + 1).to(dtype).requires_grad_()
    positions = torch.stack([torch.arange(T), torch.tensor([0, 5, 5, 9, 100, 3, 64])])
    expected = turned(x, positions, base)
    output = Rotary(D, base)(x, positions)
    assert output.dtype == dtype
    # Frequencies are float32: at position 100 an angle has an error of 100 · 2⁻²⁴, besides the rounding of the dtype.
    error = max(2e-5, 2 * torch.finfo(dtype).eps)
    torch.testing.assert_close(output.double(), expected, rtol=error, atol=error)
    weight = torch.randn_like(x)
    (dx,) = torch.autograd.grad((output * weight).sum(), x)
    torch.testing.assert_close(dx.double(), turned(weight, -positions, base), rtol=error, atol=error)
    assert not Rotary(D).state_dict()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_narrow_module_turns_by_the_same_angles(dtype: torch.dtype) -> None:
    x, positions = torch.randn(B, H, T, D), torch.arange(1000, 1000 + T)
    torch.testing.assert_close(Rotary(D).to(dtype)(x, positions), Rotary(D)(x, positions), rtol=1e-4, atol=1e-4)


def test_an_odd_head_dim_is_refused() -> None:
    with pytest.raises(ValueError, match=r"head_dim must be even.*got 5"):
        Rotary(5)
