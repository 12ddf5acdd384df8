"""`lucid bench`: a quick look at the cost on this machine, or benchmarks with tables."""

import argparse
import os
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from lucid_attention.messages import did_you_mean

from ..devices import find_device
from ..locks import locked
from ..processes import available_cores
from ..tables import text_table
from .arguments import ON_DEVICE, OUT
from .cases import (
    accuracy,
    decode,
    growth,
    linear,
    memory,
    model_decode,
    model_training,
    on_device,
    path,
    path_decode,
    quick_look,
    serving,
    small_training,
    solve,
)
from .gate import WrongAnswer
from .harness import attention_speed, machine, threads, today
from .pages import Published, machine_label
from .report import PAGES, Page, brief, cells, count, document, plot_growth, plot_linear
from .results import Benchmark, Case, Record, Results, Settings

BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        solve.SOLVE,
        solve.BF16,
        decode.BENCHMARK,
        memory.MEMORY,
        growth.BENCHMARK,
        accuracy.BENCHMARK,
        path.BENCHMARK,
        path_decode.BENCHMARK,
        memory.PATH_MEMORY,
        linear.BENCHMARK,
        model_training.BENCHMARK,
        model_decode.BENCHMARK,
        small_training.BENCHMARK,
        serving.BENCHMARK,
        on_device.TRAINING,
        on_device.DECODING,
    )
}
PLOTS = {growth.BENCHMARK.name: plot_growth, linear.BENCHMARK.name: plot_linear}
# The folder of the checkout, or of installed packages.
ROOT = Path(__file__).resolve().parents[2]
# A load above this before the run means that other programs use the machine.
BUSY = 0.5


class UsageError(Exception):
    """Arguments that contradict each other, or that this machine cannot run."""


def _on_page(page: str) -> list[Benchmark]:
    return [benchmark for benchmark in BENCHMARKS.values() if benchmark.page == page]


def run(args: argparse.Namespace) -> int:
    """`lucid bench`. Returns 1 after a wrong answer or memory that is not linear."""
    try:
        names = _names(args)
        settings = Settings(_thread_counts(args), args.quick, _device(args, names))
        if names:
            pages = _pages(names) if args.publish else []
            with locked(args.out or OUT, "lucid bench"):
                return _run_benchmarks(args, names, settings, pages)
        return _look(settings)
    except UsageError as error:
        print(f"lucid bench: error: {error}", file=sys.stderr)
        return 2
    except MemoryError as error:
        print(f"lucid bench: error: {error}", file=sys.stderr)
        return 2
    except WrongAnswer as error:
        _say(f"stopped: {error}")
        return 1


def _names(args: argparse.Namespace) -> list[str]:
    """The benchmarks to run; none for the quick look."""
    for name in args.names:
        if name not in BENCHMARKS:
            hint = did_you_mean(name, BENCHMARKS)
            raise UsageError(f"unknown benchmark {name!r}{hint}: expected some of {', '.join(BENCHMARKS)}")
    if args.all and args.names:
        raise UsageError(f"--all runs every benchmark: leave out {', '.join(args.names)}, or --all")
    options = {"--quick": args.quick, "--resume": args.resume, "--publish": args.publish, "--out": args.out}
    options_given = [option for option, value in options.items() if value]
    if options_given and not (args.names or args.all):
        raise UsageError(f"{', '.join(options_given)}: name the benchmarks to run, or add --all")
    if args.publish and args.quick:
        raise UsageError("--publish needs results in full size: leave out --quick")
    if args.publish and not ((ROOT / "pyproject.toml").is_file() and (ROOT / "docs").is_dir()):
        raise UsageError(f"--publish writes into docs/ of a checkout of the project, and there is no {ROOT / 'docs'}")
    return [name for name in BENCHMARKS if name not in ON_DEVICE] if args.all else list(dict.fromkeys(args.names))


def _device(args: argparse.Namespace, names: Sequence[str]) -> str:
    """The name of the device, with "auto" resolved. Only benchmarks of ON_DEVICE run elsewhere than on the CPU."""
    others = [name for name in names if name not in ON_DEVICE]
    if args.device is not None and (others or not names):
        raise UsageError(f"--device is for {', '.join(ON_DEVICE)}, and not for {', '.join(others) or 'the quick look'}")
    try:
        return str(find_device(args.device or ("cpu" if others or not names else "auto")))
    except ValueError as error:
        raise UsageError(str(error)) from error


def _thread_counts(args: argparse.Namespace) -> tuple[int, ...]:
    cores = available_cores()
    default = [1, 2][:cores] if args.all and not args.quick else [1]
    for n in args.threads or []:
        if not 1 <= n <= cores:
            raise UsageError(f"--threads must be between 1 and the {cores} cores of this machine, got {n}")
    counts = tuple(dict.fromkeys(args.threads or default))
    if len(counts) > 1 and not (args.names or args.all):
        raise UsageError(f"the quick look runs with one thread count, got --threads {' '.join(map(str, counts))}")
    return counts


