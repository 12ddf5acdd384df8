"""Prompts whose answers' places are known, as `lucid make-data needles` writes them."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .hit_rate import Query, Record, hit_rates


def read_samples(file: Path, limit: int) -> list[dict[str, Any]]:
    """The first `limit` lines: {"prompt": text, "answer_spans": [[first, last + 1], ...]}, spans in tokens."""
    samples = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines()[:limit], 1):
        try:
            sample = json.loads(line)
            spans = [(int(first), int(stop)) for first, stop in sample["answer_spans"]]
            samples.append({"prompt": str(sample["prompt"]), "spans": tuple(spans)})
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{file}, line {number}: expected a prompt and its answer_spans, as `lucid make-data needles` writes "
                f"them, got {line[:60]!r}"
            ) from error
    if not samples:
        raise ValueError(f"--samples must hold at least one sample, got none in {file}")
    return samples


def hit_rates_of(
    model: nn.Module,
    tokenizer: Any,
    samples: list[dict[str, Any]],
    *,
    layers: tuple[int, ...] | None = None,
    heads: tuple[int, ...] | None = None,
) -> list[Record]:
    """Records of `hit_rates` with "sample" beside: what the last token of every prompt reads of its answer."""
    found = []
    for index, sample in enumerate(samples):
        ids = tokenizer(sample["prompt"], return_attention_mask=False, verbose=False)["input_ids"]
        last = max(stop for _, stop in sample["spans"])
        if last > len(ids):
            raise ValueError(
                f"sample {index} has an answer at tokens up to {last}, its prompt {len(ids)} tokens: it was made for "
                "another tokenizer"
            )
        device = next(model.parameters()).device
        query = Query(len(ids) - 1, sample["spans"])
        records = hit_rates(model, torch.tensor([ids], device=device), [query], layers=layers, heads=heads)
        found += [{"sample": index, **record} for record in records]
    return found
