"""Compile every Triton kernel for every architecture, check what came out, and write docs/gpu_kernels.md.

    python tools/gpu_offline.py                    all; exits with 1 if a kernel is at fault, and writes the page
    python tools/gpu_offline.py --only sm_90       some architectures; writes nothing
    python tools/gpu_offline.py --kernels update   kernels whose name contains a word; writes nothing

A kernel that spills may use all registers: it goes to the table of `ops/triton_tiles.py`, and is compiled again.
Needs Triton and no GPU. An hour on one core; Triton keeps what it compiled, so a second run is quick.
"""

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

# `python tools/gpu_offline.py` finds its neighbours by this folder.
sys.path.insert(0, str(Path(__file__).parent))
from gpu_cases import OPERATORS
from triton_aot import TARGETS, Compiled, Launch, compiled, faults, recorded

from lucid_attention.ops import triton_tiles

ROOT = Path(__file__).resolve().parents[1]
PAGE, RECORD = ROOT / "docs" / "gpu_kernels.md", ROOT / "records" / "gpu" / "kernels.json"
SIZES = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float32, torch.float16)

HEAD = """# Kernels compiled for GPUs

Written by `make test-gpu-offline` (`tools/gpu_offline.py`), with Triton {version}. Every kernel is compiled ahead of
time as the library launches it, in every configuration, and must have no stack (no spilled
registers), shared memory within the architecture's limit, at most 512 columns of tensor memory, and a matrix
instruction if it multiplies. Nothing here was run on a GPU.

A cell is the largest number of registers / KB of shared memory over head sizes 64, 128 and 256, dtypes and variants
(packed documents, step sizes, masks, adjoint). `records/gpu/kernels.json` has every size, with warps and stages.
"""


def name_of(dtype: torch.dtype) -> str:
    return "float32" if dtype == torch.float32 else "16 bit"


Table = dict[str, dict[tuple[str, str, int], list[tuple[Launch, Compiled]]]]


def check(architectures: list[str], word: str, say: Callable[[str], None]) -> tuple[Table, int]:
    """{kernel: {(architecture, dtype, D): what was compiled}} and the number of kernels at fault."""
    table: Table = defaultdict(lambda: defaultdict(list))
    broken = 0
    for architecture in architectures:
        results: dict[Launch, Compiled] = {}
        while True:
            launches = launched(architecture, word)
            spilling = compile_all(architecture, launches, results, say)
            if not spilling:
                break
            let_use_all_registers(architecture, spilling)
            say(f"{architecture}: these spill, and may use all registers from now on: {', '.join(sorted(spilling))}")
        used = {launch for each in launches.values() for launch in each}
        for launch in used:
            if wrong := faults(results[launch], architecture):
                broken += 1
                variant = {name: value for name, value in launch.constants if value not in ("", None)}
                say(f"{architecture} {launch.name}: {'; '.join(wrong)}\n    {launch.signature[0]} {variant}")
        for (dtype, size), each in launches.items():
            for launch in each:
                table[launch.name][architecture, name_of(dtype), size].append((launch, results[launch]))
        say(f"{architecture}: {len(used)} kernels compiled; at fault so far: {broken}")
    return table, broken


def launched(architecture: str, word: str) -> dict[tuple[torch.dtype, int], list[Launch]]:
    """The kernels of every operator by dtype and head size, each once. Dtypes and sizes may share kernels."""
    found = {}
    for dtype in DTYPES:
        for size in SIZES:
            calls = [partial(operator, dtype, size) for operator in OPERATORS]
            names = [launch for call in calls for launch in recorded(architecture, call) if word in launch.name]
            found[dtype, size] = list(dict.fromkeys(names))
    return found


def compile_all(
    architecture: str,
    launches: dict[tuple[torch.dtype, int], list[Launch]],
    results: dict[Launch, Compiled],
    say: Callable[[str], None],
) -> set[str]:
    """Compile what has no result yet. Names of kernels that spill although they may not use all registers yet."""
    spilling = set()
    for (dtype, size), each in launches.items():
        for launch in each:
            if launch not in results:
                results[launch] = compiled(launch, architecture)
            if results[launch].stack and not launch.most_registers and architecture.startswith("sm_"):
                spilling.add(launch.name)
        say(f"{architecture}, {dtype}, D = {size}: {len(results)} kernels")
    return spilling


def let_use_all_registers(architecture: str, kernels: set[str]) -> None:
    """Write kernels to the table of `ops/triton_tiles.py`."""
    known = triton_tiles.SPILLING
    known[architecture] = sorted({*known.get(architecture, []), *kernels})
    file = Path(triton_tiles.__file__)
    rows = []
    for name in sorted(known, key=list(TARGETS).index):
        rows += [f'    "{name}": [', *(f'        "{kernel}",' for kernel in known[name]), "    ],"]
    text, count = re.subn(
        r"(?<=SPILLING: dict\[str, list\[str\]\] = \{\n)[^}]*", lambda match: "\n".join(rows) + "\n", file.read_text()
    )
    assert count == 1, f"{file.name} has no table"
    file.write_text(text)


def entry(found: list[tuple[Launch, Compiled]]) -> str | None:
    if not found:
        return None
    registers = max(result.registers for _, result in found)
    shared = max(result.shared for _, result in found)
    warps = "–".join(str(x) for x in sorted({launch.warps for launch, _ in found}))
    stages = "–".join(str(x) for x in sorted({launch.stages for launch, _ in found}))
    return f"{registers} / {-(-shared // 1024)} / {warps} / {stages}"


def record(table: Table) -> dict[str, Any]:
    """What records/gpu/kernels.json keeps."""
    columns = [(dtype, size) for dtype in ("16 bit", "float32") for size in SIZES]
    kernels: dict[str, Any] = {}
    for kernel, entries in table.items():
        kernels[kernel] = {}
        for architecture in TARGETS:
            found = {column: entries.get((architecture, *column), []) for column in columns}
            used = sorted({result.instruction for results in found.values() for _, result in results} - {""})
            cells = {f"{dtype}, D = {size}": entry(results) for (dtype, size), results in found.items()}
            kernels[kernel][architecture] = {"instruction": used, **cells}
    text = "registers / KB of shared memory / warps / pipeline stages"
    return {"written_by": "tools/gpu_offline.py", "triton": triton.__version__, "entry": text, "kernels": kernels}


def page(kept: dict[str, Any]) -> str:
    """docs/gpu_kernels.md: the largest entry of every kernel and architecture."""
    lines = [
        HEAD.format(version=kept["triton"]),
        "| kernel | " + " | ".join(TARGETS) + " |",
        "|---" * (len(TARGETS) + 1) + "|",
    ]
    for kernel, architectures in kept["kernels"].items():
        cells = []
        for architecture in TARGETS:
            parts = [
                cell.split(" / ")
                for name, cell in architectures[architecture].items()
                if name != "instruction" and cell
            ]
            cells.append(" / ".join(str(max(int(part[at]) for part in parts)) for at in (0, 1)) if parts else "–")
        lines.append(f"| `{kernel}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--kernels", default="", metavar="WORD")
    arguments = parser.parse_args()
    table, broken = check(arguments.only, arguments.kernels, lambda line: print(line, flush=True))
    if not broken and not arguments.kernels and len(arguments.only) == len(TARGETS):
        RECORD.write_text(json.dumps(record(table), indent=1, ensure_ascii=False) + "\n")
        PAGE.write_text(page(json.loads(RECORD.read_text())))
        print(f"{RECORD.name} and {PAGE.name} written")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
