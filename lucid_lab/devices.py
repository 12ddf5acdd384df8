"""Devices by the names of --device."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# The kinds of accelerators that "auto" looks for, in this order.
ACCELERATORS = ("cuda", "xpu", "mps")


def find_device(name: str) -> "torch.device":
    """The device of this name, tried with a small tensor; "auto" for an accelerator of this machine, else its CPU."""
    import torch

    if name == "auto":
        available = [kind for kind in ACCELERATORS if hasattr(torch, kind) and getattr(torch, kind).is_available()]
        return torch.device(available[0] if available else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).tolist()
    # Torch has no common class: a wrong name is a RuntimeError, a missing driver an AssertionError.
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"--device must be auto, cpu, or an accelerator of this machine, such as cuda or cuda:1, got {name!r}: "
            f"{reason:.200}"
        ) from error
    return device
