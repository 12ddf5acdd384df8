"""The wheel that `make wheel` builds works in an environment that has torch and nothing else."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = """
import importlib.util
import torch
from lucid_attention import LucidAttention, lucid_attention

for name in ("transformers", "numba", "triton"):
    assert importlib.util.find_spec(name) is None, name
q, k, v = (torch.randn(1, heads, 50, 16, requires_grad=True) for heads in (4, 2, 2))
torch.testing.assert_close(lucid_attention(q, k, v), lucid_attention(q, k, v, impl="reference"), rtol=1e-4, atol=1e-5)
lucid_attention(q, k, v).sum().backward()
o, past = LucidAttention(32, 4)(torch.randn(1, 5, 32))
assert o.shape == (1, 5, 32)
"""


def run(*words: object) -> None:
    result = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False, cwd="/")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_needs_torch_alone(tmp_path: Path) -> None:
    pip = ("-m", "pip", "--no-input", "--disable-pip-version-check", "-qq")
    run(sys.executable, *pip, "wheel", "--no-deps", "-w", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("lucid_attention-*.whl")
    run(sys.executable, "-m", "venv", tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    run(python, *pip, "install", "-c", ROOT / "constraints.txt", wheel)
    run(python, "-c", PROGRAM)
