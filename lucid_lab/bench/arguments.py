"""The arguments of `lucid doctor`."""

import argparse


def doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `lucid doctor`."""
    parser.description = (
        "Check every implementation of the operators that can run on a device against the dense equation in float64, "
        "twice each, with uninitialised memory full of NaN; measure time and memory against torch's attention; say "
        "what impl='auto' uses there, and why. The exit code is 1 if an implementation is wrong. The result of the "
        "Triton kernels is remembered for this device, driver and version, in ~/.cache/lucid_attention (or "
        "LUCID_ATTENTION_CACHE)."
    )
    parser.add_argument(
        "--device", default="auto", metavar="NAME", help="cpu, cuda, cuda:1 (default: an accelerator if there is one)"
    )
    parser.add_argument("--quick", action="store_true", help="a few cases, and no measurements")
    parser.add_argument(
        "--json", metavar="FILE", help="write everything as JSON, for a bug report; - for standard output"
    )
