"""Ctrl-C and SIGTERM end a program in the same way: what is finished is kept, one line, an exit code, no traceback."""

# `signal` and `typing` import enum and re, which takes longer than everything before the handler is installed. Type
# checkers take TYPE_CHECKING for true.
import _signal as signal  # type: ignore[import-not-found]
import atexit
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

NAMES = {int(signal.SIGINT): "Ctrl-C", int(signal.SIGTERM): "SIGTERM"}
# What Python does about these signals unless somebody asked for something else, such as nohup.
USUAL: "dict[int, Any]" = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived. Code that cleans up after Ctrl-C cleans up after it, too."""


class Stopping:
    """The handling of SIGINT and SIGTERM, from the first moment of a program to its last.

    At first, while the program imports, there is nothing to clean up: `line` is printed and the process ends. A
    KeyboardInterrupt could be swallowed or printed by the library that is being imported. After `begin` the signal
    raises KeyboardInterrupt or Terminated in the main thread. After `end` the process ends with the code at once.

    number: the signal that arrived; None before.
    """

    def __init__(self, line: str = "stopped") -> None:
        self.line = line
        self.number: int | None = None
        self._phase = "importing"
        self._code = 0
        self._process = os.getpid()
        self._replaced: list[int] = []

    @property
    def exit_code(self) -> int:
        """As shells give it to a program that was ended by the signal; without a signal, as after Ctrl-C."""
        return 128 + (self.number or signal.SIGINT)

    def message(self) -> str:
        """`line`, with the name of the signal."""
        return self.line.format(signal=NAMES[self.number or signal.SIGINT])

    def install(self) -> None:
        """Handle the signals, except those that are ignored or have a handler already."""
        for number, usual in USUAL.items():
            if signal.getsignal(number) == usual:
                try:
                    signal.signal(number, self._handle)
                except ValueError:
                    # Only the main thread may handle signals.
                    return
                self._replaced.append(number)

    def begin(self) -> None:
        """Work begins that has something to clean up."""
        self._phase = "working"

    def end(self, code: int) -> None:
        """The work has ended. If a signal ended it, others that follow end the process at once."""
        self._phase, self._code = "ended", code
        if not self._replaced:
            return
        if self.number is None:
            for number in self._replaced:
                signal.signal(number, USUAL[number])
            # Python itself takes a while to end, and shows a traceback for Ctrl-C.
            atexit.register(self.install)
            self._replaced.clear()

    def _handle(self, number: int, frame: "FrameType | None") -> None:
        if os.getpid() != self._process:
            _as_usual(number, frame)
        elif self._phase == "ended":
            os._exit(self._code)
        self.number = number
        if self._phase == "importing":
            # Not print: the signal may have come while something else was being printed.
            os.write(2, f"{self.message()}\n".encode())
            os._exit(self.exit_code)
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


def _as_usual(number: int, frame: "FrameType | None") -> None:
    """In a worker that was forked from the program."""
    if number == signal.SIGINT:
        signal.default_int_handler(number, frame)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
