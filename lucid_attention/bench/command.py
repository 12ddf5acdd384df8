"""`python -m benchmarks`: run benchmarks, write tables."""

import argparse
import os
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

from .cases import (
    accuracy,
    bf16,
    decode,
    growth,
    linear,
    memory,
    model_decode,
    model_training,
    path,
    path_decode,
    path_memory,
    small_training,
    solve,
)
from .gate import WrongAnswer
from .harness import attention_speed, machine, threads, today
from .report import PAGES, Page, brief, count, document, plot_growth, plot_linear
from .results import ROOT, Benchmark, Case, Record, Settings, Store, fingerprint

MODULES = (
    solve,
    bf16,
    decode,
    memory,
    growth,
    accuracy,
    path,
    path_decode,
    path_memory,
    linear,
    model_training,
    model_decode,
    small_training,
)
BENCHMARKS: dict[str, Benchmark] = {module.BENCHMARK.name: module.BENCHMARK for module in MODULES}
# Who draws the records of a benchmark.
PLOTS = {growth.BENCHMARK.name: plot_growth, linear.BENCHMARK.name: plot_linear}
# A load above this is other people's work.
BUSY = 0.5


def _help() -> str:
    parts = ["benchmarks (durations on two cores; all of them, which is the default, about 80 minutes):"]
    for benchmark in BENCHMARKS.values():
        text = " ".join(filter(None, (benchmark.about, benchmark.limits, f"Takes {benchmark.minutes}.")))
        parts.append(textwrap.fill(f"{benchmark.name:13}{text}", 100, initial_indent="  ", subsequent_indent=" " * 15))
    parts.append(
        textwrap.fill(
            "Results are comparisons within one run, so a slow machine does no harm, but a busy one does, above all "
            "with several threads: run on a quiet one. Before anything is timed, every contestant must agree with the "
            "defining equation in float64; otherwise the run stops with exit code 1. It also ends with 1 if memory was "
            "not linear in the length. Being over another limit is reported, and not an error. Some virtual machines "
            "need a setting for bfloat16; `make bench ARGS=...` finds it.",
            100,
        )
    )
    return "\n\n".join(parts)


def _on(page: str) -> list[Benchmark]:
    return [benchmark for benchmark in BENCHMARKS.values() if benchmark.page == page]


def _contents() -> str:
    parts = [f"{page.file} ({', '.join(each.name for each in _on(name))})" for name, page in PAGES.items()]
    return " and ".join(parts)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Speed and memory of lucid_attention next to its peers, as ratios in one run.",
        epilog=_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="benchmark", help=f"any of {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument(
        "--threads",
        type=int,
        nargs="+",
        metavar="N",
        help="thread counts to run with; default: 1, or 1 2 for a full run of all benchmarks. bf16, memory, "
        "growth, accuracy, path_memory and linear run with the first one alone, model_training with the largest",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds: a smoke test of about a minute")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("bench_results"),
        help="folder for results.json, results.md and the plots (default: %(default)s); results of the same code and "
        "machine that it holds already are kept beside the new ones",
    )
    parser.add_argument("--resume", action="store_true", help="do not repeat cases that --out already holds")
    parser.add_argument(
        "--publish",
        action="store_true",
        help=f"write the pages all of whose benchmarks are in --out, and their pictures, into docs/: {_contents()}",
    )
    return parser


