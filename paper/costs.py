"""What the paper's scripts cost, and whether they fit their GPUs: python paper/costs.py [SCRIPT...]

Without a script: all of them, into paper/costs.md, with PROTOCOL=authors / paper where they differ. The commands come
from the scripts themselves (DRY=print); a step that needs more memory than a GPU has (GPU_MEMORY, 80 GB) is an error.
Nothing runs. Times are a model, not measured: an H100 at 40 % of its bfloat16 rate in products with weights, flash
attention at 60 %, and what records/gpu/costs.json predicts for the kernels of LUCID and PaTH.
"""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from lucid_lab.evals.evaluate import FAMILIES
from lucid_lab.training.recipes import Recipe, find_recipe
from lucid_lab.training.run import FITS, memory_needs, planned_model

PAPER = Path(__file__).parent
RATE, WEIGHTS_SHARE, FLASH_SHARE, TRAFFIC = 989e12, 0.4, 0.6, 0.6 * 3.35e12
KERNELS = {"lucid": "LUCID", "path": "PaTH", "lucid_path": "LUCID-PaTH"}
# Tokens of an answer, by task; questions of a data set; tokens of the sources.
ANSWERS = {"mniah": 128, "sniah": 128, "babilong": 32, "longbench": 64, "scrolls": 256}
QUESTIONS = {"longbench": 550, "qasper": 1726, "qmsum": 272}
SOURCE_TOKENS = 10_000_000_000


@dataclass(frozen=True)
class Cost:
    """Of a step. hours: of all GPUs together; memory: bytes on each; disk: bytes."""

    training: float = 0
    evaluation: float = 0
    memory: int = 0
    disk: float = 0


def value(words: list[str], name: str, default: str = "") -> str:
    return words[words.index(name) + 1] if name in words else default


@cache
def ratio(attention: str, length: int, kv_heads: int, backward: bool) -> float:
    """The time of an attention over that of flash attention."""
    if attention not in KERNELS:
        return 1.0
    shape = "paper's 1B, 2K × 8" if length <= 8192 else "paper's 1B, 32K"
    if kv_heads > 8 and attention == "lucid":
        shape = "paper's 32 heads of 64, 8K"
    rows = json.loads((PAPER.parent / "records" / "gpu" / "costs.json").read_text())
    wanted = (KERNELS[attention], shape, "H100 SXM", "backward" if backward else "forward")
    return next(r["ratio"] for r in rows if (r["attention"], r["shape"], r["gpu"], r["pass"]) == wanted)


def attention_seconds(config: Any, attention: str, tokens: float, length: int, *, train: bool, again: bool) -> float:
    """Of all layers that see everything. again: the forward pass runs twice (checkpointing)."""
    names = [attention] * config.num_hidden_layers
    if isinstance(config.attention, list):
        names = [name for name in config.attention if name != "sliding"]
    forward = 2.0 * tokens * length * config.head_dim * config.num_attention_heads / (FLASH_SHARE * RATE)
    heads = config.num_key_value_heads
    passes = (1 + again) * ratio(attention, length, heads, False)
    passes += 2.5 * ratio(attention, length, heads, True) if train else 0
    return len(names) * forward * passes


def parameters(model: Any) -> tuple[int, int]:
    """All, and those in products with tokens."""
    all_of_them = sum(weight.numel() for weight in model.parameters())
    return all_of_them, all_of_them - (
        0 if model.config.tie_word_embeddings else model.get_input_embeddings().weight.numel()
    )


def main_attention(recipe: Recipe) -> str:
    return recipe.attention if isinstance(recipe.attention, str) else "lucid"


