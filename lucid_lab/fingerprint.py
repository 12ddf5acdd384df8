"""A fingerprint of code: a record that carries it is not reused once the code has been edited."""

import ast
import hashlib
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple


class Source(NamedTuple):
    """The hash of a module's file, and the modules of the same package that it imports."""

    digest: bytes
    imports: frozenset[str]


@cache
def fingerprint(module: str) -> str:
    """A hash of the source of `module` and of every module of its package that it needs, directly or through others.

    Import statements count at any depth, also inside functions. Other packages do not count, nor do modules whose
    names are computed (`import_module`). A module that does not exist has the hash of no source.
    """
    return hashlib.sha256(b"".join(_source(name).digest for name in sources(module))).hexdigest()[:16]


def sources(module: str) -> list[str]:
    """The modules that `fingerprint(module)` covers, sorted by name."""
    seen = {name for name in {module, *_with_packages(module)} if _file(name)} if _file(module) else set()
    waiting = [*seen]
    while waiting:
        new = _source(waiting.pop()).imports - seen
        seen |= new
        waiting += new
    return sorted(seen)


@cache
def _source(module: str) -> Source:
    file = _file(module)
    assert file is not None
    content = file.read_bytes()
    imports = _imports(module, file.name == "__init__.py", ast.parse(content).body)
    digest = hashlib.sha256(module.encode() + b"\n" + content).digest()
    return Source(digest, frozenset(name for name in imports if _file(name)))


@cache
def _file(module: str) -> Path | None:
    """The file of a module, found without importing it: in the folder of its package, or where it was loaded from."""
    root, *parts = module.split(".")
    package = find_spec(root)
    for folder in (package.submodule_search_locations or []) if package else []:
        path = Path(folder, *parts)
        for file in (path / "__init__.py", path.with_name(f"{path.name}.py")):
            if file.is_file():
                return file
    loaded = getattr(sys.modules.get(module), "__file__", None)
    return Path(loaded) if loaded else None


def _imports(module: str, is_package: bool, body: Iterable[ast.AST]) -> Iterator[str]:
    """What `body` imports from its own package: modules, the packages around them, and names (which are no files).

    Python also runs the `__init__.py` of the whole package. It counts only where a name is taken from it: it does
    nothing but collect public names, and with it every module would depend on all of them.
    """
    root, parts = module.partition(".")[0], module.split(".")
    package = parts if is_package else parts[:-1]
    for node in _statements(body):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            takes_root = any(name.partition(".")[0] == root for name in names)
        elif isinstance(node, ast.ImportFrom):
            around = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*around, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
            takes_root = base == root and not all(map(_file, names))
        else:
            continue
        if takes_root:
            yield root
        for name in names:
            if name.partition(".")[0] == root:
                yield from _with_packages(name)


def _with_packages(dotted: str) -> list[str]:
    """`a.b.c` gives `a.b` and `a.b.c`."""
    words = dotted.split(".")
    return [".".join(words[:length]) for length in range(2, len(words) + 1)]


def _statements(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Statements at any depth. Expressions hold no imports and are most of a file."""
    for node in body:
        yield node
        for field in ("body", "orelse", "handlers", "finalbody", "cases"):
            yield from _statements(getattr(node, field, ()))
