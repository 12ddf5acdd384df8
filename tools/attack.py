"""Attack the commands: kills, wrong arguments, damaged files, interrupts. Prints what was tried and what was clean.

    python tools/attack.py [--quick] [--seed N] [--only kills,inputs,damage,interrupts]
    python tools/attack.py --folder runs/attack --minutes 5     repeat it until nothing is left

Everything runs on tiny data in a temporary folder, or in --folder, which keeps what was tried: the same command
continues from there, and tries again what was not clean. The exit code is 1 if anything was not clean, 3 if attacks
are left.
"""

import argparse
import collections
import contextlib
import hashlib
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from attack_cases import BAD_INPUTS, COMMANDS, DAMAGES, LLAMA, READERS, VOCABULARY, WAYS, Damage

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 120.0
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
TRACEBACK = "Traceback (most recent call last)"
# Seconds.
PYTHON_STARTS = 0.2
# What the operating system and shells call the end by a signal.
STOP_CODES = {signal.SIGINT: (130, -2), signal.SIGTERM: (143, -15)}
# Names of what depends on the speed of the machine.
TIMED = re.compile("second|time|memory|GB|flos")
KINDS = ("kills", "inputs", "damage", "interrupts")


class Ended(NamedTuple):
    """code: None if the command did not end in time. left: processes that were alive after it."""

    code: int | None
    out: str
    err: str
    seconds: float
    left: bool


class Attack(NamedTuple):
    """number: in its kind. make: makes the attack and says why it was not clean."""

    kind: str
    number: int
    what: str
    make: Callable[[], str]


class Outcome(NamedTuple):
    """The result of one attack; why: empty if it was clean. code: the fingerprint of what was attacked."""

    kind: str
    number: int
    what: str
    why: str
    code: str


class World:
    """The folder in which the commands run, with a finished output of each, and the time that each took."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seconds: dict[str, float] = {}
        self.results: dict[str, Any] = {}
        self._number, self._lock = 0, threading.Lock()

    def words(self, line: str, out: Path | None = None, **others: Path) -> list[str]:
        """The words of a command line. others: what {names} stand for instead of the files of this world."""
        names = {path.name.partition(".")[0]: path for path in self.folder.iterdir()}
        names |= {"out": out or self.fresh("out"), "long": self.folder / ("n" * 300), "none": self.folder / "none"}
        names |= others
        names["model"] = names.get("run", self.folder / "run") / "model"
        return [word.format_map(names) for word in shlex.split(line)]

    def fresh(self, name: str) -> Path:
        """A path that no other attack uses."""
        with self._lock:
            self._number += 1
            folder = self.folder.with_name("attacks") / str(self._number)
        folder.mkdir(parents=True)
        return folder / name


def lucid(words: list[str], stop: signal.Signals | None = None, after: float = 0.0) -> Ended:
    """Run a command as a terminal does, in a process group of its own. stop: sent to it after so many seconds."""
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "lucid_lab.cli", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
        start_new_session=True,
        # A process in the background of a shell ignores Ctrl-C, and its children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    timer = threading.Timer(after, _send, (process.pid, stop)) if stop else None
    if timer:
        timer.start()
    try:
        out, err = process.communicate(timeout=TIMEOUT)
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        _send(process.pid, signal.SIGKILL, group=True)
        out, err = process.communicate()
        code = None
    finally:
        if timer:
            timer.cancel()
    seconds = time.monotonic() - started
    left = _group_lives(process.pid, 10)
    _send(process.pid, signal.SIGKILL, group=True)
    return Ended(code, out.decode(errors="replace"), err.decode(errors="replace"), seconds, left)


def _send(pid: int, stop: signal.Signals, group: bool = False) -> None:
    """Ctrl-C and the signal of schedulers go to the group, kill -9 to the process."""
    with contextlib.suppress(ProcessLookupError):
        (os.kill if stop is signal.SIGKILL and not group else os.killpg)(pid, stop)


def _group_lives(group: int, seconds: float) -> bool:
    """Whether a process of the group still lives after this time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.05)
    return True


