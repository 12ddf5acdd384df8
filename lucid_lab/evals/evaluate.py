"""`lucid eval`: our tasks with lm-evaluation-harness, which runs, scores, averages and keeps answers.

`lucid compare`: differences between checkpoints on the same samples, with their paired standard errors.
"""

import hashlib
import json
import logging
import math
import re
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from lm_eval import simple_evaluate
from lm_eval.api.group import Group
from lm_eval.config.group import AggMetricConfig
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable, make_table
from transformers import GenerationConfig

from lucid_attention.files import parse_json, read_json, read_text, write_whole
from lucid_attention.messages import did_you_mean, text_table
from lucid_attention.models.checkpoint import check_checkpoint, checkpoint_name, load_model

from ..locks import locked
from . import babilong, longqa, needles
from .tokens import load_tokenizer

# For `lm_eval --include_path`.
TASK_FOLDER = Path(__file__).parent / "tasks"
RESULTS = "results.json"
# The harness drops the beginning of a prompt above the model's limit: report no limit.
NO_LIMIT = 1 << 40
# Files of a checkpoint up to this size count by content, larger ones and weights by size and time.
SMALL = 1 << 26
# Options whose values are an axis of the table, by the name of a value in the metadata of a task.
AXES = {"variant": "variants", "name": "variants", "story": "qa", "needles": "needles", "length": "lengths"}
LENGTHS = {"length": (2048, 4096)}
SAMPLED = ("samples", "seed")
TEXTS = (*SAMPLED, "haystack", "answer_tokens")
LONG_QA = ("data_dir", "max_length", "answer_tokens")

Options = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """A name of `--tasks`: lm-eval tasks for every combination of the values of its axes.

    task: the name of the lm-eval task. about: a line for the listing. axes: metadata with default values; the first
    axis are tasks, whose mean is taken. takes: other options, which become metadata. metric: of means; "" for none.
    """

    task: str
    about: str
    axes: dict[str, tuple[Any, ...]]
    takes: tuple[str, ...]
    metric: str = ""


def _suite(name: str) -> dict[str, tuple[Any, ...]]:
    return {"name": tuple(task for task, settings in longqa.TASKS.items() if settings.suite == name)}


FAMILIES = {
    "sniah": Family(
        "lucid_sniah", "a needle in a haystack: RULER's single_1 to single_3",
        {"variant": tuple(needles.SINGLE)} | LENGTHS, TEXTS, "score",
    ),
    "mniah": Family(
        "lucid_mniah", "N needles in a haystack, one is asked for: RULER's multikey_1; others by --variants",
        {"variant": ("multikey_1",), "needles": (2, 4, 6, 8, 10)} | LENGTHS, TEXTS, "score",
    ),
    "babilong": Family(
        "lucid_babilong", "stories of bAbI in a long text: the original's strict score, the harness's lax one",
        {"story": tuple(babilong.TASKS), "length": (0, 2048, 4096)}, (*TEXTS, "babilong_hub"), "strict",
    ),
    "longbench": Family(
        "lucid_{name}", "2WikiMQA, HotpotQA, MultifieldQA (F1, 0 to 1), from the hub or --data-dir",
        _suite("longbench"), ("part", *LONG_QA), "qa_f1_score",
    ),
    "scrolls": Family(
        "lucid_{name}", "Qasper (F1), QMSum (ROUGE), 0 to 100, from the hub or --data-dir", _suite("scrolls"), LONG_QA
    ),
    "perplexity": Family(
        "lucid_perplexity", "loss and perplexity of a text", {"length": (2048,)}, (*SAMPLED, "text")
    ),
}  # fmt: skip


def listing() -> str:
    """The names of `--tasks`, a line each."""
    return "\n".join(f"{name:<13} {family.about}" for name, family in FAMILIES.items())


