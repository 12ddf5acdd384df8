"""May "auto" use the Triton kernels on a device? Only after a short self-check there, whose result is remembered.

Compilers for GPUs have been wrong for kernels like these on single architectures, so the user's device has to be the
last test. It runs at the first use in a process, unless a process before has written its result into the cache folder:
for this device, driver, torch, Triton and these kernels. `lucid doctor` runs more cases and overwrites the result.

    LUCID_ATTENTION_IMPL=blockwise     no Triton kernels for "auto", and no self-check
    LUCID_ATTENTION_CACHE=FOLDER       where results are kept, instead of ~/.cache/lucid_attention
"""

import hashlib
import json
import os
import threading
import warnings
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..files import UnreadableFile, read_json, write_whole
from . import triton_support

SWITCH, FOLDER = "LUCID_ATTENTION_IMPL", "LUCID_ATTENTION_CACHE"
# Where Linux tells the version of a driver.
DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))


class Proof(NamedTuple):
    """passed: whether the kernels may be used; about: how that was found, or what was wrong."""

    passed: bool
    about: str


_found: dict[int, Proof] = {}
_lock = threading.Lock()


def switched_off() -> bool:
    """Whether the user has switched the kernels off for "auto"."""
    value = os.environ.get(SWITCH, "")
    if value not in ("", "auto", "blockwise"):
        raise ValueError(f"{SWITCH} must be 'blockwise' (no Triton kernels for impl='auto') or unset, got {value!r}")
    return value == "blockwise"


def holds(device: torch.device) -> bool:
    """Whether "auto" may use the kernels on this device. Warns once where it may not."""
    if switched_off() or not torch.cuda.is_available():
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    if index not in _found:
        if torch.cuda.is_current_stream_capturing():
            # A check cannot run while a graph is recorded. The next call outside of it decides.
            return False
        with _lock:
            if index not in _found:
                _found[index] = _prove(torch.device("cuda", index))
    return _found[index].passed


def _prove(device: torch.device) -> Proof:
    reason = triton_support.unusable(device, torch.float32)
    proof = Proof(False, reason) if reason else remembered(device) or _in_a_thread(device)
    if not proof.passed:
        warnings.warn(
            f"lucid_attention: impl='auto' uses torch and not the Triton kernels on {device}: {proof.about}. "
            f"`lucid doctor` shows more; {SWITCH}=blockwise silences this",
            stacklevel=2,
        )
    return proof


def _in_a_thread(device: torch.device) -> Proof:
    """Run the self-check and remember its result. A thread of its own has no autocast, no tracing and no streams."""
    result: list[Proof] = []

    def run() -> None:
        with torch.cuda.device(device):
            result.append(self_check(device))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if not result:
        return Proof(False, "the self-check ended without a result")
    remember(device, result[0])
    return result[0]


def self_check(device: torch.device) -> Proof:
    """The short check of the kernels on a device."""
    from . import self_check

    small = triton_support.interpreted()
    for case in self_check.QUICK:
        finding = self_check.check(case.small() if small else case, "triton", device)
        if not finding.ok:
            return Proof(False, f"they failed their self-check ({case.operator}, {case.name}: {finding.about})")
    return Proof(True, "they passed their self-check")


def identity(device: torch.device) -> dict[str, Any]:
    """What a result depends on."""
    about = {"lucid_attention": package_version("lucid-attention"), "kernels": _kernels(), "torch": torch.__version__}
    about |= {"triton": package_version("triton"), "device": device_name(device), "driver": driver()}
    if device.type == "cuda":
        about["runtime"] = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
        about["capability"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return about


def package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def driver() -> str:
    for path in DRIVERS:
        try:
            return path.read_text().strip().partition("\n")[0]
        except OSError:
            continue
    return "unknown"


@cache
def _kernels() -> str:
    """A fingerprint of the files that the kernels are made of."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(here.rglob("triton_*.py")):
        digest.update(str(path.relative_to(here)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def cache_folder() -> Path:
    if chosen := os.environ.get(FOLDER):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "lucid_attention"


def _file(device: torch.device) -> Path:
    key = hashlib.sha256(json.dumps(identity(device), sort_keys=True).encode()).hexdigest()[:24]
    return cache_folder() / f"self_check_{key}.json"


def remembered(device: torch.device) -> Proof | None:
    """The result of a check before this one, of the same device and versions; None if there is none that is whole."""
    try:
        content = read_json(_file(device))
    except (OSError, UnreadableFile):
        return None
    if content.get("identity") != identity(device) or not isinstance(content.get("passed"), bool):
        return None
    return Proof(content["passed"], f"{content.get('about')} (remembered)")


def remember(device: torch.device, proof: Proof) -> str | None:
    """Write the result for later processes. Returns why that failed, or None."""
    content = {"identity": identity(device), "passed": proof.passed, "about": proof.about}
    try:
        write_whole(_file(device), json.dumps(content, indent=1) + "\n")
    except OSError as error:
        return f"{cache_folder()} cannot be written: {error.strerror or error}"
    return None
