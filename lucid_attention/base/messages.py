"""Parts of error messages."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


def did_you_mean(word: Any, known: Iterable[str]) -> str:
    """ " (did you mean 'name'?)" for the name in `known` nearest to `word`; empty if none is near."""
    near = get_close_matches(str(word), list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the error's type if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
