"""Chromium for tests, controlled over a pipe with its own protocol (CDP), without further packages."""

import base64
import fcntl
import json
import os
import select
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools.browser import ADVICE, find

SECONDS = 60
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--remote-debugging-pipe",
    "about:blank",
)


class Browser:
    """One tab. `messages` has what it reported: console, errors, requests."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.messages: list[dict[str, Any]] = []
        targets = self.ask("Target.getTargets")["targetInfos"]
        target = next(each["targetId"] for each in targets if each["type"] == "page")
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command and wait for its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.messages.append(answer)

    def open(self, page: Path, width: int, height: int, scheme: str) -> None:
        """Show a page in a window of this size, for a reader who prefers "light" or "dark"."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.messages.clear()
        self.ask("Page.navigate", url=page.resolve().as_uri())
        while not any(each["method"] == "Page.loadEventFired" for each in self.messages):
            self.messages.append(self._next())
        # Wait two frames, so that everything is laid out.
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        given = {"expression": script, "returnByValue": True, "awaitPromise": True}
        answer = self.ask("Runtime.evaluate", **given)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"]["description"])
        return answer["result"].get("value")

    def screenshot(self, file: Path) -> None:
        """The whole page, as PNG."""
        taken = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(taken["data"]))

    def complaints(self) -> list[str]:
        """Errors, warnings and anything else that the page said since it was opened."""
        found = []
        for each in self.messages:
            if each["method"] in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
                found.append(json.dumps(each["params"])[:500])
        return found

    def requests(self) -> list[str]:
        """What the page asked for since it was opened, without what it carries in itself."""
        sent = [each["params"] for each in self.messages if each["method"] == "Network.requestWillBeSent"]
        urls = [each["request"]["url"] for each in sent]
        return [url for url in urls if not url.startswith("data:")]

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            got = os.read(self._read, 1 << 20) if ready else b""
            if not got:
                raise RuntimeError("the browser ended" if ready else f"the browser said nothing for {SECONDS} s")
            self._buffer += got
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


@contextmanager
def opened() -> Iterator[Browser]:
    """A browser, ended afterwards with all its processes."""
    command = find()
    if command is None:
        raise RuntimeError(ADVICE)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process, write, read = _start([command, f"--user-data-dir={profile}", *FLAGS])
        try:
            yield Browser(write, read)
        finally:
            os.close(write)
            os.close(read)
            os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)


def _start(command: list[str]) -> tuple[int, int, int]:
    """Its process, and where to write commands and read answers: Chromium's files 3 and 4."""
    pipes = [os.pipe(), os.pipe()]
    # Move the ends of the pipes to 10 and above: one of them may be 3 or 4 itself, and would be overwritten.
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (pipes[0][0], pipes[1][1])]
    nothing = os.open(os.devnull, os.O_RDWR)
    wiring = [(os.POSIX_SPAWN_DUP2, nothing, stream) for stream in (0, 1, 2)]
    wiring += [(os.POSIX_SPAWN_DUP2, ends[0], 3), (os.POSIX_SPAWN_DUP2, ends[1], 4)]
    try:
        # In its own process group, so that all its processes can be ended together.
        process = os.posix_spawn(command[0], command, os.environ, file_actions=wiring, setpgroup=0)
    finally:
        for end in (pipes[0][0], pipes[1][1], *ends, nothing):
            os.close(end)
    return process, pipes[0][1], pipes[1][0]