def result_of(command: str, out: Path) -> Any:
    """What a command has computed, without times and machines."""
    if command == "tokens":
        # What was verified has times of files.
        others = (".lock", ".lock.json", "verified.json")
        return {path.name: digest(path) for path in sorted(out.iterdir()) if path.name not in others}
    if command == "run":
        entries = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        summary = json.loads((out / "summary.json").read_text())
        return untimed(entries), summary["validation_loss"], digest(out / "model" / "model.safetensors")
    if command == "scores":
        cells = json.loads((out / "results.json").read_text())["cells"]
        scores = [[cell["labels"], cell["mean"], cell["standard_error"]] for cell in cells]
        return scores, {path.name: digest(path) for path in sorted((out / "samples").iterdir())}
    if command == "experiment":
        records = {path.parent.name: json.loads(path.read_text())["record"] for path in out.glob("jobs/*/record.json")}
        verdicts = [json.loads(path.read_text())["verdict"] for path in out.glob("*/result.json")]
        return verdicts, {name: untimed(record) for name, record in sorted(records.items())}
    return None


def untimed(content: Any) -> Any:
    """The content without what depends on the speed of the machine."""
    if isinstance(content, dict):
        return {key: untimed(value) for key, value in content.items() if not TIMED.search(key)}
    return [untimed(item) for item in content] if isinstance(content, list) else content


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else "folder"


