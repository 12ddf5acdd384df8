"""RULER's variable tracking, common words and frequent words: the harness's own samples and score.

The harness makes 500 samples from the global random state, and never ends if no sample fits. Here the number of
samples and the seed are options, the random state is restored, and a length that is too short is refused.
"""

import contextlib
import io
import random
from collections.abc import Iterator
from typing import Any

import numpy as np

from .tokens import check_sizes, count_tokens, task_tokenizer

# Tokens for an answer.
TASKS = {"vt": 30, "cwe": 120, "fwe": 50}
# Tokens of the example in the prompt of variable tracking, as in the harness, unless the tokenizer needs more.
EXAMPLE_LENGTH = 500


def _smallest(name: str) -> str:
    """About the shortest prompt of a task, with its answer. "vt example": the example of variable tracking."""
    from lm_eval.tasks.ruler import cwe_utils, fwe_utils, vt_utils

    if name == "cwe":
        # Any length below 4096 gives the harness's small form, which repeats its words less often.
        example, text, answer = cwe_utils.generate_input_output(20, 256)
        return f"{example}{text}{' '.join(answer)}"
    if name == "fwe":
        return str(fwe_utils.TEMPLATE.format(context="...", query=""))
    example = str(vt_utils.generate_input_output(5, 1, 4, is_icl=True)[0])
    return example if name == "vt example" else f"{example}{vt_utils.generate_input_output(10, 1, 4)[0]}"


def _tokens(tokenizer: Any, name: str) -> int:
    """The tokens of a smallest prompt and 10 % more: the harness never ends if one of its samples does not fit."""
    return int(1.1 * count_tokens(tokenizer, _smallest(name))) + TASKS[name.partition(" ")[0]]


def _samples(name: str, tokenizer: Any, length: int, samples: int) -> list[dict[str, Any]]:
    from lm_eval.tasks.ruler import cwe_utils, fwe_utils, vt_utils

    if name == "cwe":
        cwe_utils.RNG.seed(random.random())
        return list(cwe_utils.sys_word_pair_random(samples, length, tokenizer))
    if name == "fwe":
        # The harness does not count the answer in this length.
        return list(fwe_utils.sys_kwext(tokenizer, length - TASKS[name], samples))
    make, example_length = vt_utils.sys_vartrack_w_noise_random, max(EXAMPLE_LENGTH, _tokens(tokenizer, "vt example"))
    example = make(tokenizer, 1, example_length, incremental=5)[0]
    return list(make(tokenizer, samples, length, icl_example=example))


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


def dataset(
    *, name: str = "vt", length: int = 2048, samples: int = 100, seed: int = 0, **metadata: Any
) -> dict[str, Any]:
    """The documents of `lucid_ruler`. The arguments are metadata of the task."""
    from datasets import Dataset

    if name not in TASKS:
        raise ValueError(f"name must be one of {', '.join(TASKS)}, got {name!r}")
    check_sizes(samples, length, seed)
    tokenizer = task_tokenizer(metadata)
    with _seeded(name):
        needed = _tokens(tokenizer, name)
    if needed > length:
        raise ValueError(f"ruler {name} needs {needed} tokens with this tokenizer, more than --lengths {length}")
    hidden = io.StringIO()
    with _seeded(seed, length, name), contextlib.redirect_stdout(hidden), contextlib.redirect_stderr(hidden):
        documents = _samples(name, tokenizer, length, samples)
    for document in documents:
        tokens = count_tokens(tokenizer, f"{document['input']} {document['gen_prefix']}")
        document |= {"tokens": tokens, "answer_tokens": TASKS[name]}
    return {"test": Dataset.from_list(documents)}
