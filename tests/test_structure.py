"""The shape of the package: who imports whom, what stands where. Each rule is a function that lists what breaks it.

    ops → nn → models → {serving, training, evals, analysis, bench} → experiments → cli

An arrow means "may be imported by". `data` and `report` import none of these rooms; every room may import `base`.
"""

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import lucid_attention

ROOT = Path(__file__).parents[1]
PACKAGE = "lucid_attention"

BELOW_MODELS = {"ops", "nn"}
BELOW_TRAINING = BELOW_MODELS | {"models", "data", "report"}
BELOW_EXPERIMENTS = BELOW_TRAINING | {"training", "evals", "analysis", "bench"}
MAY_IMPORT: dict[str, set[str]] = {
    "base": set(),
    "ops": set(),
    "nn": {"ops"},
    "models": BELOW_MODELS,
    "serving": BELOW_MODELS | {"models"},
    "training": BELOW_TRAINING,
    "evals": BELOW_TRAINING,
    "analysis": BELOW_TRAINING,
    "bench": BELOW_TRAINING | {"training"},
    "experiments": BELOW_EXPERIMENTS,
    "commands": BELOW_EXPERIMENTS | {"experiments", "serving"},
    "cli": {"commands"},
    "data": set(),
    "report": set(),
}
TORCH_ONLY = {"ops", "nn"}
# What files of kernels import besides, by the beginning of their name.
KERNELS = {"triton": {"triton"}, "numba": {"numba", "numpy", "llvmlite"}}
LINES = 400
# The module that reads JSON files, the one that words errors of lines in its own way, and those that read texts which
# this package has just written.
READ_JSON = {"base/files.py", "data/readers.py"} | {
    "bench/cases/memory.py",
    "experiments/engine/timing.py",
    "models/saved.py",
    "serving/vllm/configs.py",
    "training/estimate.py",
}
NAMELESS = {"utils", "util", "common", "helpers", "helper", "misc"}
# Paths that exist on one machine only: homes, mounts, scratch folders.
MACHINE_PATH = re.compile(
    r"(?<![\w.:/~}\]-])/(?:home|Users|root|work|workspace|mnt|media|scratch|private)/[\w.-]+|\b[A-Z]:\\\\?Users\b"
)


class Import(NamedTuple):
    """`file`, line `line`, imports `target`: a dotted module, or a name in one."""

    file: Path
    line: int
    target: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.target}"


