"""The shape of the repository: who imports whom, and what the public names promise."""

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lucid_attention

ROOT = Path(__file__).parents[1]

# Every room may import itself and the single files of its package. The library never imports the laboratory.
LIBRARY = {"ops": set(), "nn": {"ops"}, "models": {"ops", "nn"}, "vllm": {"ops", "nn", "models"}}
BELOW_CLAIMS = {"toys", "training", "data", "evals", "analysis", "bench"}
LABORATORY = {
    "report": set(),
    "data": set(),
    "toys": {"data", "evals"},
    "training": {"data", "report"},
    "evals": {"data", "report"},
    "analysis": {"data", "report"},
    "bench": {"report", "training"},
    "claims": BELOW_CLAIMS | {"report"},
}
# What kernels import besides torch, by the beginning of the file's name.
COMPILERS = {"triton": {"triton"}, "numba": {"numba", "numpy"}}
MACHINE_PATH = re.compile(r"(?<![\w.:/~}\]-])/(?:home|Users|root|work|workspace|mnt|media|scratch)/[\w.-]+")


def imports(file: Path) -> Iterator[str]:
    """Every import of a file, at any depth, as absolute dotted names."""
    package = file.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            yield from (f"{module}.{alias.name}" for alias in node.names)


def wrong_imports(package: str, rooms: dict[str, set[str]]) -> list[str]:
    found = []
    for file in sorted((ROOT / package).rglob("*.py")):
        parts = file.relative_to(ROOT / package).with_suffix("").parts
        for target in imports(file):
            names = target.split(".")
            if package == "lucid_attention" and names[0] == "lucid_lab":
                found.append(f"{file}: {target}")
            if len(parts) > 1 and names[0] == package and set(names[1:2]) & set(rooms) - rooms[parts[0]] - {parts[0]}:
                found.append(f"{file}: {target}")
    return found


def test_imports_follow_the_arrows_between_rooms() -> None:
    assert wrong_imports("lucid_attention", LIBRARY) == []
    assert wrong_imports("lucid_lab", LABORATORY) == []


def test_the_check_of_imports_sees_a_wrong_one() -> None:
    assert wrong_imports("lucid_attention", LIBRARY | {"nn": set()}) != []


def test_operators_and_modules_need_torch_alone() -> None:
    found = []
    for file in (*(ROOT / "lucid_attention/ops").rglob("*.py"), *(ROOT / "lucid_attention/nn").rglob("*.py")):
        allowed = {"lucid_attention", "torch"} | COMPILERS.get(file.name.partition("_")[0], set())
        tops = {target.partition(".")[0] for target in imports(file)}
        found += [f"{file.name}: {top}" for top in tops - allowed - sys.stdlib_module_names]
    assert found == []


def test_no_path_of_one_machine_is_written_down() -> None:
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    found = []
    for file in (ROOT / name for name in names if name):
        if file.is_file() and (match := MACHINE_PATH.search(file.read_bytes().decode(errors="replace"))):
            found.append(f"{file.relative_to(ROOT)}: {match[0]}")
    assert found == []


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
            gaps = [key for key, it in signature.parameters.items() if it.annotation is it.empty and key != "self"]
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
    def vague(x, *, y: int):  # type: ignore[no-untyped-def]
        pass

    assert undocumented({"vague": vague}) == [
        "vague has no docstring",
        f"{vague.__qualname__} lacks annotations of x, return",
    ]


def test_the_package_takes_every_public_name_from_the_module_that_type_checkers_see() -> None:
    file = ROOT / "lucid_attention/__init__.py"
    declared = {target.rpartition(".")[2]: target.rpartition(".")[0] for target in imports(file)}
    taken = {name: f"lucid_attention{module}" for name, module in lucid_attention._MODULES.items()}
    assert {name: declared[name] for name in taken} == taken
