"""RULER's variable tracking, common words and frequent words: the harness's own samples and score.

The harness makes 500 samples from the global random state, and goes on for ever where none fits. Here the number and
the seed are given, the state is put back, and what cannot fit is refused.
"""

import contextlib
import io
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ..runs import EvalError, Options, Run
from ..spans import count, load_tokenizer

# Of the example in variable tracking's prompt, as in the harness; more where a tokenizer needs more.
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

    # Below 4096 tokens the harness repeats its words less often.
    example, text, answer = cwe_utils.generate_input_output(20, 256)
    return example + text + " ".join(answer)


def _frequent(tokenizer: Any, length: int, samples: int) -> list[dict[str, Any]]:
    from lm_eval.tasks.ruler.fwe_utils import sys_kwext

    # The harness forgets the answer in this length.
    return sys_kwext(tokenizer, length - TASKS["fwe"].answer_tokens, samples)


def _smallest_frequent() -> str:
    from lm_eval.tasks.ruler.fwe_utils import TEMPLATE

    return TEMPLATE.format(context="...", query="")


def _tokens(tokenizer: Any, text: str) -> int:
    """With room for samples that are longer: the harness does not stop where one does not fit."""
    return int(1.1 * count(tokenizer, text))


TASKS = {
    "vt": Task(30, _tracking, _smallest_tracking),
    "cwe": Task(120, _common, _smallest_common),
    "fwe": Task(50, _frequent, _smallest_frequent),
}


@contextlib.contextmanager
def _seeded(*seed: int | str) -> Iterator[None]:
    """The global random states, which the harness draws from, set and then put back."""
    before = random.getstate(), np.random.get_state()
    random.seed("/".join(map(str, seed)))
    np.random.seed(random.getrandbits(32))
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def runs(options: Options) -> list[Run]:
    """Every task at every length."""
    tokenizer = load_tokenizer(options.tokenizer)
    cells = []
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
            labels: dict[str, int | str] = {"task": name, "length": length}
            room = task.answer_tokens
            cells.append(Run(labels, "score", "lucid_ruler", metadata=metadata, answer_tokens=room, length=length))
    return cells


def _check_fits(name: str, task: Task, tokenizer: Any, length: int) -> None:
    with _seeded(name):
        needed = _tokens(tokenizer, task.smallest()) + task.answer_tokens
    if needed > length:
        raise EvalError(f"ruler {name} needs {needed} tokens with this tokenizer, more than --lengths {length}")


def dataset(*, tokenizer: str, samples: int, seed: int, length: int, name: str, **_: Any) -> dict[str, Any]:
    """What the harness's `custom_dataset` asks for. The arguments are the task's metadata."""
    from datasets import Dataset

    loaded = load_tokenizer(tokenizer)
    said = io.StringIO()
    with _seeded(seed, length, name), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        made = TASKS[name].make(loaded, length, samples)
    return {"test": Dataset.from_list(made)}
