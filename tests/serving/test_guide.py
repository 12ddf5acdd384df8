"""The commands of the guide on serving run as they are written, with another port."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.tools_of_others import ROOT, answer, environment, server, write_checkpoints
from tests.test_documents import blocks

pytest.importorskip("uvicorn", reason='pip install "lucid-attention[serve]"')
GUIDE = ROOT / "docs" / "guides" / "serving.md"
PORT = "8000"


def commands() -> tuple[list[str], str, str]:
    """The words that start the server, the shell commands for another terminal, and the Python of a client."""
    found = list(blocks(GUIDE.read_text()))
    start, others = (block.code for block in found if block.language == "bash")
    (client,) = (block.code for block in found if block.language == "python" and "openai" in block.code)
    return start.split(), others, client


def test_the_guide_has_the_commands() -> None:
    start, others, client = commands()
    assert start[:3] == ["lucid", "serve", "./model"]
    assert others.count(f"localhost:{PORT}") == 2
    assert f"localhost:{PORT}" in client


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_commands_of_the_guide_run(tmp_path: Path) -> None:
    write_checkpoints(tmp_path)["dropin"].rename(tmp_path / "model")
    start, others, client = commands()
    words = [word for word in start[2:] if word not in ("--port", PORT)]
    with server([sys.executable, "-m", "lucid_lab.cli", "serve", *words], tmp_path) as address:
        port = re.search(r":(\d+)/", address)[1]  # type: ignore[index]
        done = run(["bash", "-ec", others.replace(PORT, port)], tmp_path)
        assert answer(tmp_path / "model", "w0 w1 w2 w3") in done
        assert '"status":"ok"' in done
        done = run([sys.executable, "-c", client.replace(PORT, port)], tmp_path)
        assert answer(tmp_path / "model", "<bos> w0 w1 w2 w3") in done
        assert answer(tmp_path / "model", "w0 w1") in done


def run(words: list[str], folder: Path) -> str:
    done = subprocess.run(words, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout
