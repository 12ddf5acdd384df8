"""Losses on long documents: by position, and of the same tokens after contexts of many lengths.

Losses are in nats per token; the perplexity is their exponential. A sample never holds parts of two documents.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lucid_attention.files import read_text

from ...data import DataError
from ...data.datasets import PackedTokens
from ..cells import Cell, EvalError, Labels, Options, Record
from ..tokens import load_tokenizer

# Logits are made for this many tokens at a time: [T, vocabulary] would take 17 GB at 131 072 tokens.
ROWS = 1024
# The end of the first bucket. Every other bucket ends at twice its first position.
FIRST_BUCKET = 64
# The number of tokens that are predicted after every context.
TARGETS = 256
CONTEXTS = (256, 512, 1024, 2048)
LENGTHS = (2048,)


def token_losses(model: Any, input_ids: Tensor, last: int, *, rows: int = ROWS) -> Tensor:
    """The losses of the `last` tokens of every sequence, each given all tokens before it.

    input_ids: [B, T]. Gives float32 [B, last]. The model makes one pass without a cache, and logits for `rows` tokens
    at a time.
    """
    B, T = input_ids.shape
    if not 1 <= last < T:
        raise ValueError(f"last must be 1 to T - 1 = {T - 1}, got {last}")
    head = model.get_output_embeddings()
    decoder = getattr(model, model.base_model_prefix, None)
    if head is None or decoder is None:
        raise EvalError(f"losses need a decoder and a head, got {type(model).__name__}")
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    losses = torch.empty(B, last)
    with torch.no_grad():
        h = decoder(input_ids=input_ids, use_cache=False)[0][:, T - last - 1 : T - 1]
        # The head gets tokens of one sequence at a time, so that a loss does not depend on the batch.
        for b in range(B):
            for start in range(0, last, rows):
                part = slice(start, min(start + rows, last))
                logits = _logits(head, h[b, part], cap)
                targets = input_ids[b, T - last :][part]
                losses[b, part] = F.cross_entropy(logits, targets, reduction="none").cpu()
    return losses


def _logits(head: Any, h: Tensor, cap: float | None) -> Tensor:
    logits = head(h).float()
    return logits if cap is None else cap * torch.tanh(logits / cap)


def check_head(model: Any, input_ids: Tensor) -> None:
    """Refuse a model that changes its logits after the head in a way that `token_losses` does not know."""
    few_ids = input_ids[:1, :4]
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    with torch.no_grad():
        model_logits = model(input_ids=few_ids, use_cache=False).logits.float()
        h = getattr(model, model.base_model_prefix)(input_ids=few_ids, use_cache=False)[0]
        our_logits = _logits(model.get_output_embeddings(), h, cap)
    if not model_logits.isfinite().all():
        raise EvalError(f"the outputs of {type(model).__name__} must be finite, and are not: try another --dtype")
    if not torch.allclose(model_logits, our_logits, rtol=1e-2, atol=1e-2 * float(model_logits.abs().max())):
        raise EvalError(f"{type(model).__name__} changes its logits after the head: its losses cannot be computed here")


def buckets(length: int) -> list[tuple[int, int]]:
    """[first, last + 1] of the positions of predicted tokens: 1–63, 64–127, 128–255, ... up to the length."""
    edges = [1]
    edge = FIRST_BUCKET
    while edge < length:
        edges.append(edge)
        edge *= 2
    return list(zip(edges, [*edges[1:], length], strict=True))


def loss_by_position(model: Any, input_ids: Tensor) -> dict[tuple[int, int], float]:
    """The mean loss of the tokens in every bucket of positions. input_ids: [B, T], each row from one document."""
    losses = token_losses(model, input_ids, input_ids.shape[1] - 1)
    return {(a, b): losses[:, a - 1 : b - 1].mean().item() for a, b in buckets(input_ids.shape[1])}


def loss_by_context(
    model: Any, input_ids: Tensor, contexts: Sequence[int], *, targets: int = TARGETS
) -> dict[int, float]:
    """For every context: the mean loss of the last `targets` tokens, with `context` tokens before the first of them."""
    longest = input_ids.shape[1] - targets
    if min(contexts) < 1 or max(contexts) > longest:
        raise ValueError(f"contexts must be 1 to {longest}, the number of tokens before the targets, got {contexts}")
    return {
        context: token_losses(model, input_ids[:, longest - context :], targets).mean().item() for context in contexts
    }


def windows(source: str, tokenizer: str, length: int, samples: int, seed: int = 0) -> Tensor:
    """Windows of `length` tokens, each from one document: int64 [samples, length], or fewer if the source has fewer.

    source: a folder written by `lucid tokenize`, whose validation split is read, or a text file, which is one document.
    tokenizer: its folder, needed for a text file.
    """
    if Path(source).is_dir():
        pieces = _from_folder(source, length, samples, seed)
    elif Path(source).is_file():
        ids = load_tokenizer(tokenizer)(read_text(Path(source)), add_special_tokens=False, verbose=False)["input_ids"]
        pieces = [torch.tensor(ids[i * length : (i + 1) * length]) for i in range(min(samples, len(ids) // length))]
    else:
        raise EvalError(f"--text must be a text file or a folder written by `lucid tokenize`, got {source!r}")
    if not pieces:
        raise EvalError(f"--text {source!r} must have a document of {length} tokens, and has none")
    return torch.stack(pieces)


def _from_folder(folder: str, length: int, samples: int, seed: int) -> list[Tensor]:
    try:
        packed = PackedTokens(folder, length, split="validation", seed=seed)
    except DataError as error:
        raise EvalError(f"--text: {error}") from error
    pieces, unbroken = [], torch.arange(length)
    for index in range(len(packed)):
        item = packed[index]
        # Positions start again at 0 with every document.
        if torch.equal(item["position_ids"], unbroken):
            pieces.append(item["input_ids"])
        if len(pieces) == samples:
            break
    return pieces


def _evaluate(
    pieces: Tensor, last: int, model: Any, tokenizer: Any, indices: Sequence[int], batch_size: int
) -> Iterator[Record]:
    device = next(model.parameters()).device
    if indices:
        _check_vocabulary(model, pieces)
        check_head(model, pieces[:1].to(device))
    for start in range(0, len(indices), batch_size):
        batch = list(indices[start : start + batch_size])
        losses = token_losses(model, pieces[batch].to(device), last)
        for index, loss in zip(batch, losses.double().mean(1).tolist(), strict=True):
            yield {"id": index, "score": loss, "tokens": last}


def _check_vocabulary(model: Any, pieces: Tensor) -> None:
    vocab_size, largest = model.get_input_embeddings().num_embeddings, int(pieces.max())
    if largest >= vocab_size:
        raise EvalError(
            f"--text has token {largest}, and the model knows {vocab_size}: it was made with another tokenizer"
        )


def by_position(options: Options) -> list[Cell]:
    """A cell for every bucket of positions.

    The pass for a bucket ends with the bucket. Buckets double in length, so all passes cost about two full ones.
    """
    cells = []
    for length in options.lengths or LENGTHS:
        pieces = _read(options, length)
        for first, stop in buckets(length):
            labels: Labels = {"length": length, "position": f"{first}–{stop - 1}"}
            cells.append(_cell(options, labels, pieces[:, :stop], stop - first))
    return cells


def by_context(options: Options) -> list[Cell]:
    """A cell for every context, with the same targets."""
    contexts = options.lengths or CONTEXTS
    if min(contexts) < 1:
        raise EvalError(f"--lengths must be at least 1, got {min(contexts)}")
    longest = max(contexts)
    pieces = _read(options, longest + TARGETS)
    return [_cell(options, {"context": context}, pieces[:, longest - context :], TARGETS) for context in contexts]


def _read(options: Options, length: int) -> Tensor:
    if not options.text:
        raise EvalError("--text is needed: a text file, or a folder written by `lucid tokenize`")
    if length < 2:
        raise EvalError(f"--lengths must be at least 2, got {length}")
    return windows(options.text, options.tokenizer, length, options.samples, options.seed)


def _cell(options: Options, labels: Labels, pieces: Tensor, last: int) -> Cell:
    tokens = sha256(pieces.contiguous().numpy().tobytes()).hexdigest()
    return Cell(
        labels=labels,
        metric="loss",
        metadata={**labels, "text": options.text, "tokens_sha256": tokens, "last": last},
        length=pieces.shape[1],
        evaluate=partial(_evaluate, pieces, last),
        samples=pieces.shape[0],
        out_of=None,
    )
