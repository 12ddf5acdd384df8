"""Kernels that may use all registers of a program.

NVIDIA's compiler rather spills a few bytes than let fewer programs run at once. For the kernels below it would, in some
variant: they are compiled without regard to other programs. `tools/gpu_offline.py` finds them and writes the table.
"""

import torch
import triton

from .triton_tiles import architecture

ALL = 255
SPILLING: dict[str, list[str]] = {
    "sm_80": [
        "path_apply_kernel",
        "path_step_split_kernel",
    ],
    "sm_89": [
        "key_gradient_kernel",
        "pack_keys_kernel",
        "path_pull_kernel",
        "path_step_split_kernel",
        "project_kernel",
    ],
    "sm_90": [
        "path_attend_kernel",
        "path_pull_kernel",
        "path_step_split_kernel",
    ],
    "sm_100": [
        "key_gradient_kernel",
        "path_apply_kernel",
        "path_pull_kernel",
        "path_step_split_kernel",
    ],
    "sm_120": [
        "path_apply_kernel",
        "path_attend_kernel",
        "path_pull_kernel",
        "path_step_prepare_kernel",
        "path_step_split_kernel",
        "step_split_kernel",
        "update_kernel",
    ],
}


def registers(kernel: triton.JITFunction, device: torch.device) -> dict[str, int]:
    """What a launch of a kernel says about registers."""
    names = SPILLING.get(architecture(device), [])
    return {"maxnreg": ALL} if names and kernel.__name__ in names else {}
