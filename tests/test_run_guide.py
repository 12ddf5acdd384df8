"""`tools/run_guide.py`: it runs the blocks of a guide in order and writes what they print."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "run_guide.py"
GUIDE = """# Guide

<!-- once: got -->
```console
$ echo fetched > got
old output
```

```console
$ echo one \\
    two
old output
$ sleep 60 &
$ cat got; seq 40
```

```python
from pathlib import Path
print(Path("got").read_text() * 2, end="")
```

```text
old output
```

```text
not an output: no block stands before it
```
"""


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_guide", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_outputs_take_the_place_of_old_ones(tool: ModuleType, tmp_path: Path) -> None:
    # A process that stays would keep the pipe open: its output must go elsewhere, as in the guide.
    guide = GUIDE.replace("sleep 60 &", "sleep 60 > log 2>&1 &")
    written = tool.run_guide(guide, tmp_path)
    assert "old output" not in written
    assert "$ echo one \\\n    two\none two\n$ sleep 60" in written
    assert "$ cat got; seq 40\nfetched\n1\n" in written
    assert "\n…\n" in written
    assert written.count("40\n```") == 1
    assert '* 2, end="")\n```\n\n```text\nfetched\nfetched\n```\n\n```text\nnot an output' in written
    (tmp_path / "got").write_text("kept\n")
    again = tool.run_guide(written, tmp_path)
    assert "$ cat got; seq 40\nkept\n" in again, "a block that is run once is not run again"


def test_a_command_that_fails_ends_the_guide(tool: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(tool.GuideError, match=r"false(?s:.)*ended with 1"):
        tool.run_guide("```console\n$ false\n$ touch after\n```\n", tmp_path)
    assert not (tmp_path / "after").exists()
    with pytest.raises(tool.GuideError, match="ended with 1"):
        tool.run_guide("```python\nraise SystemExit(1)\n```\n", tmp_path)
