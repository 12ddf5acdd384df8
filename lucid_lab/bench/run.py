"""`lucid bench`: a quick look at the cost on this machine, or cases with records and a page."""

import os
import shlex
import shutil
import subprocess
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from lucid_attention.files import write_whole
from lucid_attention.messages import did_you_mean, text_table

from ..locks import locked
from . import blocks, decode, memory, models, path, solve
from .harness import Shape, machine, threads
from .records import Case, CaseFile, Point, Result, Settings, Sizes, page, spread_text, table

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        *(solve.CASE, blocks.CASE, decode.CASE, path.CASE, memory.CASE),
        *(models.TRAINING, models.DECODING, models.ON_DEVICE),
    )
}
OUT = Path("bench_results")
# The folder of the checkout, or of installed packages.
ROOT = Path(__file__).resolve().parents[2]
# A load above this before the run means that other programs use the machine.
BUSY = 0.5
LOOK_SHAPES, LOOK_LENGTH, LOOK_CONTEXT = (Shape(64, 8, 8), Shape(64, 32, 4)), 2048, 32768


def run(
    names: Sequence[str],
    *,
    everything: bool = False,
    thread_counts: Sequence[int] = (),
    device: str = "",
    quick: bool = False,
    resume: bool = False,
    publish: bool = False,
    out: Path | None = None,
) -> None:
    """`lucid bench`. names: cases; none for the quick look, or, with `publish`, for the page alone.

    everything: all cases but `on_device`. Raises WrongAnswer if a contestant is wrong.
    """
    for name in names:
        if name not in CASES:
            raise ValueError(f"unknown case {name!r}{did_you_mean(name, CASES)}: expected some of {', '.join(CASES)}")
    if everything:
        names = list(dict.fromkeys([*(name for name in CASES if name != models.ON_DEVICE.name), *names]))
    if not names and (quick or resume or out):
        raise ValueError("--quick, --resume and --out are for named cases or --all, got none")
    if device and models.ON_DEVICE.name not in names:
        raise ValueError(f"--device is for the case {models.ON_DEVICE.name}, got {', '.join(names) or 'no case'}")
    settings = Settings(_thread_counts(thread_counts, everything and not quick), quick, device or "auto")
    if publish:
        if quick or out:
            raise ValueError("--publish needs full sizes, and chooses the folder: leave out --quick and --out")
        if not (ROOT / "docs").is_dir():
            raise ValueError(f"--publish writes into a checkout of the project, got an installed package in {ROOT}")
        out = ROOT / "records" / "bench" / _slug(machine())
    if names:
        _measure(names, settings, out or OUT, resume)
    elif not publish:
        _look(settings)
    if publish:
        print(f"wrote {write_whole(ROOT / 'docs' / 'benchmarks.md', page(ROOT / 'records' / 'bench', CASES.values()))}")


def _thread_counts(counts: Sequence[int], two: bool) -> tuple[int, ...]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for n in counts:
        if not 1 <= n <= cores:
            raise ValueError(f"--threads must be between 1 and the {cores} cores of this machine, got {n}")
    return tuple(dict.fromkeys(counts)) or ((1, 2)[:cores] if two else (1,))


def _slug(about: dict[str, str]) -> str:
    """A folder name for a machine: its CPU and instruction set."""
    text = f"{about['CPU']} {about['torch'].rpartition(', ')[2]}".lower().replace("(r)", "").replace("processor", "")
    return "-".join("".join(letter if letter.isalnum() else " " for letter in text).split())


