"""Runs at the start of every Python below `lucid run`: the import of Transformers is followed by `enable_lucid()`.

Nothing else is imported before that, not even `typing`, so that every process starts as fast as before.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from typing import Any

WATCHED = "transformers"


class AfterTransformers:
    """A finder on sys.meta_path: finds Transformers where the others do, and follows its import by `enable_lucid()`."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """None for every other module."""
        if name != WATCHED:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            _follow(spec.loader)
        return spec


def _follow(loader: Any) -> None:
    execute = loader.exec_module

    def execute_and_enable(module: Any) -> None:
        execute(module)
        _enable()

    loader.exec_module = execute_and_enable


def _enable() -> None:
    try:
        from lucid_attention import enable_lucid
    except ModuleNotFoundError as missing:
        if missing.name != "lucid_attention":
            raise
        # A tool of another environment. Checkpoints with LUCID do not open there: they name the package.
        print(
            f"lucid run: {sys.executable} lacks the package lucid_attention and cannot open checkpoints with LUCID. "
            f"Install it with: {sys.executable} -m pip install lucid-attention",
            file=sys.stderr,
        )
        return
    enable_lucid()


def _run_the_next() -> None:
    """This file hides a sitecustomize that the environment has of its own: run that one, too."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if not entry or os.path.abspath(entry) != here]
    ours = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ModuleNotFoundError as missing:
        if missing.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = ours


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, AfterTransformers())
    _run_the_next()
