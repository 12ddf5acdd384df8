"""What is wrong with data, in a sentence, and packages that may be missing."""

from importlib import import_module
from typing import Any


class DataError(ValueError):
    """What is wrong with data or with a folder of tokens: names the file, what was expected and what came."""


def require(package: str, purpose: str) -> Any:
    """Import an optional package where it is used, or say which extra brings it."""
    try:
        return import_module(package)
    except ModuleNotFoundError as missing:
        if missing.name != package.partition(".")[0]:
            raise
        raise DataError(f'{purpose} needs the package {package!r}: pip install "lucid-attention[train]"') from missing
