"""`lucid <command>`. Ctrl-C is handled before anything else is imported, so this file imports next to nothing."""

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
    code = 1
    try:
        from .commands import run_words

        code = run_words(sys.argv[1:] if argv is None else argv, stopping)
    finally:
        stopping.end(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
