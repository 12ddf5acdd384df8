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
    x = (torch.randn(B, H, T, D) + 1).to(dtype)
    positions = torch.stack([torch.arange(T), torch.tensor([0, 5, 5, 9, 100, 3, 64])])
    expected = turned(x, positions, base)
    output = Rotary(D, base)(x, positions)
    assert output.dtype == dtype
    # Frequencies are float32: at position 100 an angle has an error of 100 · 2⁻²⁴, beside the rounding of the dtype.
    error = max(2e-5, 2 * torch.finfo(dtype).eps)
    torch.testing.assert_close(output.double(), expected, rtol=error, atol=error)


def test_one_row_of_positions_serves_the_whole_batch() -> None:
    x, positions = torch.randn(B, H, T, D), torch.arange(3, 3 + T)
    rotary = Rotary(D)
    torch.testing.assert_close(rotary(x, positions), rotary(x, positions.expand(B, T)), rtol=0, atol=0)


def test_scores_depend_on_the_distance_of_positions_only() -> None:
    q, k, positions = torch.randn(B, H, T, D) + 1, torch.randn(B, H, T, D) + 1, torch.arange(T)
    rotary = Rotary(D)
    near = rotary(q, positions) @ rotary(k, positions).mT
    far = rotary(q, positions + 40) @ rotary(k, positions + 40).mT
    torch.testing.assert_close(far, near, rtol=1e-4, atol=1e-4)
    other = rotary(q, positions + 1) @ rotary(k, positions).mT
    assert (other - near).abs().max() > 0.1


def test_the_first_position_is_not_turned_and_lengths_are_kept() -> None:
    x = torch.randn(B, H, T, D) + 1
    output = Rotary(D)(x, torch.arange(T))
    torch.testing.assert_close(output[:, :, 0], x[:, :, 0], rtol=0, atol=0)
    torch.testing.assert_close(output.norm(dim=-1), x.norm(dim=-1))
    assert (output[:, :, 1:] - x[:, :, 1:]).abs().max() > 0.1


def test_gradients_are_turned_back() -> None:
    x, positions = torch.randn(B, H, T, D, dtype=torch.float64, requires_grad=True), torch.arange(T)
    weight = torch.randn(B, H, T, D, dtype=torch.float64)
    (dx,) = torch.autograd.grad((Rotary(D)(x, positions) * weight).sum(), x)
    torch.testing.assert_close(dx, turned(weight, -positions.expand(B, T), 10_000.0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_narrow_module_turns_by_the_same_angles(dtype: torch.dtype) -> None:
    x, positions = torch.randn(B, H, T, D), torch.arange(1000, 1000 + T)
    torch.testing.assert_close(Rotary(D).to(dtype)(x, positions), Rotary(D)(x, positions), rtol=1e-4, atol=1e-4)


def test_a_module_built_on_the_meta_device_turns_as_soon_as_it_has_memory() -> None:
    x, positions = torch.randn(B, H, T, D), torch.arange(T)
    with torch.device("meta"):
        rotary = Rotary(D)
    torch.testing.assert_close(rotary.to_empty(device="cpu")(x, positions), Rotary(D)(x, positions))


def test_an_odd_head_dim_is_refused() -> None:
    with pytest.raises(ValueError, match=r"head_dim must be even.*got 5"):
        Rotary(5)


def test_it_holds_no_state() -> None:
    assert not Rotary(D).state_dict()
    assert not list(Rotary(D).parameters())
