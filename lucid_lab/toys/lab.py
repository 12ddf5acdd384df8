"""The laboratory of a claim: its scale, its seeds, and `map`, whose results are kept on disk.

    records = lab.map(train, [toy.but(seed=seed) for seed in lab.seeds])

runs `train(folder, toy)` for every item whose result is not kept yet, in parallel processes, and returns the results in
order. A result is kept in OUT/kept/NAME-HASH/record.json; the hash covers the function's name, its settings and its
code with everything that it imports from this repository. So after an interrupt the same command resumes, another claim
that trains the same model finds it, and after a change of the settings or of the code the function runs again.
"""

import ast
import hashlib
import importlib.util
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from lucid_attention.files import read_json, write_whole
from lucid_attention.messages import first_line

KEPT, RECORD, FAILED = "kept", "record.json", "failed.txt"
PACKAGES = ("lucid_attention", "lucid_lab")

Record = dict[str, Any]
Function = Callable[[Path, Any], Record]
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Scale:
    """How much of a claim is run. Settings of one claim are in its file.

    about: in a few words. seeds: every training is repeated with each of them.
    every_attention: where attentions are compared, all of ATTENTIONS take part; otherwise two or three.
    tiny: sizes that only show that a claim runs. Nothing is learned, so the claim is not judged.
    demo: the main comparison of a claim, without its further controls.
    """

    name: str
    about: str
    seeds: tuple[int, ...]
    every_attention: bool = True
    tiny: bool = False
    demo: bool = False


SMOKE = Scale("smoke", "does it run (seconds)", (0,), every_attention=False, tiny=True)
SMALL = Scale("small", "minutes on two cores, several seeds, a verdict", (0, 1, 2))
HOURS = Scale("hours", "tasks in words and variants, trained for longer: 106 minutes of one core", (0, 1, 2))
DEMO = Scale("demo", "9 to 16 minutes on two cores", (0, 1, 2), demo=True)
QUICK = Scale("quick", "one to three minutes on two cores", (0,), every_attention=False, demo=True)
SCALES = {scale.name: scale for scale in (SMOKE, QUICK, SMALL, HOURS, DEMO)}


class Lab:
    """What a claim gets: `def run(lab) -> Conclusion`.

    processes: functions that run at a time, one thread each; default one per core.
    restart: run again what was kept by earlier commands. quiet: no progress bar.
    model, texts: folders of a checkpoint and of long texts, for claims that need them.
    seconds, finished: processor time of all results that were asked for, and the day of the newest.
    """

    def __init__(
        self,
        scale: Scale,
        out: Path,
        *,
        processes: int | None = None,
        restart: bool = False,
        quiet: bool = False,
        model: str = "",
        texts: str = "",
    ) -> None:
        import joblib

        if processes is not None and processes < 1:
            raise ValueError(f"--processes must be at least 1, got {processes}")
        self.scale, self.seeds, self.tiny, self.out = scale, scale.seeds, scale.tiny, Path(out)
        self.processes: int = processes or joblib.cpu_count()
        self.restart, self.quiet, self.model, self.texts = restart, quiet, model, texts
        self.seconds, self._newest = 0.0, 0.0
        self._read: dict[Path, Record] = {}

    @property
    def finished(self) -> str:
        """The day of the newest result that was asked for, so that concluding again changes nothing."""
        return datetime.fromtimestamp(self._newest or time.time(), UTC).date().isoformat()

    def map(self, function: Function, settings: Sequence[Any], *, title: str = "", alone: bool = False) -> list[Record]:
        """The results of `function(folder, item)` for every item of `settings`, in order.

        function: of a module, by whose name worker processes find it. It may write files into its folder. It returns
            what JSON can write; "folder", the folder's name, is added to that. A function with that name among its
            settings finds the files of an earlier one in `folder.parent / name`.
        settings: of dataclasses, dictionaries, lists, texts and numbers.
        title: for the progress bar. alone: one at a time, in this process, because it measures time.
        """
        folders = [self.out / KEPT / key(function, item) for item in settings]
        todo = {folder: item for folder, item in zip(folders, settings, strict=True) if not self._kept(folder)}
        if todo:
            one_by_one = alone or self.processes == 1 or len(todo) == 1
            calls = [(function, item, folder) for folder, item in todo.items()]
            finished = _here(calls) if one_by_one else _in_processes(calls, self.processes)
            self._show(finished, len(calls), title or function.__name__.replace("_", " "))
            for folder in todo:
                self._read[folder] = read_json(folder / RECORD)
                self._note(folder)
        return [self._read[folder]["result"] | {"folder": folder.name} for folder in folders]

    def map_groups(
        self, function: Function, groups: Mapping[K, Sequence[Any]], *, title: str = ""
    ) -> dict[K, list[Record]]:
        """`map` over several lists of settings at once: the results by the names of the lists."""
        records = iter(self.map(function, [item for group in groups.values() for item in group], title=title))
        return {name: [next(records) for _ in group] for name, group in groups.items()}

    def _kept(self, folder: Path) -> bool:
        """Whether the result in this folder can be used. A damaged record is reported and made again."""
        if folder not in self._read and not self.restart:
            try:
                self._read[folder] = read_json(folder / RECORD)
            except FileNotFoundError:
                return False
            except ValueError as error:
                print(f"{first_line(error)}. It is made again", file=sys.stderr, flush=True)
                return False
            self._note(folder)
        return folder in self._read

    def _note(self, folder: Path) -> None:
        self.seconds += float(self._read[folder]["seconds"])
        self._newest = max(self._newest, (folder / RECORD).stat().st_mtime)

    def _show(self, finished: Iterator[None], count: int, title: str) -> None:
        """One bar on a terminal; elsewhere a line every half minute."""
        from tqdm import tqdm

        interval = 0.5 if sys.stderr.isatty() else 30.0
        with tqdm(total=count, desc=f"  {title}", unit="run", disable=self.quiet, mininterval=interval) as bar:
            for _ in finished:
                bar.update()


