"""How much context the tokens of a run have: how many tokens each one sees, itself included."""

import math
from typing import Any, NamedTuple

import numpy as np

# Sequences from this length on are long: then short documents are worth a warning.
LONG = 4096
# Of a sequence, half of the tokens see at most half. Warn if they see at most this share of it.
SHORT_SHARE = 1 / 8


class Context(NamedTuple):
    """Half of the tokens see at most `median` tokens, 90 % at most `ninety`, and none more than `longest`."""

    median: int
    ninety: int
    longest: int

    def __str__(self) -> str:
        return f"{self.median:,} (median), {self.ninety:,} (90 %), {self.longest:,} (longest)"


def context_of(lengths: Any) -> Context:
    """The context in pieces of these lengths, in which every token sees those before it: 1, 2, ..., length tokens."""
    ordered = np.sort(np.asarray(lengths, dtype=np.int64))
    sums, longer = np.cumsum(ordered), ordered.size - 1 - np.arange(ordered.size)
    # Σ min(length, c) tokens see at most c; here c is each of the lengths.
    at_most = sums + ordered * longer

    def quantile(share: float) -> int:
        wanted = share * int(sums[-1])
        k = int(np.searchsorted(at_most, wanted))
        shorter = int(sums[k] - ordered[k])
        return math.ceil((wanted - shorter) / (int(longer[k]) + 1))

    return Context(quantile(0.5), quantile(0.9), int(ordered[-1]))


def context_lines(seen: Context, of_document: Context | None, sequence_length: int, separate: bool) -> list[str]:
    """What a run says about its context at its start, with a warning if long sequences hold short documents.

    seen: by the tokens of the run. of_document: within their own documents, None if the data are no documents.
    separate: whether documents do not see each other.
    """
    lines = [f"context of a token, in tokens: {seen}"]
    if of_document is not None and not separate:
        lines.append(f"of it in its own document: {of_document}")
    if separate and sequence_length >= LONG and seen.median < SHORT_SHARE * sequence_length:
        lines.append(
            f"warning: sequences of {sequence_length:,} tokens hold short documents that do not see each other: half "
            f"of the tokens see at most {seen.median:,} tokens. Let them see each other (--set "
            "separate_documents=false), or choose long documents (lucid tokenize --min-document-tokens "
            f"{sequence_length // 4})"
        )
    return lines
