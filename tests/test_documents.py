"""The documents tell the truth: their code runs, their links lead somewhere. So do the notebooks of examples/.

All ```python blocks of a document run in order in one namespace. A block stays out only with

    <!-- not executed: reason -->

on the line before it.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from lucid_attention import ATTENTIONS
from tools.write_results import PAGE, page

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
LINKED = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^ *(?P<fence>`{3,}|~{3,}) *(?P<info>[^`]*)$")
OPT_OUT = re.compile(r"^ *<!-- not executed:(?P<reason>.*)-->$")
PYTHON = {"py", "python", "python3"}
# [text](target), ![text](target), [name]: target, and src="target" or href="target".
LINKS = re.compile(r"\]\(\s*<?([^)\s>]+)>?[^)]*\)|^ *\[[^\]]+\]: *(\S+)|(?:src|href)=\"([^\"]+)\"", re.MULTILINE)


class Block(NamedTuple):
    """A fenced block; `line` is the number of its first line of code."""

    line: int
    language: str
    code: str
    before: str


def blocks(text: str) -> Iterator[Block]:
    lines = text.splitlines()
    opened: tuple[int, str, str] | None = None
    for number, line in enumerate(lines, 1):
        match = FENCE.match(line)
        if match is None:
            continue
        fence, info = match["fence"], match["info"].strip()
        if opened is None:
            opened = number, fence, info.split()[0].lower() if info else ""
        elif fence.startswith(opened[1]) and not info:
            first, _, language = opened
            indent = len(lines[first - 1]) - len(lines[first - 1].lstrip())
            code = [each[indent:] if not each[:indent].strip() else each for each in lines[first : number - 1]]
            yield Block(first + 1, language, "\n".join(code), lines[first - 2] if first > 1 else "")
            opened = None
    if opened is not None:
        raise ValueError(f"the block opened in line {opened[0]} is not closed")


def run(path: Path) -> int:
    """Run the Python blocks of a document, with the document's own line numbers; return how many ran."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    ran = 0
    for block in blocks(path.read_text()):
        if block.language not in PYTHON:
            continue
        if opt_out := OPT_OUT.match(block.before):
            if not opt_out["reason"].strip():
                raise ValueError(f"{path.name}, line {block.line - 2}: 'not executed' needs a reason")
            continue
        exec(compile("\n" * (block.line - 1) + block.code, str(path), "exec"), namespace)
        ran += 1
    return ran


def broken_links(path: Path, root: Path) -> list[str]:
    text = path.read_text()
    lines = text.splitlines()
    for block in blocks(text):
        code = block.code.splitlines()
        lines[block.line - 1 : block.line - 1 + len(code)] = [""] * len(code)
    found = []
    for groups in LINKS.findall(re.sub(r"`[^`\n]*`", "", "\n".join(lines))):
        target = next(filter(None, groups))
        file = target.partition("#")[0]
        if re.match(r"[a-z][a-z+.-]*:", target) or not file:
            continue
        to = (path.parent / file).resolve()
        if file.startswith("/") or not to.is_relative_to(root.resolve()) or not to.exists():
            found.append(f"{path.name}: {target}")
    return found


@pytest.fixture
def undisturbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a document does to torch, to the working directory and to the names of attentions ends with it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    names = dict(ATTENTIONS)
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    yield
    ATTENTIONS.clear()
    ATTENTIONS.update(names)
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_the_code_of_the_document_runs(path: Path) -> None:
    run(path)


@pytest.mark.parametrize("path", LINKED, ids=name_of)
def test_links_of_the_document_lead_to_files(path: Path) -> None:
    assert not broken_links(path, ROOT)


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "there.md").touch()
    path = tmp_path / "docs" / "a.md"
    good = ["../there.md", "../there.md#part", "#here", "https://example.org/x", "mailto:a@example.org", "../docs"]
    bad = ["gone.md", "../gone.png", "/there.md", "../../outside.md"]
    text = "".join(f"[text]({target})\n" for target in good + bad)
    path.write_text(text + '[name]: gone.txt\n<img src="gone.svg">\n`[code](gone.py)`\n```\n[code](gone.py)\n```\n')
    targets = {line.removeprefix("a.md: ") for line in broken_links(path, tmp_path)}
    assert targets == {*bad, "gone.txt", "gone.svg"}


@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive")
def test_the_notebook_runs_and_holds_the_outputs_of_its_code(path: Path) -> None:
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        exec(compile("".join(cell["source"]), f"{path.name}, block {number}", "exec"), namespace)
        assert cell["outputs"], "make notebook stores the outputs"
    assert path.stat().st_size < 100_000


def test_the_page_of_results_is_what_the_records_say() -> None:
    """`python tools/write_results.py` writes it."""
    assert (ROOT / PAGE).read_text(encoding="utf-8") == page()
