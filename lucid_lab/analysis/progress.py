"""Progress of long work: functions that are told what is being done."""

from collections.abc import Callable

Progress = Callable[[str], None]


def silent(what: str) -> None:
    """The progress that nobody hears."""


def within(where: str, progress: Progress) -> Progress:
    """Progress of a part of the work. where: the part."""
    return lambda what: progress(f"{where}, {what}")
