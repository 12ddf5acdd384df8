"""Requests of different lengths in Transformers' continuous batching: LUCID's paged attention next to sdpa's."""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from ..gate import WrongAnswer
from ..harness import Run, Spread, race, ratios
from ..report import fact, milliseconds, ratio
from ..results import Benchmark, Case, Column, Entry, Record, Settings

SDPA, RAGGED, LUCID = "sdpa", "softmax, ragged", "LUCID"
PAGE = 32
BUDGET = 30.0
# Large weights, and a constant in the embeddings: keys so similar that LUCID and softmax choose different tokens.
SCALE, SHIFT = 6.0, 0.05


class Load(NamedTuple):
    """Requests that come at the same time. prompts: from the shortest to the longest, in equal steps."""

    requests: int
    shortest: int
    longest: int
    new: int
    layers: int = 2
    hidden: int = 1024

    def lengths(self) -> list[int]:
        step = (self.longest - self.shortest) / max(1, self.requests - 1)
        return [round(self.shortest + step * index) for index in range(self.requests)]


LOADS = (Load(1, 512, 512, 32), Load(16, 64, 512, 32), Load(64, 32, 128, 32))
QUICK = (Load(4, 8, 40, 4, hidden=64),)
# The load of the check: prompts that are split, and that share steps.
CHECK = Load(5, 5, 60, 8, hidden=64)


def _model(load: Load) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = max(4, load.hidden // 64)
    config = LlamaConfig(
        hidden_size=load.hidden,
        intermediate_size=11 * load.hidden // 4,
        num_hidden_layers=load.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        vocab_size=1024,
        max_position_embeddings=8192,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def _sharpen(model: Any) -> Any:
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(SCALE if weight.ndim == 2 else 1.0)
        model.get_input_embeddings().weight.add_(SHIFT)
    return model


def _contestants(model: Any) -> dict[str, Any]:
    from lucid_attention import enable_lucid

    lucid, ragged = copy.deepcopy(model), copy.deepcopy(model)
    return {SDPA: model, RAGGED: enable_lucid(ragged, strength=0.0), LUCID: enable_lucid(lucid)}


def _prompts(load: Load) -> list[list[int]]:
    random = torch.Generator().manual_seed(load.requests)
    return [torch.randint(1, 1024, (length,), generator=random).tolist() for length in load.lengths()]


@contextmanager
def _serving(model: Any, load: Load, threads: int) -> Iterator[Any]:
    """A running manager with room for the load. The engine's thread gets the thread count of the case."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    blocks = sum(-(-(length + load.new) // PAGE) + 1 for length in load.lengths())
    hook = model.register_forward_pre_hook(lambda *_: torch.set_num_threads(threads))
    try:
        with model.continuous_batching_context_manager(
            generation_config=GenerationConfig(do_sample=False, max_new_tokens=load.new, eos_token_id=-1),
            # No sharing: a second round would find the prompts of the first one in the cache.
            continuous_batching_config=ContinuousBatchingConfig(
                num_blocks=2 * blocks, page_size=PAGE, max_batch_tokens=512, allow_block_sharing=False
            ),
        ) as manager:
            yield manager
    finally:
        hook.remove()


def _answers(manager: Any, prompts: list[list[int]]) -> list[list[int]]:
    """What the manager answers to all prompts."""
    names = manager.add_requests(prompts)
    found: dict[str, list[int]] = {}
    while len(found) < len(names):
        result = manager.get_result(timeout=1)
        if result is not None:
            if result.error is not None:
                raise RuntimeError(f"a request failed: {result.error}")
            found[result.request_id] = result.generated_tokens
        elif not manager.is_running():
            raise RuntimeError("the manager of continuous batching has stopped")
    return [found[name] for name in names]


def check(load: Load = CHECK) -> None:
    """Both sides must give every request the tokens of generate() for it alone, and LUCID's must not be softmax's."""
    prompts, said = _prompts(load), {}
    for name, model in _contestants(_sharpen(_model(load))).items():
        with _serving(model, load, 1) as manager:
            said[name] = _answers(manager, prompts)
        alone = [
            model.generate(torch.tensor([prompt]), max_new_tokens=load.new, do_sample=False)[0, len(prompt) :].tolist()
            for prompt in prompts
        ]
        if said[name] != alone:
            raise WrongAnswer(f"serving: {name!r} does not give the tokens of generate(). Nothing was timed")
    if said[SDPA] != said[RAGGED] or said[LUCID] == said[SDPA]:
        raise WrongAnswer("serving: LUCID and softmax are not told apart by their tokens. Nothing was timed")


def _measure(load: Load, threads: int, settings: Settings) -> Record:
    check()
    prompts = _prompts(load)
    with ExitStack() as stack:
        managers = {
            name: stack.enter_context(_serving(model, load, threads))
            for name, model in _contestants(_model(load)).items()
        }
        runs: dict[str, Run] = {name: partial(_answers, manager, prompts) for name, manager in managers.items()}
        budget = settings.budget if settings.quick else BUDGET
        times = race(runs, budget=budget, seed=str(load), least=settings.least)
    entries = {name: Entry(Spread.of(rounds), ratios(rounds, times[SDPA])) for name, rounds in times.items()}
    facts: dict[str, int | str] = {
        "requests": load.requests,
        "prompts": f"{load.shortest}–{load.longest}",
        "new": load.new,
        **{f"{name} tokens/s": round(load.requests * load.new / entries[name].seconds.median) for name in entries},  # type: ignore[union-attr]
    }
    return Record("serving", threads, facts, entries)


def _cases(settings: Settings) -> list[Case]:
    return [
        Case(
            key=f"serving {threads} {load}",
            label=f"{load.requests} requests of {load.shortest} to {load.longest} tokens",
            threads=threads,
            run=partial(_measure, load, threads, settings),
            fixed=2.0 if settings.quick else BUDGET + 15,
        )
        for threads in settings.threads
        for load in (QUICK if settings.quick else LOADS)
    ]


BENCHMARK = Benchmark(
    name="serving",
    about=(
        "Requests of different lengths that come at the same time, answered by Transformers' continuous batching: a "
        f"Llama of 2 layers of width 1024 (16 query heads, 4 key/value heads of 64), float32, pages of {PAGE} tokens, "
        "512 new tokens in a pass. Stock sdpa reads the keys of all requests for every token, under one mask. LUCID "
        "and the same with strength 0 (softmax, ragged) read each request's own. The time is that of the whole load, "
        "prompts and answers; tokens per second count the answers. First, on a small model with correlated keys, all "
        "three have to give every request the tokens of generate() for it alone, and LUCID's have to differ."
    ),
    limits="",
    cases=_cases,
    columns=(
        Column("requests", fact("requests")),
        Column("prompts", fact("prompts")),
        Column("new tokens", fact("new")),
        Column("sdpa, ms", milliseconds(SDPA)),
        Column("LUCID, ms", milliseconds(LUCID)),
        Column("LUCID / sdpa", ratio(LUCID)),
        Column("softmax, ragged / sdpa", ratio(RAGGED)),
        Column("sdpa, tokens/s", fact(f"{SDPA} tokens/s")),
        Column("LUCID, tokens/s", fact(f"{LUCID} tokens/s")),
    ),
    page="",
)
