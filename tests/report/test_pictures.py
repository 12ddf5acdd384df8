"""PNG files of training, evaluation and analysis show their numbers, drawn like the figures of the page."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib import colormaps
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from lucid_lab.report.drawing import LIGHT
from lucid_lab.report.pictures import draw_condition_numbers, draw_heatmap, draw_loss, draw_maps

from .test_figures import contrast

ENTRIES: list[dict[str, Any]] = [
    {"step": 1, "loss": 3.0, "grad_norm": 1.0},
    {"step": 2, "loss": "nan"},
    {"step": 3, "loss": 2.0},
    {"step": 3, "eval_loss": 2.5},
    {"step": 3, "train_runtime": 1.0},
]
SCORES = {(2, 2048): 100.0, (2, 4096): 50.25, (10, 2048): 0.0}


@pytest.fixture
def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Figure]:
    """Call a drawing function, check its file, and give matplotlib's figure."""
    figures: list[Figure] = []
    savefig = Figure.savefig

    def save(figure: Figure, *arguments: Any, **options: Any) -> None:
        figures.append(figure)
        savefig(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", save)

    def draw(function: Callable[..., None], *arguments: Any, title: str = "a title", **options: Any) -> Figure:
        file = tmp_path / "new" / "picture.png"
        function(*arguments, file, title, **options)
        assert file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        return figures[-1]

    return draw


def test_training_and_validation_loss_are_drawn_without_values_that_are_no_numbers(drawn: Any) -> None:
    (axes,) = drawn(draw_loss, ENTRIES, attention="softmax").axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert lines == {"training": [[1, 3], [3, 2]], "validation": [[3, 2.5]]}
    assert axes.get_title() == "a title"
    assert "step" in axes.get_xlabel()
    assert "loss" in axes.get_ylabel()
    assert {text.get_text() for text in axes.get_legend().get_texts()} == {"training", "validation"}
    assert {line.get_color() for line in axes.lines} == {LIGHT["softmax"]}
    assert len({line.get_linestyle() for line in axes.lines}) == 2


@pytest.mark.parametrize("entries", [ENTRIES, ENTRIES[:1], ENTRIES[3:4], []], ids=["both", "one", "validation", "none"])
def test_a_run_of_any_length_has_a_picture(entries: list[dict[str, Any]], drawn: Any) -> None:
    assert drawn(draw_loss, entries).axes


def test_every_score_stands_in_its_cell(drawn: Any) -> None:
    axes, scale = drawn(draw_heatmap, SCORES, ["needles", "length"]).axes
    texts = {tuple(map(int, text.get_position())): text for text in axes.texts}
    assert {place: text.get_text() for place, text in texts.items()} == {
        (0, 0): "100.0",
        (1, 0): "50.2",
        (0, 1): "0.0",
        (1, 1): "–",
    }
    assert [text.get_text() for text in axes.get_xticklabels()] == ["2048", "4096"]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["2", "10"]
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_title()) == ("length", "needles", "a title")
    for (x, y), score in {(0, 0): 1.0, (1, 0): 0.5025, (0, 1): 0.0}.items():
        assert contrast(colormaps["cividis"](score), texts[x, y].get_color()) >= 4.5
    assert scale.get_ylim() == (0, 100)


def test_both_maps_of_a_head_are_drawn_on_one_scale_around_zero(drawn: Any) -> None:
    softmax = [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.2, 0.3, 0.5]]
    effective = [[1.0, 0.0, 0.0], [-0.5, 1.0, 0.0], [0.2, -0.3, 0.5]]
    records = [{"head": head, "borders": [0, 4, 8, 12], "softmax": softmax, "effective": effective} for head in (0, 3)]
    figure = drawn(draw_maps, records)
    maps = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title() for axes in maps] == [
        f"head {head}: {name}" for head in (0, 3) for name in ("softmax  A", "effective  W = A P⁻¹")
    ]
    for axes, values in zip(maps, [softmax, effective] * 2, strict=True):
        (image,) = axes.images
        assert image.get_array().tolist() == values
        assert image.get_clim() == (-1, 1)
        assert [text.get_text() for text in axes.get_xticklabels()] == ["0", "4", "8"]


def test_every_head_has_a_curve_of_condition_numbers_and_every_layer_a_colour(drawn: Any) -> None:
    records = [
        {"layer": layer, "row": 0, "head": head, "length": length, "kappa": 1.0 + layer + head + length}
        for layer in (0, 1)
        for head in (0, 1)
        for length in (32, 8)
    ]
    (axes,) = drawn(draw_condition_numbers, records).axes
    assert [line.get_xydata().tolist() for line in axes.lines][3] == [[8, 11], [32, 35]]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["layer 0", "layer 1"]
    colours = [to_rgba(line.get_color()) for line in axes.lines]
    assert colours[0] == colours[1] != colours[2] == colours[3]


def test_no_display_and_no_pyplot_are_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    draw_loss(ENTRIES, tmp_path / "a.png", "")
    draw_heatmap(SCORES, ["needles", "length"], tmp_path / "b.png", "")
    assert (tmp_path / "a.png").exists()
    assert (tmp_path / "b.png").exists()
