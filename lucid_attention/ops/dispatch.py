"""Which implementation runs. `"auto"` may choose; a named implementation is obeyed or refused, never replaced.

Compilers for GPUs have been wrong for kernels like ours on single architectures. So "auto" uses the Triton kernels only
where `lucid doctor` has proved them: it checks them on the device and writes a proof, which holds for this device and
these versions of torch, Triton and this package. Importing this module does not import Triton.

    LUCID_ATTENTION_IMPL=blockwise     "auto" never uses the Triton kernels
    LUCID_ATTENTION_CACHE=FOLDER       folder of the proofs, instead of ~/.cache/lucid_attention
"""

import hashlib
import json
import os
import warnings
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

BLOCKWISE = ("blockwise", "reference")
BLOCKWISE_AND_TRITON = ("blockwise", "reference", "triton")
RECURRENT = ("chunkwise", "reference", "fla")

SWITCH, FOLDER = "LUCID_ATTENTION_IMPL", "LUCID_ATTENTION_CACHE"
# Triton reads it when a kernel is defined, so it is set before the process starts.
INTERPRETER = "TRITON_INTERPRET"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGEST_HEAD = 256
# Below it there is no bfloat16 and no asynchronous copy; nothing was compiled for it.
OLDEST_CUDA = (8, 0)
# The kernels were compiled for no other device of AMD, and by no older Triton: 3.3 has no products in bf16x3.
HIP_DEVICES = ("gfx942",)
OLDEST_TRITON = (3, 9)


def choose(
    impl: str, available: tuple[str, ...] = BLOCKWISE, like: Tensor | None = None, no_triton: str | None = None
) -> str:
    """Return the implementation to run for `impl`, out of those of an operator.

    "auto" is the first or, on a GPU where the kernels are proved, "triton" if the operator has it.

    like: the keys, for their device and dtype; needed if "triton" is available.
    no_triton: why the kernels cannot do this on any device; None if they can.
    """
    auto, *others = available
    if "triton" in available and impl in ("auto", "triton"):
        assert like is not None
        return _with_triton(impl, auto, like, no_triton)
    if impl == "auto":
        return auto
    if impl == "triton":
        raise ValueError(
            "impl='triton' cannot run: this operator has no Triton kernels. "
            f"Expected {_listed('auto', *others, auto)} ({auto!r} runs on every device)"
        )
    if impl not in available:
        raise ValueError(f"impl must be one of {_listed('auto', *others, auto)}, got {impl!r}")
    return impl


def _with_triton(impl: str, auto: str, like: Tensor, no_triton: str | None) -> str:
    if impl == "auto" and (like.device.type != "cuda" or not proven(like.device)):
        return auto
    reason = no_triton or unusable(like.device, like.dtype)
    if impl == "auto":
        return auto if reason else "triton"
    if reason:
        raise ValueError(
            f"impl='triton' cannot run: {reason}. "
            f"Expected 'auto', 'reference', {auto!r} ({auto!r} runs on every device)"
        )
    return impl


def decodes_by_triton(impl: str, device: torch.device, obstacle: Callable[[], str | None]) -> bool:
    """Whether Triton kernels take a decoding step: "triton" is obeyed or refused, "auto" needs a proof on a GPU.

    obstacle: why they cannot take it; None if they can.
    """
    if impl == "auto":
        return device.type == "cuda" and proven(device) and obstacle() is None
    if impl != "triton":
        return False
    reason = obstacle()
    if reason:
        raise ValueError(f"impl='triton' cannot run: {reason}. Expected 'auto' or 'torch'")
    return True


def _listed(*names: str) -> str:
    return ", ".join(map(repr, names))


def kernel_obstacle(D: int, E: int, **tensors: Tensor | None) -> str | None:
    """Why Triton kernels cannot take these head sizes, or tensors of these dtypes, on any device; None if they can."""
    for name, x in tensors.items():
        if x is not None and x.dtype not in DTYPES:
            return f"it is for bfloat16, float16 and float32, got {name} in {x.dtype}"
    for letter, size in (("D", D), ("E", E)):
        if size > LARGEST_HEAD:
            return f"it is for head sizes up to {LARGEST_HEAD}, got {letter} = {size}"
    return None


def step_obstacle(k: Tensor, **tensors: Tensor) -> str | None:
    """Why Triton kernels cannot take a decoding step of k, and `tensors` q, v and y_past; None if they can."""
    for name, x in tensors.items():
        if x.dtype != k.dtype:
            return f"it needs one dtype: expected {name} in {k.dtype}, got {x.dtype}"
    return kernel_obstacle(k.shape[3], tensors["v"].shape[3]) or unusable(k.device, k.dtype)


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
    release = package_version("triton")
    if release[:1].isdigit() and tuple(int(number) for number in release.split(".")[:2]) < OLDEST_TRITON:
        return "it needs Triton {}.{} or newer, got {}".format(*OLDEST_TRITON, release)
    if interpreted():
        return None
    if device.type != "cuda":
        return f"it is for CUDA and ROCm devices, got tensors on {device.type}"
    if torch.version.hip:
        name = torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
        return None if name in HIP_DEVICES else f"it is for {', '.join(HIP_DEVICES)}, got {name}"
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_CUDA:
        return "it needs compute capability {}.{}, got {}.{}".format(*OLDEST_CUDA, *capability)
    return None


def switched_off() -> bool:
    """Whether the user has disabled the kernels for "auto"."""
    value = os.environ.get(SWITCH, "")
    if value not in ("", "auto", "blockwise"):
        raise ValueError(f"{SWITCH} must be 'blockwise' (no Triton kernels for impl='auto') or unset, got {value!r}")
    return value == "blockwise"


def proven(device: torch.device) -> bool:
    """Whether "auto" may use the Triton kernels on this GPU. Warns once where it may not."""
    if switched_off() or not torch.cuda.is_available():
        return False
    return _proven(torch.cuda.current_device() if device.index is None else device.index)


# What `torch.compiler.assume_constant_result` does, without its import of the whole compiler.
proven._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _proven(index: int) -> bool:
    reason = unproven(torch.device("cuda", index))
    if reason:
        warnings.warn(
            f"lucid_attention: impl='auto' does not use the Triton kernels on cuda:{index}: {reason} "
            f"(impl='triton' uses them anyway; {SWITCH}=blockwise silences this)",
            stacklevel=2,
        )
    return reason is None


def unproven(device: torch.device) -> str | None:
    """Why "auto" does not use the Triton kernels on a GPU; None if there is a proof for it and these versions."""
    if reason := unusable(device, torch.float32):
        return reason
    try:
        proof = json.loads(proof_file(device).read_text())
    except (OSError, ValueError):
        proof = None
    if not isinstance(proof, dict) or any(proof.get(name) != x for name, x in proof_identity(device).items()):
        return "they are not proved on this device and these versions yet. Run `lucid doctor` once"
    return None if proof.get("passed") is True else f"they failed in `lucid doctor`: {proof.get('about')}"


def proof_identity(device: torch.device) -> dict[str, str]:
    """What a proof is for."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    versions = {package: package_version(package) for package in ("triton", "lucid-attention")}
    return {"device": name, "torch": torch.__version__, **versions}


def proof_file(device: torch.device) -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    folder = Path(os.environ.get(FOLDER) or home / "lucid_attention")
    key = hashlib.sha256(json.dumps(proof_identity(device), sort_keys=True).encode()).hexdigest()[:16]
    return folder / f"kernels_{key}.json"


def package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
