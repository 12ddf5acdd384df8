"""Figures show what was measured: values, gaps, numbers, tables, colours."""

import math
import re
from typing import Any

import pytest
from matplotlib import colormaps
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from lucid_lab.report import bars, lines, panels
from lucid_lab.report.drawing import SENTINELS, fitted
from lucid_lab.report.figures import figure_html
from lucid_lab.report.numbers import tables_of
from lucid_lab.report.palette import COLOURS, OUTLINES, RESERVE, ROLES, SURFACES, colour_of, look, looks

from .samples import attention_maps, condition_number, cost, learnability, memory_update, needle_grid


def drawn(plot: Any, *arguments: Any) -> Any:
    axes = Figure().subplots()
    plot(axes, *arguments)
    return axes


def luminance(colour: Any) -> float:
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in to_rgb(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: Any, other: Any) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_curves_go_through_their_points_and_break_where_a_value_is_missing() -> None:
    figure = learnability()["figures"][0]
    axes = drawn(lines.plot_lines, figure, SENTINELS)
    curves = [line for line in axes.lines if len(line.get_xdata()) > 2]
    assert len(curves) == len(figure["series"])
    for curve, series in zip(curves, figure["series"], strict=True):
        assert list(curve.get_xdata()) == series["x"]
        for seen, given in zip(curve.get_ydata(), series["y"], strict=True):
            assert math.isnan(seen) if given is None else seen == given
    assert (axes.get_xscale(), axes.get_yscale()) == ("linear", "log")
    assert [text.get_text() for text in axes.texts] == ["task switch"]


def test_zero_is_left_out_of_a_logarithmic_axis_and_bands_stay_above_it() -> None:
    series = {"name": "a", "role": "lucid", "x": [1, 2, 3], "y": [0.0, 1.0, 2.0], "spread": [1.0, 5.0, None]}
    figure = {"title": "", "x": {"log": True}, "y": {"log": True}, "series": [series], "marks": []}
    axes = drawn(lines.plot_lines, figure, SENTINELS)
    assert math.isnan(axes.lines[0].get_ydata()[0])
    (band,) = axes.collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert min(heights) > 0
    assert max(heights) == 6


def test_lucid_is_blue_thick_and_on_top_on_every_figure() -> None:
    for made in (learnability, condition_number, cost):
        axes = drawn(lines.plot_lines, made()["figures"][0], SENTINELS)
        curves = [line for line in axes.lines if len(line.get_xdata()) > 2]
        first, others = curves[0], curves[1:]
        assert first.get_color() == SENTINELS["lucid"]
        assert all(first.get_linewidth() > each.get_linewidth() for each in others)
        assert all(first.get_zorder() > each.get_zorder() for each in others)


def test_series_differ_in_more_than_colour() -> None:
    figure = cost()["figures"][0]
    assert len({(each.marker, each.dashes) for each in looks(figure["series"])}) == len(figure["series"])
    repeated = [look("control", earlier) for earlier in range(6)]
    assert len({(each.marker, each.dashes) for each in repeated}) == 6
    assert {style.marker for style in (ROLES | RESERVE).values()} <= set(OUTLINES)
    assert look("softmax", 0, dashed=True).dashes


@pytest.mark.parametrize("colour", ROLES | RESERVE)
def test_colours_stand_out_from_light_and_dark_paper(colour: str) -> None:
    light, dark = COLOURS[colour]
    assert contrast(light, SURFACES["paper"][0]) >= 3
    assert contrast(dark, SURFACES["paper"][1]) >= 4.5


def test_an_unknown_role_always_has_the_same_colour_which_no_known_role_has() -> None:
    names = [f"attention_{number}" for number in range(40)]
    assert {colour_of(name) for name in names} == set(RESERVE)
    assert colour_of("toy") == colour_of("toy") == look("toy").colour == "reserve-7"
    assert not {pair for name, pair in COLOURS.items() if name in RESERVE} & {COLOURS[name] for name in ROLES}
    assert all(colour_of(name) == name for name in ROLES)


def test_unknown_roles_of_one_colour_differ_in_marker_and_dashes() -> None:
    names = [name for name in (f"attention_{number}" for number in range(40)) if colour_of(name) == "reserve-1"]
    styles = looks([{"role": name} for name in names[:3]])
    assert len({(style.marker, style.dashes) for style in styles}) == 3


# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
BLINDNESS = {
    "none": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}


@pytest.mark.parametrize("matrix", BLINDNESS.values(), ids=BLINDNESS)
def test_lucid_and_softmax_look_different_to_everyone(matrix: tuple[tuple[float, ...], ...]) -> None:
    def seen(colour: str) -> list[float]:
        linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in to_rgb(colour)]
        return [min(1.0, max(0.0, sum(a * b for a, b in zip(row, linear, strict=True)))) ** (1 / 2.2) for row in matrix]

    for shade in ("light", "dark"):
        lucid = seen(getattr(ROLES["lucid"], shade))
        softmax = seen(getattr(ROLES["softmax"], shade))
        assert math.dist(lucid, softmax) > 0.4
    # The measure is small for two colours that red-green blind people confuse.
    if matrix is BLINDNESS["deuteranopia"]:
        assert math.dist(seen("#b58a00"), seen("#7da800")) < 0.2


