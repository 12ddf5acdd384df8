"""Which implementation runs. `"auto"` may choose; a named implementation is obeyed or refused, never replaced."""

from collections.abc import Callable

import torch

from . import triton_support

BLOCKWISE = ("blockwise", "reference")
BLOCKWISE_AND_TRITON = ("blockwise", "reference", "triton")
RECURRENT = ("chunkwise", "reference", "fla")


def choose(
    impl: str,
    available: tuple[str, ...] = BLOCKWISE,
    like: torch.Tensor | None = None,
    no_triton: str | None = None,
) -> str:
    """Return the implementation to run for `impl`, out of those of an operator.

    "auto" is the first or, on a GPU where the kernels have proven themselves, "triton" if the operator has it.

    like: the keys, for their device and dtype; needed if "triton" is available.
    no_triton: why the kernels cannot do what is asked here, whatever the device; None if they can.
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


def _with_triton(impl: str, auto: str, like: torch.Tensor, no_triton: str | None) -> str:
    if impl == "auto" and (like.device.type != "cuda" or not triton_support.proven(like.device)):
        return auto
    reason = no_triton or triton_support.unusable(like.device, like.dtype)
    if impl == "auto":
        return auto if reason else "triton"
    if reason:
        raise ValueError(
            f"impl='triton' cannot run: {reason}. "
            f"Expected 'auto', 'reference', {auto!r} ({auto!r} runs on every device)"
        )
    return impl


def decodes_by_triton(impl: str, device: torch.device, obstacle: Callable[[], str | None]) -> bool:
    """Whether Triton kernels take a decoding step: "triton" is obeyed or refused, "auto" asks for proof on a GPU.

    obstacle: why they cannot take it; None if they can.
    """
    if impl == "auto":
        return device.type == "cuda" and triton_support.proven(device) and obstacle() is None
    if impl != "triton":
        return False
    reason = obstacle()
    if reason:
        raise ValueError(f"impl='triton' cannot run: {reason}. Expected 'auto' or 'torch'")
    return True


def _listed(*names: str) -> str:
    return ", ".join(map(repr, names))
