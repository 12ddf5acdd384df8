"""Jobs of `language_model` beside training: the loss by position, and the time of a step of a whole decoder."""

import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...models.decoder import presets
from ...models.decoder.modeling import LucidForCausalLM
from ...training.loss import use_chunked_loss
from ..engine.jobs import Record, Work
from ..small.training import SmallRun, load_small
from .runs import known


def loss_by_position(work: Work, run: dict[str, Any]) -> Record:
    """The job: mean loss of a trained model on the unseen text, in ranges of positions that double.

    ends: one past the last position of each range.
    """
    settings = SmallRun(**run)
    inputs, labels = settings.make_task().test(2 * settings.test_batch, 0, settings.length)
    losses = token_losses(load_small(work, settings), inputs, labels).mean(0)
    if not losses.isfinite().all():
        losses = torch.full_like(losses, known(None))
    ends = range_ends(settings.length)
    starts = [0, *ends[:-1]]
    return {"ends": ends, "losses": [float(losses[a:b].mean()) for a, b in zip(starts, ends, strict=True)]}


def range_ends(length: int, first: int = 8) -> list[int]:
    """8, 16, 32, … and the length."""
    ends = []
    while first < length:
        ends.append(first)
        first *= 2
    return [*ends, length]


@torch.no_grad()
def token_losses(model: Any, inputs: Tensor, labels: Tensor, at_once: int = 16) -> Tensor:
    """The loss of every token, [B, T]."""
    parts = zip(inputs.split(at_once), labels.split(at_once), strict=True)
    return torch.cat([F.cross_entropy(model(each).transpose(1, 2), wanted, reduction="none") for each, wanted in parts])


def time_decoders(work: Work, sizes: dict[str, Any], vocab_size: int, length: int, batch: int, rounds: int) -> Record:
    """The job: training steps of `LucidForCausalLM` with LUCID and with softmax attention in turn, medians.

    sizes: of the preset `tiny`.
    """
    ids = torch.randint(vocab_size, (batch, length), generator=torch.Generator().manual_seed(0))
    models = []
    for attention in ("lucid", "softmax"):
        torch.manual_seed(0)
        model: Any = LucidForCausalLM(presets.tiny(attention, vocab_size=vocab_size, **sizes))
        use_chunked_loss(model)
        models.append((model, torch.optim.AdamW(model.parameters(), lr=1e-3)))
    times: list[list[float]] = [[], []]
    # The first round warms up.
    for _ in range(rounds + 1):
        for which, (model, optimizer) in enumerate(models):
            began = time.perf_counter()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            times[which].append(time.perf_counter() - began)
    lucid, softmax = (each[1:] for each in times)
    return {
        "milliseconds": [1000 * statistics.median(each) for each in (lucid, softmax)],
        "ratio": statistics.median(a / b for a, b in zip(lucid, softmax, strict=True)),
    }
