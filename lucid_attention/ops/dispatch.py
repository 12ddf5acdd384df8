"""Which implementation runs. `"auto"` may choose; a named implementation is obeyed or refused, never replaced."""

BLOCKWISE = ("blockwise", "reference")
RECURRENT = ("chunkwise", "reference", "fla")


def choose(impl: str, available: tuple[str, ...] = BLOCKWISE) -> str:
    """Return the implementation to run for `impl`, out of those of an operator: "auto" is the first."""
    auto, *others = available
    if impl == "auto":
        return auto
    if impl == "triton":
        raise ValueError(
            "impl='triton' cannot run: this version has no Triton kernels. "
            f"Expected {_listed('auto', *others, auto)} ({auto!r} runs on every device)"
        )
    if impl not in available:
        raise ValueError(f"impl must be one of {_listed('auto', *others, auto)}, got {impl!r}")
    return impl


def _listed(*names: str) -> str:
    return ", ".join(map(repr, names))
