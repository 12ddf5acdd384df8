"""Find a Chromium for the tests of the report, or install one.

    python tools/browser.py

looks at the variable CHROMIUM, then for Chromium and Chrome; where there is none and apt-get may be used (Debian; as
root or with sudo that asks no password), it installs `chromium-headless-shell`: 100 MB, under a minute. Where that
fails it says so and leaves it at that: only the tests that open a browser need one.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
ELSEWHERE = (
    Path("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"),
    Path("/Applications/Chromium.app/Contents/MacOS/Chromium"),
)
PACKAGES = ("chromium-headless-shell", "chromium")
ADVICE = (
    "no Chromium found: install Chromium or Chrome (Debian: apt-get install chromium-headless-shell), "
    "or set CHROMIUM to the path of one"
)
TIMEOUT_SECONDS = 600


def find() -> str | None:
    """The path of a browser, or None. A path in CHROMIUM is obeyed, or refused."""
    if chosen := os.environ.get("CHROMIUM"):
        found = shutil.which(chosen)
        if found is None:
            raise ValueError(f"CHROMIUM must be the path of a browser, got {chosen!r}")
        return found
    known = [shutil.which(name) for name in NAMES] + [str(path) for path in ELSEWHERE if path.exists()]
    return next((path for path in known if path), None)


def install() -> bool:
    """With apt-get, if it may be used without a question. Whether that worked."""
    if shutil.which("apt-get") is None:
        return False
    # Root needs no sudo; others only one that asks nothing, or the tests would hang.
    sudo = [] if os.geteuid() == 0 else ["sudo", "-n"]
    if sudo and shutil.which("sudo") is None:
        return False
    # Another installation may be under way.
    apt = [*sudo, "apt-get", "-qq", "-o", "DPkg::Lock::Timeout=120"]
    print("Installing Chromium for the tests of the report: ten seconds to a minute, once", file=sys.stderr)
    # The lists may be old but good enough, and some source of them may be unreachable: that decides nothing.
    _run([*apt, "update"])
    return any(_run([*apt, "install", "-y", "--no-install-recommends", package]) for package in PACKAGES)


def _run(command: list[str]) -> bool:
    quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    nothing = subprocess.DEVNULL
    try:
        done = subprocess.run(
            command,
            stdin=nothing,
            stdout=nothing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT_SECONDS,
            env=quiet,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"{' '.join(command)}: {error}", file=sys.stderr)
        return False
    if done.returncode:
        print(f"{' '.join(command)}: {done.stderr.strip()[-300:]}", file=sys.stderr)
    return done.returncode == 0


def main() -> int:
    """Find or install; say what is missing. An exit code."""
    try:
        found = find() or (install() and find())
    except ValueError as error:
        print(f"tools/browser.py: {error}", file=sys.stderr)
        return 1
    print(found or f"tools/browser.py: {ADVICE}", file=sys.stdout if found else sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