def commit() -> str:
    """The commit of the checkout, "-dirty" after changes; empty outside of a checkout."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        return ""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(words, capture_output=True, text=True).stdout.strip()


def _measure(names: Sequence[str], settings: Settings, out: Path, resume: bool) -> None:
    words = ["lucid", "bench", *names, "--threads", *map(str, settings.threads), *["--quick"] * settings.quick]
    made = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": shlex.join(words),
        "commit": commit(),
        "quick": settings.quick,
        "machine": machine(),
    }
    with locked(out):
        for name in names:
            _measure_case(CASES[name], settings, CaseFile(out, name, made), resume)


def _measure_case(case: Case, settings: Settings, file: CaseFile, resume: bool) -> None:
    if resume:
        file.resume()
    finished = [sizes for sizes, _ in file.records]
    points = [point for point in case.points(settings) if point.sizes not in finished]
    for sizes, result in _measured(case.name, points):
        # Limits are for full sizes.
        file.add(sizes, replace(result, limits={}) if settings.quick else result)
    print(f"\n{textwrap.fill(f'{case.name}: {case.about}', 118)}\n\n{text_table(table(file.records))}")
    over = [(sizes, result.over) for sizes, result in file.records if result.over]
    print(f"\nwrote {file.path}; {len(over)} of {len(file.records)} points are over a limit", flush=True)
    if over and case == memory.CASE:
        raise ValueError(f"memory must be linear in the length: over the limit are {over}")


def _measured(name: str, points: Sequence[Point]) -> Iterator[tuple[Sizes, Result]]:
    """Run points with their thread counts, and print the progress."""
    if (load := os.getloadavg()[0]) > BUSY:
        print(f"warning: this machine is busy (load {load:.1f}); comparisons will scatter")
    for n, (sizes, measure) in enumerate(points, 1):
        start = time.perf_counter()
        with threads(int(sizes["threads"])):
            result = measure()
        yield sizes, result
        what = " ".join(f"{key}={value}" for key, value in sizes.items())
        parts = [f"{key} {1000 * spread.median:.3g} ms" for key, spread in result.seconds.items()]
        parts += [f"{key} {spread_text(spread)}" for key, spread in result.ratios.items()]
        print(
            f"[{n}/{len(points)}] {name} {what}: {', '.join(parts)} [{time.perf_counter() - start:.0f} s]", flush=True
        )


def _look(settings: Settings) -> None:
    """Print a few points of `solve` and `decode`, and a sentence about them. Nothing is written."""
    about = machine()
    print(f"{about['CPU']}, torch {about['torch']}, threads: {settings.threads[0]}; about a minute")
    points = []
    for shape in LOOK_SHAPES:
        sizes: Sizes = {"threads": settings.threads[0], "heads": shape.label}
        for backward, what in ((True, "training"), (False, "prompt")):
            run = partial(solve.measure, shape, LOOK_LENGTH, backward=backward, settings=settings)
            points.append(Point({**sizes, "pass": what, "tokens": LOOK_LENGTH}, run))
        run = partial(decode.measure, shape, LOOK_CONTEXT, settings)
        points.append(Point({**sizes, "pass": "new token", "tokens": LOOK_CONTEXT}, run))
    results = [result for _, result in _measured("quick look", points)]
    training, prompt, token = (results[start::3] for start in range(3))

    def times(results: Sequence[Result], name: str) -> str:
        return " and ".join(f"{result.ratios[name].median:.2f}" for result in results)

    main, heads = f"{solve.LUCID} / {solve.SDPA}", " and ".join(shape.label for shape in LOOK_SHAPES)
    counted = " and ".join(f"{shape.flop_ratio:.3g}" for shape in LOOK_SHAPES)
    text = (
        f"With {heads} query/key-value heads, attention with LUCID takes {times(training, main)} times as long as "
        f"torch's softmax attention to train on {LOOK_LENGTH} tokens, and {times(prompt, main)} times as long to read "
        f"a prompt ({counted} by the count of operations). A new token after {LOOK_CONTEXT} takes "
        f"{times(token, decode.TO_TORCH)} times as long as with torch's fastest attention, and "
        f"{times(token, decode.TO_STEP)} times as long as with our own step for softmax. Attention is a part of a "
        "model: `lucid bench model_training model_decode` measures whole models."
    )
    print(f"\n{textwrap.fill(text, 118)}")