def make_tasks(names: Sequence[str], options: Options, tokenizer: str) -> list[Any]:
    """Tasks and groups of the harness, with their samples. Wrong options are refused here, before a model is loaded."""
    if unknown := [name for name in names if name not in FAMILIES]:
        hint = did_you_mean(unknown[0], FAMILIES)
        raise ValueError(f"--tasks must be some of {', '.join(FAMILIES)}, or list, got {unknown[0]!r}{hint}")
    families = {name: FAMILIES[name] for name in names}
    known = {AXES.get(axis, axis) for family in families.values() for axis in (*family.axes, *family.takes)}
    if unused := set(options) - known:
        flags = [", ".join("--" + name.replace("_", "-") for name in sorted(some)) for some in (known, unused)]
        raise ValueError(f"{', '.join(names)} takes {flags[0]}, and not {flags[1]}")
    made = []
    for name, family in families.items():
        shared = {"tokenizer": tokenizer} | {key: value for key, value in options.items() if key in family.takes}
        cells = _cells(name, family, options)
        tasks = [_task(name, family, cell, shared) for cell in cells]
        made += [_group(name, family, cells, tasks)] if family.metric and len(tasks) > 1 else tasks
    return made


def _cells(name: str, family: Family, options: Options) -> list[dict[str, Any]]:
    """The values of the axes, one of each, for every combination."""
    axes = {axis: tuple(dict.fromkeys(options.get(AXES.get(axis, ""), values))) for axis, values in family.axes.items()}
    known = needles.SINGLE | needles.MULTIPLE
    if "variant" in axes:  # --variants may name tasks of sniah and of mniah.
        takes = needles.SINGLE if name == "sniah" else needles.MULTIPLE
        own = tuple(value for value in axes["variant"] if value in takes or value not in known)
        if not own:
            raise ValueError(f"--variants must hold some of {', '.join(takes)} for {name}")
        axes["variant"] = own
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def _task(name: str, family: Family, cell: dict[str, Any], shared: Options) -> Any:
    # The index of the harness's own tasks would take seconds to make.
    manager = TaskManager(include_path=TASK_FOLDER, include_defaults=False, metadata=shared | cell)
    base = family.task.format(**cell)
    task = manager.load([base])["tasks"][base]
    task.set_config("task", _cell_name(name, cell))
    if room := task.eval_docs[0].get("answer_tokens"):
        task.set_config("generation_kwargs", {"max_gen_toks": room}, update=True)
    return task


def _cell_name(name: str, cell: dict[str, Any]) -> str:
    """A name for tables and files, such as mniah-multikey_1-needles_4-2048."""
    parts = [f"needles_{value}" if axis == "needles" else str(value) for axis, value in cell.items()]
    return re.sub(r"[^A-Za-z0-9_-]+", "_", "-".join((name, *parts)))


def _group(name: str, family: Family, cells: list[dict[str, Any]], tasks: list[Any]) -> Group:
    """A group of all tasks, with a group of the tasks of the first axis for all values of the others."""
    mean = [AggMetricConfig(family.metric, weight_by_size=False)]
    groups: dict[str, Group] = {}
    for cell, task in zip(cells, tasks, strict=True):
        rest = _cell_name(name, dict(list(cell.items())[1:]))
        groups.setdefault(rest, Group(rest, aggregate_metric_list=mean)).add(task)
    whole = Group(name, aggregate_metric_list=mean)
    for group in groups.values():
        for member in [group] if len(group) > 1 and len(groups) > 1 else group:
            whole.add(member)
    return whole


class Evaluation(NamedTuple):
    """folder: of the results. results: the harness's, of this call; None in all processes but the first."""

    folder: Path
    results: dict[str, Any] | None


class EvaluatedModel(HFLM):
    """The harness's model, except that it never cuts a prompt, answers with the most probable tokens, and shares the
    samples with the other processes of torchrun."""

    def __init__(self, model: Any, tokenizer: Any, batch_size: int) -> None:
        self.accelerator = Accelerator(cpu=not torch.accelerator.is_available())
        model.to(self.accelerator.device)
        # Losses are logarithms of probabilities: bfloat16 would round them.
        super().__init__(
            pretrained=model, tokenizer=tokenizer, max_length=NO_LIMIT, batch_size=batch_size, softmax_dtype="float32"
        )
        # A checkpoint's own limits, beams and penalties would change its answers: only its special tokens count.
        # Without an end token, the harness generates until every answer of the batch has one of the tokenizer's.
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        special = {name: getattr(model.generation_config, name) for name in names}
        if special["eos_token_id"] is None:
            special["eos_token_id"] = self.eot_token_id
        model.generation_config = GenerationConfig(**special)

    @property
    def rank(self) -> int:
        """The number of this process."""
        return int(self.accelerator.process_index)

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return int(self.accelerator.num_processes)