def _look(settings: Settings) -> int:
    """Print the quick look. Nothing is written."""
    benchmark = quick_look.BENCHMARK
    about = machine()
    _say(f"{about['CPU']}, torch {about['torch']}, {count(settings.threads[0], 'thread')}")
    records = [record for _, record in _measured([("", case) for case in benchmark.cases(settings)])]
    _say(f"\n{benchmark.about}\n\n{text_table(cells(benchmark, records))}\n")
    _say(textwrap.fill(quick_look.LEGEND, 100))
    return 0


def _run_benchmarks(args: argparse.Namespace, names: list[str], settings: Settings, pages: list[str]) -> int:
    out = args.out or OUT
    results = Results(out, {"machine": machine(), "quick": settings.quick}, BENCHMARKS)
    _load(results, args.resume)
    results.add_command(_command(args, settings), today(), names)
    cases = [(name, case) for name in names for case in BENCHMARKS[name].cases(settings)]
    if args.resume:
        cases = [(name, case) for name, case in cases if case.key not in results.records]
    for key, record in _measured(cases):
        results.add(key, record)
    _write(results, out)
    _publish(results, pages, ROOT / "docs")
    broken = [record for record in results.records.values() if record.strict and record.verdict == "over"]
    for record in broken:
        _say(f"failed: {record.benchmark}, {record.facts}: {brief(record)}")
    return 1 if broken else 0


def _load(results: Results, resume: bool) -> None:
    """Read the results of earlier runs. Those that no longer count are kept in another file."""
    if obstacle := results.load():
        if resume:
            raise UsageError(f"--resume: {obstacle}. Leave out --resume, or choose another --out")
        _say(f"{obstacle}; kept as {results.put_aside()}")
    elif results.outdated:
        names = ", ".join(results.outdated)
        _say(f"the code has changed since these results, which no longer count: {names}; kept in {results.put_aside()}")


def _command(args: argparse.Namespace, settings: Settings) -> str:
    words = ["lucid bench", *(["--all"] if args.all else args.names), "--threads", *map(str, settings.threads)]
    words += ["--device", settings.device] if args.device else []
    return " ".join(words + ["--quick"] * args.quick + ["--resume"] * args.resume + ["--publish"] * args.publish)


def _measured(cases: Sequence[tuple[str, Case]]) -> Iterator[tuple[str, Record]]:
    """Run cases, each with the name of its benchmark, and print the progress."""
    load = os.getloadavg()[0]
    if load > BUSY:
        _say(f"warning: this machine is busy (load {load:.1f}); comparisons will scatter")
    speed = attention_speed()
    expected = {case.key: case.estimate(speed) for _, case in cases}
    total = sum(expected.values())
    _say(f"{count(len(cases), 'case')}, about {_duration(total)}")
    run_start, done_estimate = time.perf_counter(), 0.0
    for n, (name, case) in enumerate(cases, 1):
        start = time.perf_counter()
        with threads(case.threads):
            record = case.run()
        yield case.key, record
        now = time.perf_counter()
        done_estimate += expected[case.key]
        seconds_left = (total - done_estimate) * (now - run_start) / done_estimate
        where = ", ".join(filter(None, (name, name and count(case.threads, "thread"), case.label)))
        times = f"{_duration(now - start)}, {_duration(seconds_left)} left"
        _say(f"[{n:>3}/{len(cases)}] {where}: {brief(record)}  [{times}]")


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _say(text: str) -> None:
    print(text, flush=True)


def _pages(names: Sequence[str]) -> list[str]:
    """The pages of benchmarks. Raises an error if none of them has one."""
    pages = {BENCHMARKS[name].page for name in names}
    if pages == {""}:
        raise UsageError(f"--publish: no page of docs/ has tables of {', '.join(names)}")
    return [page for page in PAGES if page in pages]


def _draw(results: Results, page: Page, folder: Path) -> Path | None:
    """The picture of a page; None without records to draw."""
    records: list[Record] = [record for record in results.records.values() if record.benchmark == page.benchmark]
    if not records:
        return None
    PLOTS[page.benchmark](records, folder / page.picture)
    return folder / page.picture


def _write(results: Results, out: Path) -> None:
    pictures = {page.picture: page.caption for page in PAGES.values() if _draw(results, page, out)}
    text = document("Benchmarks", list(BENCHMARKS.values()), results, pictures)
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.md").write_text(text)
    _say("\n" + text)
    _say("written: " + ", ".join(str(out / name) for name in ("results.md", "results.json", *pictures)))


def _publish(results: Results, names: Sequence[str], docs: Path) -> None:
    """Put the tables of this machine into pages of docs/, beside those of other machines."""
    for name in names:
        page, file = PAGES[name], docs / PAGES[name].file
        published = Published.of(file.read_text() if file.exists() else "")
        published.add(_on_page(name), results)
        if picture := _draw(results, page, docs / "images"):
            caption = f"{page.caption}, {machine_label(results.about['machine'])}"
            published.picture = f"![{caption}]({picture.relative_to(docs).as_posix()})"
        others = [PAGES[other] for other in PAGES if other != name]
        see = [other for other in others if (docs / other.file).exists()]
        file.write_text(published.render(page.title, _on_page(name), see, results.about["quick"]))
        _say(f"published: docs/{page.file}" + (f", docs/images/{picture.name}" if picture else ""))
