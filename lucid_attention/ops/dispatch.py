"""Which implementation runs. `"auto"` may choose; a named implementation is obeyed or refused, never replaced."""

IMPLEMENTATIONS = ("reference", "blockwise")


def choose(impl: str) -> str:
    """Return the implementation to run for `impl`."""
    if impl == "auto":
        return "blockwise"
    if impl == "triton":
        raise ValueError(
            "impl='triton' cannot run: this version has no Triton kernels. Expected 'auto', 'reference' or 'blockwise' "
            "('blockwise' runs on every device)"
        )
    if impl not in IMPLEMENTATIONS:
        expected = ", ".join(map(repr, ("auto", *IMPLEMENTATIONS)))
        raise ValueError(f"impl must be one of {expected}, got {impl!r}")
    return impl
