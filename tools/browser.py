"""Find a Chromium for the tests of the report and of the documentation, or install one.

    python tools/browser.py

The script takes the path in the variable CHROMIUM, or looks for Chromium and Chrome. If there is none, it installs
`chromium-headless-shell` (100 MB, under a minute) with apt-get, as root or with a sudo that asks for no password. If
that fails, it prints a message and exits with 0: only the tests that open a browser need one.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
APPLICATIONS = (
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
    """The path of a browser, or None. CHROMIUM, if it is set, must be the path of one."""
    if chosen := os.environ.get("CHROMIUM"):
        browser = shutil.which(chosen)
        if browser is None:
            raise ValueError(f"CHROMIUM must be the path of a browser, got {chosen!r}")
        return browser
    candidates = [shutil.which(name) for name in NAMES] + [str(path) for path in APPLICATIONS if path.exists()]
    return next((path for path in candidates if path), None)


def install() -> bool:
    """Install a browser with apt-get, if that needs no password. Returns whether it worked."""
    if shutil.which("apt-get") is None:
        return False
    # Root needs no sudo. With -n, sudo fails instead of asking for a password, which would block the tests.
    sudo = [] if os.geteuid() == 0 else ["sudo", "-n"]
    if sudo and shutil.which("sudo") is None:
        return False
    # Another installation may hold the lock: wait for it.
    apt = [*sudo, "apt-get", "-qq", "-o", "DPkg::Lock::Timeout=120"]
    print("Installing Chromium (100 MB) for the tests of pages: ten seconds to a minute, once", file=sys.stderr)
    # Ignore the result: older package lists may be good enough.
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
    """Print the path of a browser, found or installed, or what to do. Returns the exit code."""
    try:
        browser = find() or (install() and find())
    except ValueError as error:
        print(f"tools/browser.py: {error}", file=sys.stderr)
        return 1
    print(browser or f"tools/browser.py: {ADVICE}", file=sys.stdout if browser else sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