def difference(command: str, out: Path, world: World) -> str:
    """Why the result in `out` is not that of the command that nothing disturbed; empty if it is."""
    try:
        result = result_of(command, out)
    except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
        return f"wrong result: it cannot be read: {type(error).__name__}: {error}"
    ours, theirs = (json.dumps(each, sort_keys=True) for each in (result, world.results.get(command)))
    if ours == theirs:
        return ""
    pairs = enumerate(zip(ours, theirs, strict=False))
    place = next((at for at, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
    start = max(0, place - 60)
    return f"wrong result: …{ours[start : place + 40]}… and undisturbed …{theirs[start : place + 40]}…"


def complaint(ended: Ended) -> str:
    """What is wrong with the way a command ended, whatever it was asked; empty if nothing is."""
    text = ended.out + ended.err
    if ended.code is None:
        return f"no end after {TIMEOUT:.0f} s"
    if TRACEBACK in text:
        errors = [line for line in text.splitlines() if re.match(r"[\w.]+(Error|Exception|Interrupt)", line)]
        last = errors[-1] if errors else ""
        return f"traceback: {last[:150]}"
    return "processes are left" if ended.left else ""


def refusal(ended: Ended) -> str:
    """Why the end is not a refusal in one clear message; empty if it is."""
    if why := complaint(ended):
        return why
    if ended.code == 0:
        return "accepted: exit code 0"
    if ended.code not in (1, 2):
        return f"exit code {ended.code}"
    messages = [line for line in ended.err.splitlines() if re.search(r"(^|\r)lucid.*: error: ", line)]
    if len(messages) != 1:
        return f"{len(messages)} messages: {ended.err.strip()[-150:]!r}"
    return "" if len(messages[0]) < 1000 else "a message of more than 1,000 characters"


def build(world: World) -> None:
    """Make the inputs, and run every command once."""
    folder = world.folder
    texts = folder / "texts"
    texts.mkdir(parents=True)
    chance = random.Random(0)
    for number in range(1, 6):
        documents = [" ".join(chance.choices(VOCABULARY, k=60)) for _ in range(40)]
        (texts / f"{number}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    (folder / "prose.txt").write_text("\n\n".join(" ".join(chance.choices(VOCABULARY, k=300)) for _ in range(8)))
    (folder / "empty").mkdir()
    (folder / "notes").mkdir()
    (folder / "notes" / "mine.txt").write_text("not to be overwritten")
    (folder / "file").write_text("a file")
    (folder / "blank.txt").write_text("\n  \n")
    (folder / "latin.txt").write_bytes("Übung macht müde".encode("latin-1"))
    (folder / "bad_lines.jsonl").write_text('{"text": "good"}\n{"text": \n[1]\n')
    (folder / "bad_parquet.parquet").write_bytes(b"PAR1 not really PAR1")
    (folder / "bad_gzip.jsonl.gz").write_bytes(b"\x1f\x8b not really")
    for name, line in COMMANDS.items():
        ended = lucid(world.words(line, out=folder / name))
        why = complaint(ended)
        if ended.code != 0 or why:
            raise SystemExit(f"attack: undisturbed, lucid {line} ends with {ended.code}:\n{ended.err[-2000:]}{why}")
        world.seconds[name] = ended.seconds
        world.results[name] = result_of(name, folder / name)
        print(f"  undisturbed {name}: {ended.seconds:.1f} s", flush=True)
    subprocess.run([sys.executable, "-c", LLAMA, str(folder / "llama")], check=True, env=ENVIRONMENT)
    for path in (folder / "run" / "model").glob("*token*"):
        shutil.copy(path, folder / "llama")


def kill(world: World, command: str, moments: list[float]) -> str:
    """kill -9 at these moments (shares of the command's time), then run to the end."""
    out = world.fresh(command)
    words = world.words(COMMANDS[command], out=out)
    for moment in moments:
        ended = lucid(words, signal.SIGKILL, moment * world.seconds[command])
        if ended.code not in (0, -signal.SIGKILL):
            return complaint(ended) or f"exit code {ended.code}: {ended.err.strip()[-150:]}"
    ended = lucid(words)
    if ended.code != 0:
        return complaint(ended) or f"does not resume, exit code {ended.code}: {ended.err.strip()[-150:]}"
    left = [path.name for path in out.rglob("*") if path.name.startswith(".tmp") or path.name.endswith(".partial")]
    return complaint(ended) or difference(command, out, world) or (f"left behind: {', '.join(left)}" if left else "")


def interrupt(world: World, command: str, stop: signal.Signals, moment: float) -> str:
    """Ctrl-C or SIGTERM at this moment, but not before `lucid` can see it: Python itself takes a while to start."""
    line = (COMMANDS | READERS)[command]
    for share in (moment, moment / 2, moment / 4):
        ended = lucid(world.words(line), stop, max(PYTHON_STARTS, share * world.seconds.get(command, 8.0)))
        if ended.code != 0:
            break
    if why := complaint(ended):
        return why
    if ended.code not in STOP_CODES[stop]:
        return f"exit code {ended.code} after {stop.name}: {ended.err.strip()[-150:]}"
    return "warnings of the resource tracker" if "resource_tracker" in ended.err else ""


def damage(world: World, case: Damage, way: str, seed: int) -> str:
    """Damage a file of a copy, then repeat the command there: the same result or a refusal, never another result."""
    # Only the damaged folder is a copy: records of other paths would not be used again.
    folder = Path(shutil.copytree(world.folder / case.folder, world.fresh(case.folder)))
    for name in case.removed:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    files = sorted(path for path in folder.glob(case.files) if path.is_file())
    if not files:
        return f"the tool is wrong: no {case.folder}/{case.files}"
    files[0].write_bytes(WAYS[way](files[0].read_bytes(), random.Random(seed)))
    # A command repeats itself in the folder that holds the damaged file, and starts anew from a damaged input.
    out = folder if case.command == case.folder else world.fresh("out")
    ended = lucid(world.words((COMMANDS | READERS)[case.command], out, **{case.folder: folder}))
    if why := complaint(ended):
        return why
    if ended.code != 0:
        is_named = files[0].name in ended.err or str(files[0].parent) in ended.err
        return refusal(ended) or ("" if is_named else f"the damaged file is not named: {ended.err.strip()[-150:]}")
    return "" if case.changes else difference(case.command, out, world)


def attacks(world: World, kinds: list[str], seed: int, quick: bool) -> Iterator[Attack]:
    """Every attack of these kinds, or some of each."""
    chance = random.Random(seed)
    few = {"kills": 8, "inputs": 30, "damage": 30, "interrupts": 10}
    made: dict[str, list[tuple[str, Callable[[], str]]]] = collections.defaultdict(list)
    for command in list(COMMANDS) * 8:
        moments = [chance.uniform(0.05, 1) for _ in range(chance.choice((1, 1, 2)))]
        times = ", ".join(f"{moment * world.seconds[command]:.2f} s" for moment in moments)
        made["kills"].append((f"kill -9 after {times}: {COMMANDS[command]}", _call(kill, world, command, moments)))
    for line in BAD_INPUTS:
        made["inputs"].append((line, _call(lambda line: refusal(lucid(world.words(line))), line)))
    for case in DAMAGES:
        for way in WAYS:
            about = f"{way} {case.folder}/{case.files}: {(COMMANDS | READERS)[case.command]}"
            made["damage"].append((about, _call(damage, world, case, way, chance.randrange(2**32))))
    for command in [*COMMANDS, *READERS]:
        for stop in list(STOP_CODES) * 3:
            moment = chance.uniform(0.02, 0.9)
            about = f"{stop.name} after {moment:.0%} of its time: {(COMMANDS | READERS)[command]}"
            made["interrupts"].append((about, _call(interrupt, world, command, stop, moment)))
    for kind in kinds:
        numbers = range(len(made[kind]))
        for number in chance.sample(numbers, min(few[kind], len(numbers))) if quick else numbers:
            yield Attack(kind, number, *made[kind][number])


def _call(function: Callable[..., str], *arguments: Any) -> Callable[[], str]:
    return lambda: function(*arguments)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a random part of the attacks")
    parser.add_argument("--seed", type=int, default=0, help="of moments, places and the part (default: 0)")
    parser.add_argument("--only", default=",".join(KINDS), help=f"kinds of attacks (default: {','.join(KINDS)})")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="attacks at a time")
    parser.add_argument("--folder", type=Path, help="keeps what was tried (default: a temporary folder)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="starts no attack after this time")
    args = parser.parse_args()
    kinds = args.only.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"--only must be of {', '.join(KINDS)}, got {', '.join(unknown)}")
    end = time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory(prefix="lucid-attack-") as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        code = fingerprint()
        world = open_world(folder, code)
        cases = list(attacks(world, kinds, args.seed, args.quick))
        record = folder / f"tried-seed-{args.seed}.jsonl"
        kept = [Outcome(*json.loads(line)) for line in record.read_text().splitlines()] if record.exists() else []
        tried = {outcome[:2]: outcome for outcome in kept}
        left = [case for case in cases if case[:2] not in tried or tried[case[:2]].why]
        with record.open("a") as log, ThreadPoolExecutor(args.processes) as pool:
            for outcome in pool.map(lambda case: attempt(case, code, end), left):
                if outcome is None:
                    continue
                tried[outcome[:2]] = outcome
                log.write(json.dumps(outcome) + "\n")
                log.flush()
                word = f"not clean ({outcome.why})" if outcome.why else "clean"
                print(f"  {outcome.kind} {outcome.number}: {word}: {outcome.what[:150]}", flush=True)
    return summarize([tried[case[:2]] for case in cases if case[:2] in tried], kinds, len(cases), code)


def fingerprint() -> str:
    """A hash of the code that is attacked, and of the attacks."""
    files = [*sorted((ROOT / "lucid_attention").rglob("*.py")), *sorted((ROOT / "tools").glob("attack*.py"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]


def open_world(folder: Path, code: str) -> World:
    """The world in this folder, made anew if there is none or if other code made it."""
    world, made = World(folder / "world"), folder / "world.json"
    shutil.rmtree(folder / "attacks", ignore_errors=True)
    if made.exists() and (kept := json.loads(made.read_text()))["code"] == code:
        world.seconds, world.results = kept["seconds"], kept["results"]
        return world
    made.unlink(missing_ok=True)
    shutil.rmtree(world.folder, ignore_errors=True)
    build(world)
    made.write_text(json.dumps({"code": code, "seconds": world.seconds, "results": world.results}))
    return world


def attempt(case: Attack, code: str, end: float) -> Outcome | None:
    """Make one attack; None if there is no time for it any more."""
    return Outcome(*case[:3], case.make(), code) if time.monotonic() < end else None


def summarize(outcomes: list[Outcome], kinds: list[str], total: int, code: str) -> int:
    """Print every failure, then the table. Returns the exit code."""
    for outcome in sorted(item for item in outcomes if item.why):
        print(f"\n{outcome.kind} {outcome.number}: {outcome.what}\n    {outcome.why}")
    print(f"\n{'attack':<12} {'tried':>5} {'clean':>5} {'tracebacks':>10} {'wrong results':>13}")
    for kind in kinds:
        whys = [outcome.why for outcome in outcomes if outcome.kind == kind]
        tracebacks, wrong = (sum(why.startswith(word) for why in whys) for word in ("traceback", "wrong result"))
        print(f"{kind:<12} {len(whys):>5} {whys.count(''):>5} {tracebacks:>10} {wrong:>13}")
    if older := sum(outcome.code != code for outcome in outcomes):
        print(f"{older} of these {len(outcomes)} were tried on other versions of the code")
    if left := total - len(outcomes):
        print(f"{left} of {total} attacks are left")
    return 1 if any(outcome.why for outcome in outcomes) else 3 if left else 0


if __name__ == "__main__":
    sys.exit(main())
