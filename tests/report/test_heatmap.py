"""Heat maps: every score stands in its cell."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot as plt

from lucid_attention.report.heatmap import draw_heatmap


def test_every_score_stands_in_its_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(plt, "close", kept.append)
    scores = {(2, 2048): 100.0, (2, 4096): 50.25, (10, 2048): 0.0}
    draw_heatmap(scores, ["needles", "length"], tmp_path / "map.png", "a title")
    monkeypatch.undo()
    drawn = kept[0].axes[0]
    assert {tuple(map(int, text.get_position())): text.get_text() for text in drawn.texts} == {
        (0, 0): "100.0",
        (1, 0): "50.2",
        (0, 1): "0.0",
    }
    assert [text.get_text() for text in drawn.get_xticklabels()] == ["2048", "4096"]
    assert [text.get_text() for text in drawn.get_yticklabels()] == ["2", "10"]
    assert (drawn.get_xlabel(), drawn.get_ylabel(), drawn.get_title()) == ("length", "needles", "a title")
    # Dark letters on light cells and light ones on dark cells.
    assert [text.get_color() for text in drawn.texts] == ["black", "white", "white"]
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    plt.close(kept[0])
