"""The pages of the documentation site that are not files below docs/, and how links and formulas get there.

MkDocs calls the functions `on_...` (mkdocs.yml, `make docs`). Markdown stays as GitHub shows it: links lead to files of
the repository, $`...`$ and ```math blocks hold LaTeX. On the site, links lead to pages, and formulas are MathML, made
here: a browser needs no script and no network for them.
"""

import ast
import html
import json
import os
import posixpath
import re
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from math_core import LatexToMathML
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PACKAGE = "lucid_attention"
# Files of the repository that are pages.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "SECURITY.md": "project/security.md",
    "CODE_OF_CONDUCT.md": "project/conduct.md",
    "THIRD_PARTY_NOTICES.md": "project/notices.md",
    "LICENSE": "project/licence.md",
    "examples/first_look.ipynb": "examples/first_look.md",
}
# Sections of the navigation that take the files whose names begin so.
SECTIONS = {"guides/": "Guides", "results": "Results", "benchmarks": "Benchmarks", "gpu": "Benchmarks", "": "Theory"}
# Pages of the reference: title, rooms of the package in the order of the page, first sentence.
REFERENCE = {
    "operators": (
        "Operators",
        (".ops.lucid", ".ops.path", ".ops.softmax", ".ops.linear"),
        "Functions on tensors of shape `[B, H, T, D]`: batch, heads, length, head size.",
    ),
    "modules": (
        "Modules",
        (".nn",),
        "Layers with projections, positions and a cache. `ATTENTIONS` has all of them by name: "
        "[the family](../guides/family.md).",
    ),
    "models": (
        "Transformers models",
        (".models",),
        'They need `pip install -c constraints.txt ".[transformers]"`. Fields of `LucidConfig` that are not listed are '
        "those of `LlamaConfig`.",
    ),
}
# Its docstring lists many arguments in one entry, about which the reader of docstrings warns.
OPTIONS = {
    "LucidConfig": "docstring_options: {warnings: false}, docstring_section_style: list, members: [from_llama]",
    "LucidForCausalLM": "members: [forward]",
}
FENCE = re.compile(r"^ *(`{3,}|~{3,})")
LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
INLINE_MATH = re.compile(r"\$`([^`]+)`\$")
DISPLAY_MATH = re.compile(r"^```math\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SOURCE_LANGUAGES = {".py": "python", ".toml": "toml", ".txt": "text", ".yaml": "yaml"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the pages of docs/ that the navigation does not name to the section that their name says."""
    assert config.nav is not None
    named = set(re.findall(r"[\w./-]+\.md", json.dumps(config.nav)))
    for file in sorted(DOCS.rglob("*.md")):
        uri = file.relative_to(DOCS).as_posix()
        if uri not in named:
            section = next(title for start, title in SECTIONS.items() if uri.startswith(start))
            next(entry[section] for entry in config.nav if section in entry).append(uri)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here."""
    made = {page: _text_of(ROOT / path) for path, page in PAGES.items() if (ROOT / path).exists()}
    for name, (title, rooms, about) in REFERENCE.items():
        made[f"reference/{name}.md"] = _reference(title, rooms, about)
    made["reference/commands.md"] = _commands()
    for uri, text in made.items():
        files.append(File.generated(config, uri, content=text))
    for path in sorted(_linked_sources(files, made)):
        files.append(File.generated(config, _source_page(path), content=_source(ROOT / path)))
    # ziamath is here for its font alone; importing it warns.
    found = find_spec("ziamath")
    if found is None or found.origin is None:
        raise PluginError("the package ziamath is missing: make docs installs it")
    font = Path(found.origin).parent / "fonts" / "STIXTwoMath-Regular.ttf"
    files.append(File.generated(config, "assets/math.ttf", content=font.read_bytes()))
    for image in sorted((ROOT / "examples").glob("*.png")):
        files.append(File.generated(config, f"examples/{image.name}", content=image.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to pages, formulas to MathML."""
    if page.file.src_uri.startswith("source/"):
        return markdown
    here = _repository_path(page.file.src_uri)
    markdown = DISPLAY_MATH.sub(lambda found: _kept(_mathml(found[1], here, display=True)), markdown)
    lines, fence = [], ""
    for line in markdown.split("\n"):
        opened = FENCE.match(line)
        if opened and not fence:
            fence = opened[1]
        elif opened and opened[1].startswith(fence):
            fence = ""
        elif not fence:
            line = INLINE_MATH.sub(lambda found: _kept(_mathml(found[1], here, display=False)), line)
            line = LINK.sub(lambda found: _page_link(found[1], here, page.file.src_uri), line)
        lines.append(line)
    return "\n".join(lines)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put the formulas into the page."""
    return PLACE.sub(lambda found: _formulas[int(found[1])], html)


# Formulas of all pages, by number. Markdown sees a place alone: it would take a formula at the start of a line for a
# block of its own.
_formulas: list[str] = []
PLACE = re.compile("\u27e6(\\d+)\u27e7")


def _kept(formula: str) -> str:
    _formulas.append(formula)
    return f"\u27e6{len(_formulas) - 1}\u27e7"


def _text_of(path: Path) -> str:
    if path.suffix == ".ipynb":
        return _notebook(path)
    text = path.read_text()
    return text if path.suffix == ".md" else f"# Licence\n\n```text\n{text}\n```\n"


def _repository_path(uri: str) -> str:
    """The file of the repository that a page shows."""
    return next((path for path, page in PAGES.items() if page == uri), f"docs/{uri}")


def _page_link(target: str, here: str, uri: str) -> str:
    """A link in the file `here`, as the page `uri` needs it."""
    if re.match(r"[a-z][a-z+.-]*:", target) or target.startswith("#"):
        return target
    path, _, anchor = target.partition("#")
    goal = posixpath.normpath(posixpath.join(posixpath.dirname(here), path))
    if goal in PAGES:
        goal = PAGES[goal]
    elif goal.startswith("docs/"):
        goal = goal.removeprefix("docs/")
    elif (ROOT / goal).is_file():
        goal = _source_page(goal)
    else:
        raise PluginError(f"{here}: the link {target!r} leads to no file")
    return posixpath.relpath(goal, posixpath.dirname(uri) or ".") + (f"#{anchor}" if anchor else "")


def _source_page(path: str) -> str:
    return f"source/{path}.md"


def _linked_sources(files: Files, made: dict[str, str]) -> set[str]:
    """Files of the repository outside docs/ that pages link to and that are no pages themselves."""
    texts = {_repository_path(uri): text for uri, text in made.items()}
    texts |= {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages() if file.abs_src_path}
    found = set()
    for here, text in texts.items():
        for target in LINK.findall(text):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(here), target.partition("#")[0]))
            if ":" not in target and not path.startswith("docs/") and path not in PAGES and (ROOT / path).is_file():
                found.add(path)
    return found


def _source(path: Path) -> str:
    name, language = path.relative_to(ROOT).as_posix(), SOURCE_LANGUAGES.get(path.suffix, "text")
    return f'---\nsearch:\n  exclude: true\n---\n# {name}\n\n````{language} linenums="1"\n{path.read_text()}\n````\n'


@cache
def _converter() -> LatexToMathML:
    return LatexToMathML()


def _mathml(latex: str, here: str, *, display: bool) -> str:
    try:
        made = _converter().convert_with_local_state(latex, displaystyle=display)
    except Exception as error:
        raise PluginError(f"{here}: {latex!r} is no formula: {error}") from error
    return f'<span class="math-display">{made}</span>' if display else made


def _reference(title: str, rooms: tuple[str, ...], about: str) -> str:
    """A page with the public names of rooms of the package, and the attentions that `ATTENTIONS` names."""
    by_module: dict[str, list[str]] = ast.literal_eval(_assigned(ROOT / PACKAGE / "__init__.py", "_NAMES"))
    modules = {name: module for module, names in by_module.items() for name in names}
    names = [name for room in rooms for name, module in modules.items() if module.startswith(room)]
    if "ATTENTIONS" in names:
        registry = _assigned(ROOT / PACKAGE / "nn" / "attention" / "__init__.py", "ATTENTIONS")
        assert isinstance(registry, ast.Dict)
        classes = [value.id for value in registry.values if isinstance(value, ast.Name)]
        names = [name if name in modules else f"nn.attention.{name}" for name in classes]
        names.sort(key=lambda name: name not in modules)
        names.append("CausalAttention")
    entries = []
    for name in names:
        options = f"\n    options: {{{OPTIONS[name]}}}" if name in OPTIONS else ""
        entries.append(f"::: {PACKAGE}.{name}{options}")
    return "\n\n".join([f"# {title}", about, *entries]) + "\n"


def _assigned(path: Path, name: str) -> ast.expr:
    """What a file assigns to a name."""
    for node in ast.parse(path.read_text()).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if ast.unparse(target) == name:
            return node.value
    raise PluginError(f"{path} assigns nothing to {name}")


def _commands() -> str:
    """The help of every command of `lucid`."""
    sys.path.insert(0, str(ROOT))
    from lucid_lab.cli import app

    parts = ["# Commands", "What `lucid COMMAND --help` prints."]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100", "NO_COLOR": "1"}
    for name in (info.name for info in app.registered_commands if info.name):
        command = [sys.executable, "-m", "lucid_lab.cli", name, "--help"]
        shown = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=True)
        parts.append(f"## lucid {name}\n\n```text\n{shown.stdout.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def _notebook(path: Path) -> str:
    """A notebook as Markdown, with the outputs that it holds."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            shown = "".join(output.get("text", data.get("text/plain", "")))
            if "image/png" in data:
                picture = "".join(data["image/png"]).strip().replace("\n", "")
                parts.append(f'<img alt="output" src="data:image/png;base64,{picture}">')
            elif shown:
                parts.append(f"```text\n{html.unescape(shown.rstrip())}\n```")
    return "\n\n".join(parts) + "\n"
