"""Print the environment setting that 16-bit arithmetic needs on this CPU, if it needs one.

Some virtual machines advertise AMX but do not allow it: a bfloat16 matrix product ends the process with SIGILL. oneDNN
does not use AMX if ONEDNN_MAX_CPU_ISA excludes it before torch starts. Run

    env $(python tools/cpu_env.py) python ...

Nothing is printed if no setting is needed. If the setting does not help, a message goes to stderr. The answer is cached
in the virtual environment until the machine, its boot, torch or the value of ONEDNN_MAX_CPU_ISA changes.
"""

import contextlib
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

VARIABLE = "ONEDNN_MAX_CPU_ISA"
VALUE = "AVX512_CORE_BF16"
TIMEOUT_SECONDS = 120

PROBE = """
import torch

for dtype in (torch.bfloat16, torch.float16):
    a = torch.ones(256, 256, dtype=dtype)
    a @ a
q = torch.ones(1, 2, 512, 64, dtype=torch.bfloat16)
torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
"""


def run_probe(extra: dict[str, str]) -> tuple[int, str]:
    """The exit code of the probe (negative: the signal that ended it) and the last line of its stderr."""
    command = [sys.executable, "-c", PROBE]
    try:
        done = subprocess.run(
            command, env=os.environ | extra, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return 1, f"no answer in {TIMEOUT_SECONDS} s"
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return done.returncode, lines[-1] if lines else ""


def describe(code: int, message: str) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}: {message}"


def find_setting() -> str | None:
    """The setting to print; empty if none is needed, None if the probe fails with and without it."""
    plain = run_probe({})
    if plain[0] == 0:
        return ""
    if plain[0] > 0:
        print(f"cpu_env: the 16-bit probe failed ({describe(*plain)})", file=sys.stderr)
        return None
    limited = run_probe({VARIABLE: VALUE})
    if limited[0] == 0:
        return f"{VARIABLE}={VALUE}"
    print(
        f"cpu_env: 16-bit matrix products fail on this CPU, alone ({describe(*plain)}) "
        f"and with {VARIABLE}={VALUE} ({describe(*limited)})",
        file=sys.stderr,
    )
    return None


def read_text(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text()
    return ""


def fingerprint() -> str:
    """A hash of everything that the answer depends on."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = ""
    cpu = [line for line in read_text("/proc/cpuinfo").splitlines() if line.startswith(("model name", "flags"))]
    boot = read_text("/proc/sys/kernel/random/boot_id")
    parts = [torch, platform.platform(), platform.node(), boot, os.environ.get(VARIABLE, ""), *sorted(set(cpu)), PROBE]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def main() -> None:
    cache = Path(sys.prefix, ".cpu_env.json") if sys.prefix != sys.base_prefix else None
    key = fingerprint()
    if cache is not None:
        with contextlib.suppress(OSError, ValueError):
            cached = json.loads(cache.read_text())
            if cached["fingerprint"] == key:
                print(cached["setting"], end="")
                return
    setting = find_setting()
    if setting is None:
        return
    print(setting, end="")
    if cache is not None:
        with contextlib.suppress(OSError):
            cache.write_text(json.dumps({"fingerprint": key, "setting": setting}))


if __name__ == "__main__":
    main()