class Plan:
    """The recipes of a script by the folder of their runs, and the cost of every command."""

    def __init__(self, gpus: int, gigabytes: float) -> None:
        self.gpus, self.gigabytes = gpus, gigabytes
        self.recipes: dict[str, Recipe] = {}
        self.models: dict[str, Any] = {}
        self.costs: dict[str, Cost] = {}
        self.misfits: list[str] = []

    def add(self, line: str) -> Cost:
        if line in self.costs:
            return self.costs[line]
        words = shlex.split(line)[1:]
        known = {"train": self.train, "eval": self.evaluate, "tokenize": self.tokenize}
        cost = known[words[0]](words) if words[0] in known else Cost()
        if cost.memory > FITS * 1e9 * self.gigabytes:
            needs = f"{cost.memory / 1e9:.0f} GB on each GPU, and {FITS:.0%} of {self.gigabytes:g} GB can be used"
            self.misfits.append(f"{line}\n  does not fit: it needs about {needs}")
        self.costs[line] = cost
        return cost

    def train(self, words: list[str]) -> Cost:
        start, data, out = value(words, "--from"), value(words, "--data"), value(words, "--out")
        changes = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
        recipe = replace(find_recipe(words[1]), data=data, attention=value(words, "--attention", "lucid"))
        if start:
            first = self.recipes[start.removesuffix("/model")]
            names = ("preset", "model", "attention", "attention_options")
            recipe = replace(recipe, **{name: getattr(first, name) for name in names})
        recipe = self.recipes[out] = recipe.changed(changes, self.gpus)
        if out not in self.models:
            self.models[out] = planned_model(recipe)
        model, parallel = self.models[out], value(words, "--parallel", "ddp")
        count, used = parameters(model)
        again, attention = recipe.gradient_checkpointing, main_attention(recipe)
        seconds = (8 if again else 6) * used * recipe.tokens / (WEIGHTS_SHARE * RATE)
        seconds += attention_seconds(
            model.config, attention, recipe.tokens, recipe.sequence_length, train=True, again=again
        )
        memory = sum(memory_needs(recipe, model, self.gpus, parallel).values())
        # Checkpoints have weights and two moments; the model at the end has weights.
        return Cost(training=seconds / 3600, memory=memory, disk=count * (12 * recipe.keep + 4))

    def evaluate(self, words: list[str]) -> Cost:
        run = words[1].removesuffix("/model")
        recipe, model = self.recipes[run], self.models[run]
        count, used = parameters(model)
        config, seconds, memory = model.config, 0.0, 0
        task, batch = value(words, "--tasks"), int(value(words, "--batch-size", "1"))
        axes = FAMILIES[task].axes
        cells = len(value(words, "--variants").split(",")) if "--variants" in words else len(axes.get("variant", "1"))
        cells *= len(value(words, "--needles").split(",")) if "--needles" in words else 1
        cells *= len(axes["story"]) if "story" in axes else 1
        for length in map(int, value(words, "--lengths", value(words, "--max-length")).split(",")):
            samples = QUESTIONS[value(words, "--variants", task)] if task in ("longbench", "scrolls") else 0
            samples = samples or cells * int(value(words, "--samples"))
            tokens = samples * length
            cache = 2 * config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * length * batch
            seconds += 2 * used * tokens / (WEIGHTS_SHARE * RATE)
            seconds += attention_seconds(config, main_attention(recipe), tokens, length, train=False, again=False)
            seconds += samples / batch * ANSWERS[task] * (2 * count + cache) / TRAFFIC
            active = 2 * batch * length * (4 * config.hidden_size + 2 * config.intermediate_size)
            memory = max(memory, 2 * count + cache + active)
        return Cost(evaluation=seconds / 3600, memory=memory)

    def tokenize(self, words: list[str]) -> Cost:
        tokens = float(value(words, "--limit-tokens") or SOURCE_TOKENS) * float(value(words, "--share", "1"))
        # Blocks are joined at the end: both exist for a while.
        return Cost(disk=2 * tokens * (4 if "256k" in words[2] else 2))