def _settings(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Settings:
    for name in args.names:
        if name not in BENCHMARKS:
            parser.error(f"benchmark must be one of {', '.join(BENCHMARKS)}, got {name!r}")
    cores = os.cpu_count() or 1
    counts = args.threads or ([1] if args.names or args.quick or cores == 1 else [1, 2])
    for n in counts:
        if not 1 <= n <= cores:
            parser.error(f"--threads must be between 1 and the {cores} cores of this machine, got {n}")
    if args.publish and args.quick:
        parser.error("--publish wants real numbers: leave out --quick")
    return Settings(tuple(dict.fromkeys(counts)), args.quick)


def _command(args: argparse.Namespace, settings: Settings) -> str:
    words = ["python -m benchmarks", *args.names, "--threads", *map(str, settings.threads)]
    return " ".join(words + ["--quick"] * args.quick + ["--resume"] * args.resume + ["--publish"] * args.publish)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _say(text: str) -> None:
    print(text, flush=True)


def _run(cases: Sequence[tuple[str, Case]], store: Store, speed: float) -> None:
    expected = {case.key: case.estimate(speed) for _, case in cases}
    total = sum(expected.values())
    _say(f"{count(len(cases), 'case')}, about {_duration(total)}")
    begin, behind = time.perf_counter(), 0.0
    for n, (name, case) in enumerate(cases, 1):
        start = time.perf_counter()
        with threads(case.threads):
            record = case.run()
        store.add(case.key, record)
        now = time.perf_counter()
        behind += expected[case.key]
        left = (total - behind) * (now - begin) / behind
        _say(
            f"[{n:>3}/{len(cases)}] {name}, {count(case.threads, 'thread')}, {case.label}: {brief(record)}"
            f"  [{_duration(now - start)}, {_duration(left)} left]"
        )


def _complete_pages(parser: argparse.ArgumentParser, names: Sequence[str], store: Store) -> list[str]:
    """Pages that can be published once `names` have run; an error if none of those that `names` stand on is one."""
    there = {record.benchmark for record in store.records.values()} | set(names)
    missing = {name: [each.name for each in _on(name) if each.name not in there] for name in PAGES}
    asked = {BENCHMARKS[name].page for name in names}
    if all(missing[name] for name in asked):
        lacks = "; ".join(f"{PAGES[name].file} lacks {', '.join(missing[name])}" for name in PAGES if name in asked)
        parser.error(f"--publish wants all benchmarks of a page in --out: {lacks}. Run them first")
    return [name for name in PAGES if not missing[name]]


def _draw(store: Store, page: Page, folder: Path) -> Path | None:
    """The picture of a page, if there is anything to be drawn."""
    records: list[Record] = [record for record in store.records.values() if record.benchmark == page.benchmark]
    if not records:
        return None
    PLOTS[page.benchmark](records, folder / page.picture)
    return folder / page.picture


def _write(store: Store, out: Path) -> None:
    drawn = {page.picture: page.caption for page in PAGES.values() if _draw(store, page, out)}
    text = document("Benchmarks", list(BENCHMARKS.values()), store, drawn)
    (out / "results.md").write_text(text)
    _say("\n" + text)
    _say("written: " + ", ".join(str(out / name) for name in ("results.md", "results.json", *drawn)))


def _publish(store: Store, names: Sequence[str], docs: Path) -> None:
    for name in names:
        page = PAGES[name]
        picture = _draw(store, page, docs / "images")
        pictures = {picture.relative_to(docs).as_posix(): page.caption} if picture else {}
        others = [PAGES[other] for other in PAGES if other != name]
        see = [other for other in others if (docs / other.file).exists() or other in [PAGES[each] for each in names]]
        (docs / page.file).write_text(document(page.title, _on(name), store, pictures, see))
        _say(f"published: {', '.join(['docs/' + page.file, *(f'docs/{each}' for each in pictures)])}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    settings = _settings(parser, args)
    about = {"machine": machine(), "code": fingerprint(), "quick": settings.quick}
    store = Store(args.out, about)
    if obstacle := store.load():
        if args.resume:
            parser.error(f"--resume: {obstacle}. Start anew without --resume, or choose another --out")
        _say(f"{obstacle}; kept as {store.put_aside()}")
    names = args.names or list(BENCHMARKS)
    pages = _complete_pages(parser, names, store) if args.publish else []
    store.add_command(_command(args, settings), today(), names)
    load = os.getloadavg()[0]
    if load > BUSY:
        _say(f"warning: this machine is busy (load {load:.1f}); comparisons will scatter")
    chosen = [(name, case) for name in names for case in BENCHMARKS[name].cases(settings)]
    if args.resume:
        chosen = [(name, case) for name, case in chosen if case.key not in store.records]
    try:
        _run(chosen, store, attention_speed())
    except WrongAnswer as error:
        _say(f"stopped: {error}")
        return 1
    except KeyboardInterrupt:
        _say(f"\ninterrupted; finished cases are in {store.path}, `--resume` goes on from there")
        return 130
    _write(store, args.out)
    _publish(store, pages, ROOT / "docs")
    broken = [record for record in store.records.values() if record.strict and record.verdict == "over"]
    for record in broken:
        _say(f"failed: {record.benchmark}, {record.facts}: {brief(record)}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
