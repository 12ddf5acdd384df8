"""Reports of a run during training: a progress bar, and metrics.jsonl."""

import json
import math
import sys
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import TrainerCallback

from lucid_attention.files import UnreadableFile, parse_json, read_bytes, write_whole

METRICS = "metrics.jsonl"


class Progress(TrainerCallback):
    """A progress bar with loss, tokens per second, memory and time left. Only the first process shows it."""

    def __init__(self) -> None:
        self.bar: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.bar = tqdm(
                total=state.max_steps,
                initial=state.global_step,
                unit="step",
                desc="train",
                dynamic_ncols=True,
                mininterval=0.5 if sys.stderr.isatty() else 30,
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.bar is None or not logs:
            return
        if "loss" in logs:
            postfix = {"loss": f"{logs['loss']:.4f}"}
            if "tokens_per_second" in logs:
                postfix["tok/s"] = f"{logs['tokens_per_second']:,.0f}"
            postfix["GB"] = f"{logs.get('memory_gb', 0):.2f}"
            self.bar.set_postfix(postfix)
        elif "eval_loss" in logs:
            self.bar.write(f"step {state.global_step}: validation loss {logs['eval_loss']:.4f}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None


class MetricsFile(TrainerCallback):
    """Writes every log entry as a line of JSON. A resumed run begins with the entries of its checkpoint."""

    def __init__(self, run: Path) -> None:
        self.path = run / METRICS

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            write_whole(self.path, "".join(_line(entry["step"], entry) for entry in state.log_history))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        # The trainer logs the mean loss since the last entry. A checkpoint does not hold that sum: log before saving.
        control.should_log |= control.should_save
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and logs:
            with self.path.open("a") as file:
                file.write(_line(state.global_step, logs))


def _line(step: int, logs: dict[str, Any]) -> str:
    numbers = {key: value for key, value in logs.items() if isinstance(value, (int, float)) and key != "step"}
    # JSON has no NaN and no infinity.
    values = {key: value if math.isfinite(value) else str(value) for key, value in numbers.items()}
    # Sorted, as in checkpoints: a resumed run writes the same lines.
    return json.dumps({"step": step, **dict(sorted(values.items()))}) + "\n"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The entries of a metrics file. A line that a kill cut off, and any other that is no entry, is left out."""
    entries = []
    for number, line in enumerate(read_bytes(path).splitlines() if path.exists() else [], 1):
        try:
            entry = parse_json(line, f"{path}, line {number}")
        except UnreadableFile:
            continue
        if isinstance(entry.get("step"), int):
            entries.append(entry)
    return entries
