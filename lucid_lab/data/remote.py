"""Files on other machines, by their address, read in one go through fsspec: https://, hf://, s3:// and others.

An address stands for a content that does not change: nothing is asked of a server before a file is read.
"""

import io
import time
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from lucid_attention.messages import first_line

from .readers import DataError, require

# Seconds to wait before a file that broke off is asked for again, from the byte where it broke off.
WAITS: Sequence[float] = (1, 4, 16)
# Seconds without a byte after which a connection counts as broken.
SILENCE = 60


def is_address(name: str) -> bool:
    """Whether a name is an address such as https://host/file.json.gz."""
    return "://" in name


class RemoteFile:
    """A file by its address. It has the part of `Path` that the readers use."""

    def __init__(self, address: str) -> None:
        self.address = address
        path = PurePosixPath(urlsplit(address).path)
        self.name, self.suffix, self.suffixes = path.name, path.suffix, path.suffixes

    def __str__(self) -> str:
        return self.address

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteFile) and other.address == self.address

    def __hash__(self) -> int:
        return hash(self.address)

    def open(self, mode: str = "rb") -> Any:
        """The bytes of the file, as a stream."""
        return io.BufferedReader(_Stream(self.address), 1 << 20)


class _Stream(io.RawIOBase):
    """A remote file that is opened again where it broke off. Errors are a DataError of one sentence."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._position = 0
        self._file: Any = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        for wait in (*WAITS, None):
            try:
                content = self._opened().read(len(buffer))
                break
            # The libraries below have no common exception class.
            except Exception as error:
                self._drop()
                if wait is None or isinstance(error, (FileNotFoundError, PermissionError, DataError, ValueError)):
                    raise DataError(
                        f"{self._address} cannot be read: {type(error).__name__}: {first_line(error)}. Finished parts "
                        "are kept: run the same command again"
                    ) from error
                time.sleep(wait)
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)

    def _opened(self) -> Any:
        if self._file is None:
            fsspec = require("fsspec", f"reading {self._address}")
            try:
                self._file = fsspec.open(self._address, "rb", **_options(self._address)).open()
            except ImportError as error:
                raise DataError(f"its address needs another package: {first_line(error)}") from error
            if self._position:
                _skip(self._file, self._position)
        return self._file

    def _drop(self) -> None:
        if self._file is not None:
            try:
                self._file.close()
            finally:
                self._file = None

    def close(self) -> None:
        self._drop()
        super().close()


def _options(address: str) -> dict[str, Any]:
    """Over HTTP, one stream without a limit of its time: some servers ignore the request for a part of a file."""
    if not address.startswith(("http://", "https://")):
        return {}
    aiohttp = require("aiohttp", f"reading {address}")
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=SILENCE, sock_read=SILENCE)
    return {"block_size": 0, "client_kwargs": {"timeout": timeout}}


def _skip(file: Any, size: int) -> None:
    try:
        file.seek(size)
        return
    except ValueError:
        # A server that does not send parts of a file: read it again from its start.
        pass
    while size and (content := file.read(min(size, 1 << 20))):
        size -= len(content)