def identity(folder: Path) -> str:
    """A hash of what a checkpoint answers: its files, weights by size and time. The local base of an adapter counts."""
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.iterdir() if path.is_file()):
        status = file.stat()
        by_time = file.suffix in (".safetensors", ".bin", ".pt") or status.st_size > SMALL
        content = f"{status.st_size} {status.st_mtime_ns}".encode() if by_time else file.read_bytes()
        digest.update(f"{file.name} {hashlib.sha256(content).hexdigest()}\n".encode())
    adapter = folder / "adapter_config.json"
    base = read_json(adapter).get("base_model_name_or_path") if adapter.is_file() else None
    if isinstance(base, str) and Path(base).is_dir() and Path(base).resolve() != folder.resolve():
        digest.update(identity(Path(base)).encode())
    return digest.hexdigest()


def result_name(checkpoint: Path) -> str:
    """A name for the results of a checkpoint, which changes with it."""
    return f"{checkpoint_name(checkpoint)}-{identity(checkpoint)[:8]}"


def evaluate(
    checkpoint: Path,
    tasks: Sequence[str],
    options: Options,
    out: Path | None = None,
    *,
    tokenizer: Path | None = None,
    batch_size: int = 1,
    limit: int | None = None,
    dtype: str = "auto",
) -> Evaluation:
    """Evaluate a checkpoint, and write results.json and samples_TASK.jsonl into a folder, as the harness does.

    tasks: names of `FAMILIES`. options: by their names on the command line, as in {"lengths": (2048,), "samples": 10}.
    out: None for results/NAME-HASH. Answers are kept in it: the same call resumes.
    """
    check_checkpoint(checkpoint)
    for name, value in {"batch-size": batch_size, "limit": 1 if limit is None else limit}.items():
        if value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    tokenizer_folder, digest = tokenizer or checkpoint, identity(checkpoint)
    out = out or Path("results") / result_name(checkpoint)
    if out.resolve() == checkpoint.resolve():
        raise ValueError(f"--out must be another folder than the checkpoint, got {str(out)!r}")
    earlier = _earlier_results(out, digest)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    made = make_tasks(tasks, options, str(tokenizer_folder))
    loaded = load_tokenizer(str(tokenizer_folder))
    model = load_model(checkpoint, dtype)
    known = model.get_input_embeddings().num_embeddings
    if len(loaded) > known:
        raise ValueError(f"the model knows {known} tokens, and the tokenizer has {len(loaded)}: it is of another model")
    lm = EvaluatedModel(model, loaded, batch_size)
    # What identifies an answer: the checkpoint, the tokenizer and the dtype, and in the harness the request.
    answers = hashlib.sha256(f"{digest} {identity(tokenizer_folder)} {dtype}".encode()).hexdigest()[:16]
    with locked(out) if lm.rank == 0 else nullcontext():
        results: Any = simple_evaluate(
            model=lm,
            tasks=made,
            # Without it the harness reads the files of all its own tasks, for seconds.
            task_manager=TaskManager(include_defaults=False),
            batch_size=batch_size,
            limit=limit,
            use_cache=str(out / f"answers-{answers}"),
            log_samples=True,
            bootstrap_iters=1000,
        )
        if results is not None:
            config = model.config.get_text_config(decoder=True)
            about = {"name": checkpoint_name(checkpoint), "path": str(checkpoint), "sha256": digest}
            attention = getattr(config, "attention", None) or config._attn_implementation
            _save(results, earlier, out, about | {"model_type": config.model_type, "attention": attention})
    lm.barrier()
    return Evaluation(out, results)


def _earlier_results(out: Path, digest: str) -> dict[str, Any]:
    """Results of the same checkpoint in the folder."""
    if not (out / RESULTS).is_file():
        return {}
    earlier = read_json(out / RESULTS)
    if earlier.get("checkpoint", {}).get("sha256") != digest:
        raise ValueError(f"--out {str(out)!r} holds results of another checkpoint, or of this one before it changed")
    return dict(earlier)


def _save(results: dict[str, Any], earlier: dict[str, Any], out: Path, checkpoint: dict[str, Any]) -> None:
    """Write the results. The harness's own writer only warns if the disk is full."""
    for name, samples in results.pop("samples").items():
        lines = [json.dumps(sample, default=handle_non_serializable) for sample in samples]
        write_whole(out / f"samples_{name}.jsonl", "\n".join(lines) + "\n")
    merged = {
        key: earlier.get(key, {}) | value if isinstance(value, dict) and key != "config" else value
        for key, value in results.items()
    }
    write_whole(
        out / RESULTS, json.dumps(merged | {"checkpoint": checkpoint}, indent=1, default=handle_non_serializable)
    )


