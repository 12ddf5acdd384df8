"""Whether Triton kernels can run for given tensors, and whether `impl="auto"` may use them there.

`unusable` gives the reason for which `impl="triton"` is refused. `proven` is asked by `impl="auto"` only. Importing
this module does not import Triton.
"""

import os
from importlib.util import find_spec

import torch

# Triton reads it when a kernel is defined, so it is set before the process starts.
INTERPRETER = "TRITON_INTERPRET"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Below it there is no bfloat16 and no asynchronous copy; nothing was compiled for it.
OLDEST_CUDA = (8, 0)


def interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter in this process: on CPUs, slowly, for tests."""
    return os.environ.get(INTERPRETER, "0").lower() in ("1", "true", "yes", "on", "y")


def installed() -> bool:
    return find_spec("triton") is not None


def unusable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why Triton kernels cannot run for tensors of this device and dtype; None if they can."""
    if dtype not in DTYPES:
        return f"it is for bfloat16, float16 and float32, got {dtype}"
    if not installed():
        return "Triton is not installed (torch's wheels for CUDA and ROCm bring it)"
    if interpreted():
        return None
    if device.type != "cuda":
        return f"it is for CUDA and ROCm devices, got tensors on {device.type}"
    return None if torch.version.hip else _too_old(device)


def _too_old(device: torch.device) -> str | None:
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_CUDA:
        return "it needs compute capability {}.{}, got {}.{}".format(*OLDEST_CUDA, *capability)
    return None


def proven(device: torch.device) -> bool:
    """Whether the kernels have passed their self-check on this device, so that "auto" may choose them."""
    # Imported here: it imports every operator.
    from . import proof

    return proof.holds(device)


# What `torch.compiler.assume_constant_result` does, without its import of the whole compiler.
proven._dynamo_marked_constant = True  # type: ignore[attr-defined]
