"""Run the commands of a guide that needs a real model, and write what they print into it.

    python tools/run_guide.py docs/guides/pretrained.md --folder runs/guide --write

A ```console block holds commands ("$ ...", over several lines with a backslash), each with its output below. A
```python block is a script; its output is the ```text block after it. All run in --folder, where `tools` leads to this
folder. The line `<!-- once: PATH -->` before a block leaves it out where PATH is there. What a block leaves running
ends with it. The first command that fails ends the tool.
"""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

TOOLS = Path(__file__).resolve().parent
BLOCK = re.compile(
    r"(?:^<!-- once: (?P<once>\S+) -->\n)?"
    r"^```(?P<kind>console|python)\n(?P<body>.*?)^```\n"
    r"(?P<after>\n```text\n(?P<output>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)
MARK = "\x1e"
# Of longer outputs, the first and the last lines are shown.
LINES, FIRST, LAST = 30, 12, 16


class GuideError(Exception):
    """Which command failed."""


def commands(body: str) -> list[str]:
    """The commands of a console block, with their continued lines."""
    found: list[str] = []
    open_line = False
    for line in body.splitlines():
        if open_line:
            found[-1] += f"\n{line}"
        elif line.startswith("$ "):
            found.append(line.removeprefix("$ "))
        else:
            continue
        open_line = line.endswith("\\")
    return found


def run(words: list[str], folder: Path, about: str) -> str:
    """What a program prints. Its errors and progress go to the terminal; what it leaves running is ended."""
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = os.environ | {"PATH": paths, "COLUMNS": "110", "HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8"}
    process = subprocess.Popen(
        words, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    if process.returncode:
        raise GuideError(f"{about}\nended with {process.returncode}. It printed\n{output.replace(MARK, '')}")
    return output


def shown(output: str) -> str:
    """An output as it stands in the guide."""
    lines = [line.rstrip() for line in output.strip("\n").splitlines()]
    if len(lines) > LINES:
        lines = [*lines[:FIRST], "…", *lines[-LAST:]]
    return "".join(f"{line}\n" for line in lines)


def run_console(body: str, folder: Path) -> str:
    """Run the commands of a block in one shell; give the block back with their outputs."""
    asked = commands(body)
    script = "\n".join(["set -e -o pipefail", *(f"printf '{MARK}\\n'\n{command}" for command in asked)])
    outputs = run(["bash", "-c", script], folder, body).split(f"{MARK}\n")[1:]
    return "".join(f"$ {command}\n{shown(output)}" for command, output in zip(asked, outputs, strict=True))


def run_block(block: re.Match[str], folder: Path) -> str:
    """Run a block; give its text back with what was printed."""
    once = block["once"]
    if once and (folder / once).exists():
        return block[0]
    print(block["body"], flush=True)
    head = f"<!-- once: {once} -->\n" if once else ""
    if block["kind"] == "console":
        return f"{head}```console\n{run_console(block['body'], folder)}```\n{block['after'] or ''}"
    output = shown(run([sys.executable, "-c", block["body"]], folder, block["body"]))
    return f"{head}```python\n{block['body']}```\n" + (f"\n```text\n{output}```\n" if output else "")


def run_guide(text: str, folder: Path) -> str:
    """Run all blocks of a guide in order; give it back with what was printed."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "tools").exists():
        (folder / "tools").symlink_to(TOOLS)
    return BLOCK.sub(lambda block: run_block(block, folder), text)


def main() -> int:
    """Run a guide."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("guide", type=Path, metavar="GUIDE", help="a page of docs/guides")
    parser.add_argument("--folder", type=Path, default=Path("runs/guide"), help="where it runs (default: runs/guide)")
    parser.add_argument("--write", action="store_true", help="write the outputs into GUIDE")
    args = parser.parse_args()
    try:
        text = run_guide(args.guide.read_text(), args.folder)
    except GuideError as error:
        print(f"run_guide: error: {error}", file=sys.stderr)
        return 1
    if args.write:
        args.guide.write_text(text)
    print(f"{args.guide}: every command ran" + (", and the outputs are written" if args.write else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