def results_table(results: dict[str, Any]) -> str:
    """The harness's tables: of tasks, and of groups if there are some."""
    tables = [make_table(results)]
    if results.get("groups"):
        tables.append(make_table(results, "groups"))
    return "\n".join(tables)


def paired_difference(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """The mean of b − a over the samples, and its standard error: infinite for one sample."""
    gaps = [after - before for before, after in zip(a, b, strict=True)]
    return fmean(gaps), stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.inf


def read_scores(folder: Path, task: str) -> tuple[list[str], dict[str, list[float]]]:
    """Of the samples that `lucid eval` has written: their hashes, in order, and their scores, by metric."""
    file = folder / f"samples_{task}.jsonl"
    # Not splitlines: a text may hold other line ends.
    lines = [parse_json(line, f"{file}, line {i}") for i, line in enumerate(read_text(file).split("\n"), 1) if line]
    try:
        lines.sort(key=lambda line: line["doc_id"])
        # A perplexity is no mean over samples.
        metrics = [name for name in lines[0]["metrics"] if name != "perplexity"]
        hashes = [f"{line['doc_hash']} {line['prompt_hash']}" for line in lines]
        return hashes, {name: [float(line[name]) for line in lines] for name in metrics}
    except (IndexError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: expected samples of `lucid eval`, got {type(error).__name__}: {error}") from error


def comparison(folders: Sequence[Path], tasks: Iterable[str] | None = None) -> str:
    """A table: scores of the first folder of results, and differences of the others.

    tasks: to compare; None for all that the folders have in common.
    """
    contents = [read_json(folder / RESULTS) for folder in folders]
    if any("checkpoint" not in content or "configs" not in content for content in contents):
        raise ValueError(f"expected folders with {RESULTS} of `lucid eval`, got {', '.join(map(str, folders))}")
    known = tasks if tasks is not None else contents[0]["configs"]
    shared = [task for task in known if all(task in content["configs"] for content in contents)]
    if not shared:
        raise ValueError("the results have no task in common: expected the same tasks, lengths and needles")
    names = [str(content["checkpoint"]["name"]) for content in contents]
    labels = names if len(set(names)) == len(names) else [f"{name} ({i})" for i, name in enumerate(names, 1)]
    rows = [["task", "metric", "samples", labels[0], *(f"{label} − {labels[0]}" for label in labels[1:])]]
    for task in shared:
        (hashes, first), *others = (read_scores(folder, task) for folder in folders)
        if any(other != hashes for other, _ in others):
            raise ValueError(f"{task}: the samples differ: evaluate with the same tokenizer, seed, samples and options")
        for metric, scores in first.items():
            gaps = [paired_difference(scores, other[metric]) for _, other in others]
            shown = [f"{mean:+.4f} ± {error:.4f}{' *' * (abs(mean) > 2 * error)}" for mean, error in gaps]
            rows.append([task, metric, str(len(scores)), f"{fmean(scores):.4f}", *shown])
    return f"{text_table(rows)}\n\n± paired standard error over samples; * more than two standard errors"


def compare(
    folders: Sequence[Path], tasks: Sequence[str], options: dict[str, Any], out: Path, **how: Any
) -> str | None:
    """Compare checkpoints, which are evaluated into folders of `out`, and results of `lucid eval`.

    tasks, options, how: as for `evaluate`. Returns the table; None in all processes but the first.
    """
    checkpoints = [folder for folder in folders if not (folder / RESULTS).is_file()]
    if not checkpoints and (tasks or options):
        raise ValueError("--tasks and their options are for checkpoints, and these folders hold results")
    for folder in checkpoints:
        check_checkpoint(folder)
        if not tasks:
            raise ValueError(f"{str(folder)!r} holds no {RESULTS}: to evaluate checkpoints, give --tasks")
    done = {folder: evaluate(folder, tasks, options, out / result_name(folder), **how) for folder in checkpoints}
    results = [evaluation.results for evaluation in done.values()]
    if None in results:
        return None
    names = results[0]["configs"] if results and results[0] else None
    return comparison([done[folder].folder if folder in done else folder for folder in folders], names)
