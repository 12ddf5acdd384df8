"""The fingerprint of a module changes with the code that the module depends on, and with no other."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lucid_attention.base import fingerprint as fingerprints
from lucid_attention.base.fingerprint import fingerprint, sources

PACKAGE = {
    "__init__.py": "from .ops.solve import solve\nfrom .late import public\n",
    "late.py": "public = 1\n",
    "ops/__init__.py": "from . import shared\n",
    "ops/shared.py": "",
    "ops/solve.py": "import math\nfrom .tiles import (\n    a,\n    b,\n)\nfrom . import blocks\n",
    "ops/tiles.py": "a = b = 1\n",
    "ops/blocks.py": "def f():\n    try:\n        from toy.deep.inner import x\n    finally:\n        pass\n",
    "deep/__init__.py": "",
    "deep/inner.py": "from ..ops import tiles, name_of_no_file\nfrom .missing import gone\n",
    "report/__init__.py": "from toy.ops.solve import solve\n",
    "public_name.py": "from toy import public\n",
    "by_package.py": "import toy.deep\n",
    "submodule.py": "from . import late\n",
    "match.py": "match 1:\n    case 1:\n        from . import late\n",
}
INNER = {"toy.deep", "toy.deep.inner", "toy.ops", "toy.ops.shared", "toy.ops.tiles"}
SOLVE = {"toy.ops.solve", "toy.ops.blocks", *INNER}
NEEDS = {
    "toy.ops.tiles": {"toy.ops.tiles", "toy.ops", "toy.ops.shared"},
    "toy.ops.solve": SOLVE,
    "toy.report": {"toy.report", *SOLVE},
    "toy.public_name": {"toy.public_name", "toy", "toy.late", *SOLVE},
    "toy.submodule": {"toy.submodule", "toy.late"},
    "toy.match": {"toy.match", "toy.late"},
    "toy.by_package": {"toy.by_package", "toy", "toy.late", *SOLVE},
    "toy.gone": set(),
}


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in PACKAGE.items():
        file = tmp_path / "toy" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    forget()
    yield tmp_path / "toy"
    forget()


def forget() -> None:
    """As a new process begins."""
    for function in (fingerprints.fingerprint, fingerprints._source, fingerprints._file):
        function.cache_clear()


@pytest.mark.parametrize("module", NEEDS)
def test_a_module_depends_on_what_it_imports_directly_or_through_others(module: str, toy: Path) -> None:
    assert set(sources(module)) == NEEDS[module]
    assert "toy" not in sys.modules


@pytest.mark.parametrize("edited", PACKAGE)
def test_an_edit_changes_the_fingerprints_that_depend_on_it_and_no_others(edited: str, toy: Path) -> None:
    before = {module: fingerprint(module) for module in NEEDS}
    (toy / edited).write_text(PACKAGE[edited] + "# edited\n")
    forget()
    dotted = ".".join(("toy", *Path(edited).with_suffix("").parts)).removesuffix(".__init__")
    changed = {module for module in NEEDS if fingerprint(module) != before[module]}
    assert changed == {module for module, needed in NEEDS.items() if dotted in needed}


def test_a_module_that_moves_has_another_fingerprint(toy: Path) -> None:
    (toy / "copy.py").write_text(PACKAGE["ops/tiles.py"])
    assert fingerprint("toy.copy") != fingerprint("toy.ops.tiles")


def test_the_benchmark_of_the_solve_depends_on_the_operator_and_not_on_reports() -> None:
    names = sources("lucid_attention.bench.cases.solve")
    assert "lucid_attention.ops.lucid.blockwise" in names
    assert "lucid_attention.bench.harness" in names
    rooms = {name.split(".")[1] for name in names}
    assert rooms == {"base", "bench", "ops"}


def test_a_fingerprint_of_most_of_the_package_takes_less_than_a_second() -> None:
    forget()
    start = time.process_time()
    fingerprint("lucid_attention.experiments.engine.command")
    assert time.process_time() - start < 1