def commands(script: Path) -> list[str]:
    done = subprocess.run(
        ["sh", str(script)], env=os.environ | {"DRY": "print"}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{script}: {done.stderr}")
    return [line for line in done.stdout.splitlines() if line.startswith("lucid ")]


def summed(costs: list[Cost]) -> Cost:
    return Cost(
        sum(cost.training for cost in costs),
        sum(cost.evaluation for cost in costs),
        max((cost.memory for cost in costs), default=0),
        sum(cost.disk for cost in costs),
    )


def cell(values: list[float], digits: int = 0) -> str:
    """What both protocols cost; one value if it is the same."""
    return " / ".join(dict.fromkeys(f"{value:,.{digits if value < 10 else 0}f}" for value in values))


def row(name: str, about: str, costs: list[Cost]) -> str:
    hours = [cell([cost.training for cost in costs], 1), cell([cost.evaluation for cost in costs], 1)]
    sizes = [cell([cost.memory / 1e9 for cost in costs]), cell([cost.disk / 1e9 for cost in costs])]
    return f"| {' | '.join([name, about, *hours, *sizes])} |"


COLUMNS = ("script", "what", "training, GPU hours", "evaluation, GPU hours", "memory of a GPU, GB", "disk, GB")
HEAD = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


def step_ratios() -> str:
    """A training step with LUCID over one with softmax attention, without checkpointing."""
    lengths, rows = (2048, 8192, 32_768, 65_536), []
    for preset in ("paper_1b", "qwen2_5_1_5b", "paper_16_layer"):
        cells = []
        for length in lengths:
            seconds = {}
            for attention in ("softmax", "lucid"):
                model = planned_model(replace(find_recipe("pretrain_2k"), preset=preset, attention=attention))
                products = 6 * parameters(model)[1] * length / (WEIGHTS_SHARE * RATE)
                solving = attention_seconds(model.config, attention, length, length, train=True, again=False)
                seconds[attention] = products + solving
            cells.append(f"{seconds['lucid'] / seconds['softmax']:.2f}")
        rows.append(f"| {preset} | {' | '.join(cells)} |")
    head = f"| training step, LUCID / softmax | {' | '.join(map(str, lengths))} |"
    return "\n".join([head, "|---" * (1 + len(lengths)) + "|", *rows])


def main(chosen: list[Path]) -> int:
    scripts = chosen or sorted(path for path in PAPER.glob("*.sh") if path.stem != "settings")
    gpus = int(os.environ.get("GPUS", 8)) * int(os.environ.get("NODES", 1))
    gigabytes = float(os.environ.get("GPU_MEMORY", 80))
    protocols = [os.environ.get("PROTOCOL", "authors")] if chosen else ["authors", "paper"]
    plans = [Plan(gpus, gigabytes) for _ in protocols]
    rows = []
    for script in scripts:
        costs = []
        for protocol, plan in zip(protocols, plans, strict=True):
            os.environ["PROTOCOL"] = protocol
            lines = list(dict.fromkeys(commands(script)))
            if chosen:
                print("\n".join(lines))
            costs.append(summed([plan.add(line) for line in lines]))
        about = script.read_text().splitlines()[1].removeprefix("# ").partition(". ")[0].rstrip(".")
        rows.append(row(script.stem, about, costs))
    rows.append(row("all", "each step once", [summed(list(plan.costs.values())) for plan in plans]))
    table = "\n".join([HEAD, *rows])
    print(table)
    misfits = [misfit for plan in plans for misfit in plan.misfits]
    if not chosen and not misfits:
        text = __doc__.partition("\n\n")[2].strip() if __doc__ else ""
        head = f"# What the paper's runs cost\n\nWritten by `python paper/costs.py`: {gpus} GPUs of {gigabytes:g} GB."
        (PAPER / "costs.md").write_text(f"{head}\n{text}\n\n{table}\n\n{step_ratios()}\n")
    print("\n".join(misfits), file=sys.stderr)
    return 1 if misfits else 0


if __name__ == "__main__":
    sys.exit(main([Path(name) for name in sys.argv[1:]]))
