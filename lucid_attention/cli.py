"""`lucid <command>`. Ctrl-C is handled before anything else is imported, so this file imports next to nothing."""

import os
import sys

from .base.stopping import Stopping


def main(argv: list[str] | None = None) -> int:
    """Run a command. Returns its exit code.

    argv: the words after `lucid`; None for those of this process. Then the process is the program `lucid`, in which
    Ctrl-C and SIGTERM end the command with one line.
    """
    stopping = Stopping("lucid: stopped by {signal}")
    if argv is None:
        stopping.install()
        _open_output()
    code = 1
    try:
        from .commands import run_words

        code = run_words(sys.argv[1:] if argv is None else argv, stopping)
    finally:
        stopping.end(code)
    return code


def _open_output() -> None:
    """Let every text be printed: what an encoding lacks is shown as an escape, and nothing if a stream is closed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            # At once: the next file that is opened would get the number of the stream, and the output of libraries.
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    sys.exit(main())
