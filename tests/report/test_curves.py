"""The curve of a run is drawn from its metrics, whatever they lack."""

from pathlib import Path
from typing import Any

import matplotlib
import pytest
from matplotlib import pyplot as plt

from lucid_attention.report.curves import draw_loss

ENTRIES: list[dict[str, Any]] = [
    {"step": 1, "loss": 3.0, "grad_norm": 1.0},
    {"step": 2, "loss": "nan"},
    {"step": 3, "loss": 2.0},
    {"step": 3, "eval_loss": 2.5},
    {"step": 3, "train_runtime": 1.0},
]


def test_training_and_validation_are_drawn_and_what_is_no_number_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(plt, "close", figures.append)
        draw_loss(ENTRIES, tmp_path / "a.png", "a title")
    plt.close(figures[0])
    (axes,) = figures[0].axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert lines == {"training": [[1, 3], [3, 2]], "validation": [[3, 2.5]]}
    assert axes.get_title() == "a title"
    assert "step" in axes.get_xlabel()
    assert "loss" in axes.get_ylabel()
    assert {text.get_text() for text in axes.get_legend().get_texts()} == {"training", "validation"}


@pytest.mark.parametrize("entries", [ENTRIES, ENTRIES[:1], ENTRIES[3:4], []], ids=["both", "one", "validation", "none"])
def test_the_file_is_a_picture(entries: list[dict[str, Any]], tmp_path: Path) -> None:
    draw_loss(entries, tmp_path / "a.png", "a title")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_no_figure_stays_open(tmp_path: Path) -> None:
    draw_loss(ENTRIES, tmp_path / "a.png", "a title")
    assert plt.get_fignums() == []


def test_no_display_is_needed(tmp_path: Path) -> None:
    draw_loss([], tmp_path / "a.png", "")
    assert matplotlib.get_backend().lower() == "agg"