@pytest.mark.parametrize("signed", [False, True])
def test_every_number_of_a_map_stands_in_its_cell_and_can_be_read(signed: bool) -> None:
    figure = needle_grid()["figures"][0] | {"signed": signed, "range": [-100 if signed else 0, 100]}
    panel = figure["panels"][1]
    axes = drawn(panels.plot_panel, figure, panel, SENTINELS)
    texts = {tuple(map(int, text.get_position()[::-1])): text for text in axes.texts}
    assert len(texts) == 16
    low, high = panels.limits(figure)
    colours = colormaps["RdBu" if signed else "cividis"]
    for (y, x), text in texts.items():
        value = panel["values"][y][x]
        assert text.get_text() == ("–" if value is None else f"{value:.1f}")
        if value is not None:
            assert contrast(colours((value - low) / (high - low)), text.get_color()) >= 4.5
    assert [text.get_text() for text in axes.get_xticklabels()] == ["64", "128", "256", "512"]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["2", "4", "8", "16"]
    # The first row is at the top.
    assert axes.get_ylim()[0] > axes.get_ylim()[1]


def test_signed_maps_have_zero_in_the_middle_and_large_ones_are_pixels() -> None:
    figure = attention_maps()["figures"][1] | {"range": [-0.5, 1]}
    assert panels.limits(figure) == (-1, 1)
    axes = drawn(panels.plot_panel, figure, figure["panels"][0], SENTINELS)
    (image,) = axes.images
    assert image.get_array().shape == (64, 64)
    assert image.get_clim() == (-1, 1)
    assert image.get_array().mask[0, 1]
    assert not axes.texts
    middle = panels.gradient(figure)[panels.STOPS // 2]
    assert luminance(middle) > 0.9


def test_bars_have_their_lengths_and_numbers() -> None:
    figure = memory_update()["figures"][0]
    seen = bars.draw_bars(figure, "x")
    assert [heading for heading, _ in seen] == [group["name"] for group in figure["groups"]]
    for group, (_, picture) in zip(figure["groups"], seen, strict=True):
        texts = re.findall(r">([^<>]+)</text>", picture)
        for bar in group["bars"]:
            assert bar["name"] in texts
            assert ("–" if bar["value"] is None else f"{bar['value']:.1f} ± {bar['spread']:.1f}") in texts
        assert "chance" in texts
    axes = Figure().subplots()
    bars._bar(axes, 3, {"name": "a", "role": "lucid", "value": -2.0, "spread": 0.5}, (-4.0, 4.0), 1, SENTINELS)
    (bar,) = axes.patches
    assert (bar.get_x() + bar.get_width(), bar.get_y() + bar.get_height() / 2) == (-2.0, pytest.approx(3))


def test_limits_of_bars_hold_spreads_and_references() -> None:
    bar = {"name": "a", "role": "lucid", "value": -2.0, "spread": 0.5}
    figure: dict[str, Any] = {"value": {"range": None}, "groups": [{"bars": [bar]}], "references": [{"value": 3.0}]}
    low, high = bars._limits(figure)
    assert low <= -2.5
    assert high >= 3
    assert bars._limits({"value": {"range": [1, 2]}, "groups": []}) == (1, 2)
    assert bars._limits({"value": {}, "groups": [{"bars": [bar | {"value": None}]}]}) == (0, 1)


def test_the_table_of_a_figure_has_its_numbers() -> None:
    (table,) = tables_of(condition_number()["figures"][0], 60)
    assert table["columns"] == ["length N", "head size 16", "head size 32", "head size 64", "head size 256"]
    assert table["rows"][0] == [64, "2.80 ± 0.28", "1.4", "1.04", "1"]
    (table,) = tables_of(memory_update()["figures"][0], 60)
    assert table["columns"][1:] == ["n = 2 keys", "n = 4 keys", "n = 8 keys", "n = 16 keys"]
    assert ["softmax", "69.6 ± 0.6", "62.0 ± 0.8", "46.7 ± 1.1", "16.3 ± 1.7"] in table["rows"]
    assert table["rows"][-1] == ["chance (line)", 1.6, 1.6, 1.6, 1.6]
    tables = tables_of(needle_grid()["figures"][0], 60)
    assert [each["title"] for each in tables][:2] == ["LUCID, %", "softmax, %"]
    assert tables[1]["rows"][0][:2] == ["2", 88.0]


def test_long_curves_are_thinned_and_keep_their_end() -> None:
    (table,) = tables_of(learnability()["figures"][0], 60)
    assert len(table["rows"]) == 50
    assert table["rows"][-1][0] == 1592
    assert table["note"] == "Every 4th of 200 points."


def test_large_maps_are_text_of_all_their_numbers() -> None:
    table = tables_of(attention_maps()["figures"][0], 60)[0]
    rows = [line.split(",") for line in table["text"].split("\n")]
    assert len(rows) == 64
    assert all(len(row) == 64 for row in rows)
    assert rows[0][:2] == ["0.9", ""]


def test_a_figure_has_caption_legend_note_numbers_and_command() -> None:
    figure = learnability()["figures"][0]
    made = figure_html(figure, "lucid experiment <x>", "here")
    for part in (
        "<figcaption><h3>Loss before",
        "task switch",
        "From copying",
        "lucid experiment &lt;x&gt;",
        "<details>",
    ):
        assert part in made
    for series in figure["series"]:
        assert f"</svg>{series['name']}</li>" in made
    assert 'role="img"' in made
    assert 'aria-label="Loss before and after the task switch"' in made


@pytest.mark.parametrize(
    ("text", "width", "rows", "kept"),
    [
        ("short", 10, 1, "short"),
        ("two words", 5, 2, "two\nwords"),
        ("a b c d e f g", 7, 1, "a b c …"),
        ("x" * 20, 8, 1, "x" * 7 + "…"),
        (3, 5, 1, "3"),
    ],
)
def test_a_long_label_is_wrapped_and_cut(text: Any, width: int, rows: int, kept: str) -> None:
    assert fitted(text, width, rows) == kept
