"""Parts of error messages, and tables for the terminal."""

import errno
import os
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any


def did_you_mean(word: Any, known: Iterable[str]) -> str:
    """ " (did you mean 'name'?)" for the name in `known` nearest to `word`; empty if none is near."""
    near = get_close_matches(str(word), list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the error's type if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def missing_package(error: BaseException | None, ours: str = "lucid_attention") -> str | None:
    """The package of others that is not installed and so caused the error; None for other causes.

    Transformers wraps the error of the import in one of its own, which does not name the package.
    """
    if not isinstance(error, ModuleNotFoundError):
        return None
    if error.name is None:
        return missing_package(error.__cause__, ours)
    return None if error.name.partition(".")[0] == ours else error.name


# What to do about an error of the operating system, by its number.
REMEDIES = {
    errno.ENOSPC: "the disk is full: make room, or choose a place on another disk",
    errno.EDQUOT: "your share of the disk is used up: make room, or choose a place on another disk",
    errno.EFBIG: "the file grew beyond the largest size that is allowed here (see `ulimit -f`)",
    errno.EROFS: "the file system is read-only: choose another place",
    errno.EACCES: "permission denied: change its permissions, or choose another place",
    errno.EPERM: "permission denied: change its permissions, or choose another place",
    errno.EEXIST: "a file is where a folder is expected: remove it, or choose another place",
    errno.ENOTDIR: "a file is where a folder is expected: remove it, or choose another place",
    errno.EISDIR: "a folder is where a file is expected: name a file",
    errno.ENAMETOOLONG: "the name is too long: choose a shorter one",
    errno.ENOENT: "no such file or folder: check the path",
    errno.EMFILE: "too many files are open: raise the limit with `ulimit -n`",
    errno.EIO: "the disk reports an error: check the disk, or choose a place on another one",
}


def explain_os_error(error: OSError, place: object = None) -> str:
    """A sentence with the path and what to do. place: where the command writes, for errors that name no path."""
    if error.errno is None:
        # Raised by a library, with a text of its own, which may have many lines.
        return " ".join(str(error).split()) or type(error).__name__
    path = error.filename2 or error.filename or (place if error.errno in REMEDIES else None)
    path = os.fsdecode(path) if isinstance(path, bytes) else path
    reason = REMEDIES.get(error.errno) or error.strerror or type(error).__name__
    return reason if path is None else f"{path}: {reason}"


def text_table(rows: Sequence[Sequence[str]], *, rule: bool = False) -> str:
    """Rows in aligned columns; the first row is the heading. rule: a line of dashes below the heading."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    dashes = [["-" * width for width in widths]] if rule else []
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (rows[0], *dashes, *rows[1:])
    )
