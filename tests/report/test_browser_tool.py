"""tools/browser.py finds a browser, installs one, or prints what to do; it never stops the other tests."""

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "browser.py"
# The tool as root.
AS_ROOT = "import os, runpy; os.geteuid = lambda: 0; runpy.run_path({tool!r}, run_name='__main__')"


def executable(file: Path, script: str) -> Path:
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return file


def run(folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", AS_ROOT.format(tool=str(TOOL))]
    return subprocess.run(command, env={"PATH": str(folder), **more}, capture_output=True, text=True, timeout=60)


def test_a_browser_on_the_path_is_taken_and_nothing_installed(tmp_path: Path) -> None:
    executable(tmp_path / "apt-get", f"echo called > {tmp_path}/called")
    browser = executable(tmp_path / "google-chrome", "")
    done = run(tmp_path)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, str(browser), "")
    assert not (tmp_path / "called").exists()


def test_the_variable_is_obeyed_or_refused(tmp_path: Path) -> None:
    executable(tmp_path / "chromium", "")
    mine = executable(tmp_path / "mine", "")
    assert run(tmp_path, CHROMIUM=str(mine)).stdout.strip() == str(mine)
    done = run(tmp_path, CHROMIUM=str(tmp_path / "missing"))
    assert done.returncode == 1
    assert "CHROMIUM must be the path of a browser" in done.stderr


def test_where_none_can_be_had_it_says_how_to_get_one_and_goes_on(tmp_path: Path) -> None:
    executable(tmp_path / "apt-get", f"echo x >> {tmp_path}/log; exit 100")
    done = run(tmp_path)
    assert done.returncode == 0
    assert "no Chromium found: install" in done.stderr
    assert (tmp_path / "log").exists()
