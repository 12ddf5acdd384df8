"""`lucid run`: run a tool that knows nothing of this package, so that it opens checkpoints with LUCID.

The tool replaces this process: its output, signals and exit code are its own. PYTHONPATH leads every Python that it
starts, workers and `torchrun` children among them, to at_start/sitecustomize.py, which calls `enable_lucid()`.
"""

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from ..messages import did_you_mean

AT_START = Path(__file__).parent / "at_start"
# As shells have it.
NOT_FOUND = 127


class NoSuchTool(Exception):
    """Why there is nothing to run, in a sentence."""


def command_of(words: list[str], module: bool = False) -> list[str]:
    """The command that runs the tool in this environment.

    words: the name of a program or a Python file, with its arguments. module: the first word names a module.
    """
    words = words[1:] if words[:1] == ["--"] else words
    if not words:
        raise NoSuchTool("needs a tool to run, as in: lucid run lm_eval --tasks ... (see lucid run --help)")
    tool, *rest = words
    if module:
        return [sys.executable, "-m", *words]
    if tool.endswith(".py"):
        if not Path(tool).is_file():
            raise NoSuchTool(f"the script {tool!r} is not there: check the path")
        return [sys.executable, *words]
    # The tools of the environment that `lucid` belongs to come first, whether or not it is activated.
    places = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    program = shutil.which(tool, path=places)
    if program is None:
        raise NoSuchTool(_not_found(tool))
    return [program, *rest]


def _not_found(tool: str) -> str:
    if tool.isidentifier() and find_spec(tool) is not None:
        return f"{tool!r} is a module and not a program: lucid run -m {tool}"
    known = {point.name for point in entry_points(group="console_scripts")}
    return (
        f"there is no program {tool!r}{did_you_mean(tool, known)}: expected the name of a program, a Python file, or "
        "-m and a module"
    )


def environment_of(before: Mapping[str, str]) -> dict[str, str]:
    """The environment in which every Python that starts knows LUCID."""
    others = [entry for entry in before.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != str(AT_START)]
    return {**before, "PYTHONPATH": os.pathsep.join([str(AT_START), *others])}


def run(args: argparse.Namespace) -> int:
    """`lucid run`. Returns only if there is nothing to run, or on Windows, where a process cannot be replaced."""
    try:
        command = command_of(args.words, args.module)
    except NoSuchTool as error:
        print(f"lucid run: error: {error}", file=sys.stderr)
        return NOT_FOUND
    environment = environment_of(os.environ)
    if os.name != "nt":
        os.execve(command[0], command, environment)
    return subprocess.call(command, env=environment)