def source_files(root: Path, *folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((root / folder).rglob("*.py"))


@cache
def imports(root: Path, file: Path) -> tuple[Import, ...]:
    """Every import of a file, at any depth, as absolute names. Several rules ask for the same files."""
    return tuple(_imports(root, file))


def _imports(root: Path, file: Path) -> Iterator[Import]:
    relative = file.relative_to(root)
    package = relative.with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(relative, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            for alias in node.names:
                yield Import(relative, node.lineno, f"{module}.{alias.name}")


def origins(root: Path) -> dict[str, str]:
    """Where the public names of the package come from."""
    file = root / PACKAGE / "__init__.py"
    return {each.target.rpartition(".")[2]: each.target for each in imports(root, file)} if file.exists() else {}


def room(dotted: str) -> str:
    parts = dotted.split(".")
    return parts[1] if len(parts) > 1 else ""


def forbidden_arrows(root: Path) -> list[str]:
    public = origins(root)
    found = []
    for file in source_files(root, PACKAGE):
        here = room(".".join(file.relative_to(root).with_suffix("").parts))
        if here == "__init__":
            continue
        for each in imports(root, file):
            if each.target.partition(".")[0] != PACKAGE:
                continue
            there = room(each.target)
            there = room(public.get(there, each.target))
            if there not in MAY_IMPORT.get(here, set()) | {here, "base"}:
                found.append(str(each))
    return found


def foreign_imports(root: Path) -> list[str]:
    """Imports of `ops` and `nn` beyond torch and the standard library; kernels may import their compiler."""
    found = []
    for folder in sorted(TORCH_ONLY):
        for file in source_files(root, f"{PACKAGE}/{folder}"):
            allowed = {PACKAGE, "torch"} | KERNELS.get(file.name.partition("_")[0], set())
            for each in imports(root, file):
                if each.target.partition(".")[0] not in allowed | sys.stdlib_module_names:
                    found.append(str(each))
    return found


def is_implementation(module: str) -> bool:
    return module in {"reference", "blockwise", "chunkwise", "decode"} or module.startswith("triton_")


def crossed_implementations(root: Path) -> list[str]:
    """Only the file of a public function of ops/<operator>/ knows the implementations; torch_op wraps blockwise.

    The kernels are one implementation in several files.
    """
    found = []
    for file in source_files(root, f"{PACKAGE}/ops"):
        folder = file.parent.relative_to(root)
        if len(folder.parts) != 3 or file.stem in {"api", "__init__", "delta", "gla", "gsa"}:
            continue
        prefix = ".".join(folder.parts) + "."
        allowed = {"torch_op": {"blockwise"}, "decode": {"triton_decode"}}.get(file.stem, set())
        for each in imports(root, file):
            if not each.target.startswith(prefix):
                continue
            module = each.target.removeprefix(prefix).partition(".")[0]
            known = is_implementation(module) or module in {"api", "torch_op"}
            kernels = module.startswith("triton_") and file.stem.startswith("triton_")
            if known and module not in allowed and module != file.stem and not kernels:
                found.append(str(each))
    return found


def long_files(root: Path) -> list[str]:
    counted = ((file, len(file.read_text().splitlines())) for file in source_files(root, PACKAGE, "tests"))
    return [f"{file.relative_to(root)} has {lines} lines" for file, lines in counted if lines > LINES]


def other_json_readers(root: Path) -> list[str]:
    """Calls of json.load and json.loads: `base.files` also refuses deep nesting, other types and encodings by name."""
    found = []
    for file in source_files(root, PACKAGE):
        name = file.relative_to(root / PACKAGE).as_posix()
        if name in READ_JSON:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("load", "loads") and ast.unparse(node.value) == "json":
                found.append(f"{name}:{node.lineno} reads JSON without base.files")
    return found


def nameless_files(root: Path) -> list[str]:
    folders = (PACKAGE, "tests", "examples", "tools")
    found = [file.relative_to(root) for file in source_files(root, *folders)]
    return [str(file) for file in found if file.stem in NAMELESS or NAMELESS & set(file.parts)]


def repository_files(root: Path) -> list[Path]:
    """What git tracks or would add; outside of a repository, everything that is not hidden."""
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
        return [root / name for name in names if name and (root / name).is_file()]
    hidden = {"__pycache__", "build", "dist"}
    parts = ((file, file.relative_to(root).parts) for file in sorted(root.rglob("*")) if file.is_file())
    return [file for file, names in parts if not any(name in hidden or name.startswith(".") for name in names[:-1])]


def machine_paths(root: Path) -> list[str]:
    found = []
    for file in repository_files(root):
        try:
            text = file.read_text()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if match := MACHINE_PATH.search(line):
                found.append(f"{file.relative_to(root)}:{number} {match[0]}")
    return found


RULES: dict[str, Callable[[Path], list[str]]] = {
    "imports follow the arrows between rooms": forbidden_arrows,
    "ops and nn need torch and nothing else": foreign_imports,
    "implementations do not import each other": crossed_implementations,
    "files are short": long_files,
    "file names say what is inside": nameless_files,
    "JSON files are read in one place": other_json_readers,
    "no path of one machine is written down": machine_paths,
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_repository_keeps_the_rule(rule: Callable[[Path], list[str]]) -> None:
    assert rule(ROOT) == []


def test_the_rules_see_the_package() -> None:
    seen = [each for file in source_files(ROOT, PACKAGE) for each in imports(ROOT, file)]
    assert {room(each.target) for each in seen if each.target.startswith(PACKAGE)} >= {"ops", "nn"}
    rooms = {path.stem for path in (ROOT / PACKAGE).iterdir() if path.is_dir() or path.suffix == ".py"}
    assert rooms - {"__init__", "__pycache__"} <= set(MAY_IMPORT)
    assert Path(__file__) in repository_files(ROOT)


# A file, what is written into it, and what the rule must say; None where nothing is wrong.
Plant = tuple[Callable[[Path], list[str]], str, str, str | None]
PLANTS: dict[str, Plant] = {
    "ops imports nn": (forbidden_arrows, "ops/a.py", "from ..nn.rotary import Rotary", "nn.rotary"),
    "ops imports nn by its full name": (
        forbidden_arrows,
        "ops/b/a.py",
        "import lucid_attention.nn.rotary",
        "nn.rotary",
    ),
    "ops imports nn inside a function": (forbidden_arrows, "ops/a.py", "def f():\n    from .. import nn", "nn"),
    "nn imports a public name of models": (forbidden_arrows, "nn/a.py", "from lucid_attention import Config", "Config"),
    "nn imports models": (forbidden_arrows, "nn/deep/a.py", "from ...models import modeling", "models.modeling"),
    "models imports training": (forbidden_arrows, "models/a.py", "from ..training import recipes", "training"),
    "models imports serving": (forbidden_arrows, "models/a.py", "from ..serving import server", "serving"),
    "training imports evals": (forbidden_arrows, "training/a.py", "from .. import evals", "evals"),
    "analysis imports experiments": (forbidden_arrows, "analysis/a.py", "import lucid_attention.experiments", "exper"),
    "experiments imports cli": (forbidden_arrows, "experiments/a.py", "from ..cli import main", "cli"),
    "data imports ops": (forbidden_arrows, "data/a.py", "from ..ops import keys", "ops.keys"),
    "report imports experiments": (forbidden_arrows, "report/a.py", "from ..experiments import x", "experiments"),
    "an unknown room imports": (forbidden_arrows, "attic/a.py", "from ..ops import keys", "ops.keys"),
    "nn may import ops": (forbidden_arrows, "nn/a.py", "from ..ops.lucid import api\nfrom . import b", None),
    "commands may import all": (
        forbidden_arrows,
        "commands.py",
        "from .experiments import x\nfrom .ops import y",
        None,
    ),
    "experiments may use public names": (
        forbidden_arrows,
        "experiments/a.py",
        "from lucid_attention import Config",
        None,
    ),
    "ops imports numpy": (foreign_imports, "ops/a.py", "import numpy as np", "numpy"),
    "nn imports transformers late": (foreign_imports, "nn/a.py", "def f():\n    import transformers.x", "transformers"),
    "ops imports triton anywhere": (foreign_imports, "ops/lucid/blockwise.py", "import triton", "triton"),
    "kernels may import triton": (foreign_imports, "ops/lucid/triton_solve.py", "import triton\nimport math", None),
    "models may import transformers": (foreign_imports, "models/a.py", "import transformers", None),
    "reference imports blockwise": (
        crossed_implementations,
        "ops/x/reference.py",
        "from .blockwise import f",
        "blockwise",
    ),
    "chunkwise imports reference": (
        crossed_implementations,
        "ops/x/chunkwise.py",
        "from .reference import f",
        "reference",
    ),
    "reference imports chunkwise": (
        crossed_implementations,
        "ops/x/reference.py",
        "from . import chunkwise",
        "chunkwise",
    ),
    "decode imports reference": (crossed_implementations, "ops/x/decode.py", "from . import reference", "reference"),
    "a kernel imports decode": (crossed_implementations, "ops/x/triton_a.py", "from .decode import f", "decode"),
    "kernels may import kernels": (crossed_implementations, "ops/x/triton_a.py", "from .triton_b import f", None),
    "blockwise imports a kernel": (
        crossed_implementations,
        "ops/x/blockwise.py",
        "from .triton_b import f",
        "triton_b",
    ),
    "torch_op imports decode": (crossed_implementations, "ops/x/torch_op.py", "from .decode import f", "decode"),
    "blockwise imports api": (crossed_implementations, "ops/x/blockwise.py", "import lucid_attention.ops.x.api", "api"),
    "tiles import blockwise": (crossed_implementations, "ops/x/tiles.py", "from .blockwise import f", "blockwise"),
    "api imports all": (crossed_implementations, "ops/x/api.py", "from . import reference, blockwise, decode", None),
    "torch_op wraps blockwise": (crossed_implementations, "ops/x/torch_op.py", "from .blockwise import f", None),
    "blockwise uses tiles": (crossed_implementations, "ops/x/blockwise.py", "from .tiles import f", None),
    "401 lines": (long_files, "ops/a.py", "x = 1\n" * 401, "401 lines"),
    "400 lines": (long_files, "ops/a.py", "x = 1\n" * 400, None),
    "json.loads": (other_json_readers, "data/a.py", "import json\nx = map(json.loads, [])", "reads JSON"),
    "json.dumps": (other_json_readers, "data/a.py", "import json\nx = json.dumps([])", None),
    "base.files may": (other_json_readers, "base/files.py", "import json\nx = json.loads('')", None),
    "utils.py": (nameless_files, "ops/utils.py", "", "utils.py"),
    "a folder called common": (nameless_files, "nn/common/rotary.py", "", "common"),
    "a home": (machine_paths, "a.txt", "see /" + "home/ada/notes.txt", "ada"),
    "a mount": (machine_paths, "docs.md", "cd /" + "mnt/disk && make", "disk"),
    "a home on Windows": (machine_paths, "a.toml", "path = 'C:" + "\\Users\\ada'", "Users"),
    "no path": (machine_paths, "a.txt", "a/b, https://a.b/home/c, tests/mnt/x, /proc/cpuinfo, and/or", None),
}


@pytest.mark.parametrize(("rule", "name", "text", "complaint"), PLANTS.values(), ids=PLANTS)
def test_the_rule_notices(
    rule: Callable[[Path], list[str]], name: str, text: str, complaint: str | None, tmp_path: Path
) -> None:
    package = tmp_path / PACKAGE
    file = package / name
    file.parent.mkdir(parents=True)
    (package / "__init__.py").write_text("from .models.configuration import Config\n")
    file.write_text(text)
    found = rule(tmp_path)
    if complaint is None:
        assert found == []
    else:
        assert len(found) == 1
        assert complaint in found[0]
        assert name in found[0]


def undocumented(names: dict[str, Any]) -> list[str]:
    """Public names without a docstring of their own, and signatures with a gap in their annotations."""
    found = []
    for name, value in names.items():
        # A NamedTuple or a dataclass has a docstring made from its fields: that says nothing.
        if not (value.__doc__ or "").strip() or value.__doc__.startswith(f"{name}("):
            found.append(f"{name} has no docstring")
        methods = inspect.getmembers(value, inspect.isfunction) if isinstance(value, type) else [(name, value)]
        for method, function in methods:
            ours = function.__module__.partition(".")[0] == value.__module__.partition(".")[0]
            if not ours or (method.startswith("_") and method != "__init__"):
                continue
            signature = inspect.signature(function)
            gaps = [each for each, it in signature.parameters.items() if it.annotation is it.empty and each != "self"]
            if signature.return_annotation is signature.empty:
                gaps.append("return")
            if gaps:
                found.append(f"{function.__qualname__} lacks annotations of {', '.join(gaps)}")
    return found


def test_public_names_are_documented_and_fully_annotated() -> None:
    names = {name: getattr(lucid_attention, name) for name in lucid_attention.__all__}
    names |= {module.__name__: module for module in names.pop("ATTENTIONS").values()}
    assert undocumented(names) == []


def test_a_gap_in_documentation_or_annotations_is_noticed() -> None:
    def silent(x: int) -> int:
        return x

    def vague(x, *, y: int):  # type: ignore[no-untyped-def]
        """Say something."""

    class Module:
        """Do something."""

        def __init__(self, size) -> None:  # type: ignore[no-untyped-def]
            pass

        def forward(self, x: int):  # type: ignore[no-untyped-def]
            pass

    found = undocumented({"silent": silent, "vague": vague, "Module": Module})
    assert [line.rpartition(".")[2] for line in found] == [
        "silent has no docstring",
        "vague lacks annotations of x, return",
        "__init__ lacks annotations of size",
        "forward lacks annotations of return",
    ]


def test_the_package_takes_every_public_name_from_the_module_that_type_checkers_see() -> None:
    declared = {name: target.rpartition(".")[0] for name, target in origins(ROOT).items()}
    taken = {name: f"{PACKAGE}{module}" for name, module in lucid_attention._MODULES.items()}
    assert {name: declared[name] for name in taken} == taken
