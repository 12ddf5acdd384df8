"""How much context tokens have, against a count token by token."""

from pathlib import Path

import numpy as np
import pytest

from lucid_lab.data.context import LONG, Context, context_lines, context_of
from lucid_lab.data.datasets import PackedTokens

from .folders import write_tokens


@pytest.mark.parametrize("lengths", [[1], [7], [3, 3, 3], [1, 1, 50], [5, 2, 9, 1, 1, 30, 4], list(range(1, 40))])
def test_quantiles_are_those_of_all_tokens(lengths: list[int]) -> None:
    seen = np.sort(np.concatenate([np.arange(1, length + 1) for length in lengths]))
    expected = [int(seen[int(np.ceil(share * seen.size)) - 1]) for share in (0.5, 0.9)]
    assert context_of(lengths) == Context(*expected, max(lengths))


def test_documents_are_cut_at_the_borders_of_sequences(tmp_path: Path) -> None:
    lengths = [5, 40, 1, 17, 8, 3, 22, 64, 2, 9]
    folder = write_tokens(tmp_path / "t", {"train": [[[1] * length for length in lengths]]})
    data = PackedTokens(folder, 16, seed=3)
    # Positions begin at 0 with every piece.
    positions = np.concatenate([data[i]["position_ids"].numpy() for i in range(len(data))])
    pieces = np.diff([*np.flatnonzero(positions == 0), positions.size])
    assert data.document_pieces().tolist() == pieces.tolist()
    assert data.document_pieces().sum() == 16 * len(data)


def test_long_sequences_of_short_documents_give_a_warning_only_if_documents_are_separate() -> None:
    short, whole = context_of([700] * 100), context_of([65_536])
    (line, warning) = context_lines(short, short, 65_536, True)
    assert line == "context of a token, in tokens: 350 (median), 630 (90 %), 700 (longest)"
    assert "warning" in warning
    assert "at most 350 tokens" in warning
    assert "--min-document-tokens 16384" in warning
    lines = context_lines(whole, short, 65_536, False)
    assert [line.startswith("warning") for line in lines] == [False, False]
    assert "32,768 (median)" in lines[0]
    assert "350 (median)" in lines[1]
    assert len(context_lines(context_of([LONG]), None, LONG, True)) == 1
    # A short sequence length is not worth a warning.
    assert len(context_lines(context_of([10]), None, LONG // 2, True)) == 1
