"""RULER's variable tracking, common words and frequent words: the harness's own samples and score.

The harness makes 500 samples from the global random state, and never ends if no sample fits. Here the number of
samples and the seed are options, the random state is restored, and a length that is too short is refused.
"""

import contextlib
import io
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ..cells import Cell, EvalError, Labels, Options
from ..tokens import count_tokens, load_tokenizer

# Tokens of the example in the prompt of variable tracking, as in the harness, unless the tokenizer needs more.
EXAMPLE_LENGTH = 500


class Task(NamedTuple):
    """make: (tokenizer, length, samples) -> samples. smallest: about the shortest prompt with its answer."""

    answer_tokens: int
    make: Callable[[Any, int, int], list[dict[str, Any]]]
    smallest: Callable[[], str]


def _tracking(tokenizer: Any, length: int, samples: int) -> list[dict[str, Any]]:
    from lm_eval.tasks.ruler.vt_utils import sys_vartrack_w_noise_random as make

    needed = _tokens(tokenizer, _smallest_example()) + TASKS["vt"].answer_tokens
    example = make(tokenizer, 1, max(EXAMPLE_LENGTH, needed), incremental=5)[0]
    return make(tokenizer, samples, length, icl_example=example)


def _smallest_example() -> str:
    from lm_eval.tasks.ruler.vt_utils import generate_input_output

    return generate_input_output(5, 1, 4, is_icl=True)[0]


def _smallest_tracking() -> str:
    from lm_eval.tasks.ruler.vt_utils import generate_input_output

    return _smallest_example() + generate_input_output(10, 1, 4)[0]


def _common(tokenizer: Any, length: int, samples: int) -> list[dict[str, Any]]:
    from lm_eval.tasks.ruler import cwe_utils

    cwe_utils.RNG.seed(random.random())
    return cwe_utils.sys_word_pair_random(samples, length, tokenizer)


def _smallest_common() -> str:
    from lm_eval.tasks.ruler import cwe_utils

    # Any length below 4096 gives the harness's small form, which repeats its words less often.
    example, text, answer = cwe_utils.generate_input_output(20, 256)
    return example + text + " ".join(answer)


def _frequent(tokenizer: Any, length: int, samples: int) -> list[dict[str, Any]]:
    from lm_eval.tasks.ruler.fwe_utils import sys_kwext

    # The harness does not count the answer in this length.
    return sys_kwext(tokenizer, length - TASKS["fwe"].answer_tokens, samples)


def _smallest_frequent() -> str:
    from lm_eval.tasks.ruler.fwe_utils import TEMPLATE

    return TEMPLATE.format(context="...", query="")


def _tokens(tokenizer: Any, text: str) -> int:
    """The tokens of a smallest prompt and 10 % more: the harness never ends if one of its samples does not fit."""
    return int(1.1 * count_tokens(tokenizer, text))


TASKS = {
    "vt": Task(30, _tracking, _smallest_tracking),
    "cwe": Task(120, _common, _smallest_common),
    "fwe": Task(50, _frequent, _smallest_frequent),
}


@contextlib.contextmanager
def _seeded(*seed: int | str) -> Iterator[None]:
    """Seed the global random states, from which the harness draws, and restore them at the end."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    random.seed("/".join(map(str, seed)))
    np.random.seed(random.getrandbits(32))
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def cells(options: Options) -> list[Cell]:
    """A cell for every task and length."""
    tokenizer = load_tokenizer(options.tokenizer)
    made_cells = []
    for name, task in TASKS.items():
        for length in options.lengths or (2048, 4096):
            _check_fits(name, task, tokenizer, length)
            metadata = {
                "tokenizer": options.tokenizer,
                "samples": options.samples,
                "seed": options.seed,
                "length": length,
                "name": name,
            }
            labels: Labels = {"task": name, "length": length}
            room = task.answer_tokens
            made_cells.append(
                Cell(labels, "score", "lucid_ruler", metadata=metadata, answer_tokens=room, length=length)
            )
    return made_cells


def _check_fits(name: str, task: Task, tokenizer: Any, length: int) -> None:
    with _seeded(name):
        needed = _tokens(tokenizer, task.smallest()) + task.answer_tokens
    if needed > length:
        raise EvalError(f"ruler {name} needs {needed} tokens with this tokenizer, more than --lengths {length}")


def dataset(*, tokenizer: str, samples: int, seed: int, length: int, name: str, **_: Any) -> dict[str, Any]:
    """The harness's `custom_dataset`. The arguments are the cell's metadata."""
    from datasets import Dataset

    loaded = load_tokenizer(tokenizer)
    hidden = io.StringIO()
    with _seeded(seed, length, name), contextlib.redirect_stdout(hidden), contextlib.redirect_stderr(hidden):
        documents = TASKS[name].make(loaded, length, samples)
    return {"test": Dataset.from_list(documents)}