def key(function: Function, settings: Any) -> str:
    """The name of the folder of a result: equal for the same function, settings and code."""
    identity = [function.__module__, function.__qualname__, fingerprint(function.__module__), settings]
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True, default=asdict).encode()).hexdigest()
    return f"{function.__name__}-{digest[:16]}"


def _run(function: Function, settings: Any, folder: Path) -> None:
    """Call a function on one thread and keep its result, whole or not at all."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    threads, start = torch.get_num_threads(), time.process_time()
    torch.set_num_threads(1)
    try:
        result = function(folder, settings)
        seconds = round(time.process_time() - start, 3)
        record = {"function": function.__qualname__, "settings": settings, "seconds": seconds, "result": result}
        write_whole(folder / RECORD, json.dumps(record, allow_nan=False, default=asdict))
        (folder / FAILED).unlink(missing_ok=True)
    except Exception as error:
        (folder / FAILED).write_text(f"{function.__qualname__} {settings}\n\n{traceback.format_exc()}")
        where = f"{type(error).__name__}: {first_line(error)}"
        raise RuntimeError(f"{function.__qualname__} failed with {where}. {folder / FAILED} has the details") from error
    finally:
        torch.set_num_threads(threads)


def _here(calls: Sequence[tuple[Function, Any, Path]]) -> Iterator[None]:
    for call in calls:
        _run(*call)
        yield


def _in_processes(calls: Sequence[tuple[Function, Any, Path]], processes: int) -> Iterator[None]:
    """Run calls in joblib's processes, which stay for the next `map`."""
    from joblib import Parallel, delayed, parallel_config

    with parallel_config(backend="loky", inner_max_num_threads=1):
        pool = Parallel(n_jobs=min(processes, len(calls)), return_as="generator_unordered")
        yield from pool(delayed(_run_in_worker)(os.getpid(), *call) for call in calls)


def _run_in_worker(parent: int, function: Function, settings: Any, folder: Path) -> None:
    # A terminal sends Ctrl-C to all processes. Only the parent answers it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with(parent)
    _run(function, settings, folder)


@cache
def _end_with(parent: int) -> None:
    """End this worker when its parent has ended, even by SIGKILL: the next command may write into the same folder."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@cache
def fingerprint(module: str) -> str:
    """A hash of a module's file and of all files of PACKAGES that it imports, directly or through others.

    Imports count at any depth, also inside functions. Modules whose names are computed (`import_module`) do not count,
    nor do the `__init__.py` of whole packages, which only collect public names.
    """
    hashes: dict[str, str] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        file = None if name in hashes or name in PACKAGES else _file(name)
        if file is not None:
            hashes[name], imported = _source(name, file)
            waiting += imported
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()


@cache
def _source(module: str, file: Path) -> tuple[str, list[str]]:
    """The hash of a file, and what it imports: modules, the packages around them, and names that are no modules."""
    content = file.read_bytes()
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    names: list[str] = []
    for node in ast.walk(ast.parse(content)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            names += [f"{base}.{alias.name}" for alias in node.names]
    ours = [name.split(".") for name in names if name.partition(".")[0] in PACKAGES]
    return hashlib.sha256(content).hexdigest(), [".".join(name[:n]) for name in ours for n in range(2, len(name) + 1)]


@cache
def _file(module: str) -> Path | None:
    """The file of a module, found without importing it; None if there is no such module."""
    loaded = sys.modules.get(module)
    if loaded is not None and getattr(loaded, "__file__", None):
        return Path(str(loaded.__file__))
    root, *parts = module.split(".")
    spec = importlib.util.find_spec(root)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder, *parts)
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file():
                return file
    return None
