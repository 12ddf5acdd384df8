"""Numbers are written as people write them."""

from typing import Any

import pytest

from lucid_lab.report.numbers import duration, places_of, shown, tick, typeset, with_spread


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        ("99.9 ± 0.1", "99.9 ± 0.1"),
        (65536, "65536"),
        (-3, "−3"),
        (0.0, "0"),
        (1.0, "1"),
        (0.123456, "0.1235"),
        (-2.5, "−2.5"),
        (12345.6, "12346"),
        (1e-9, "1.00·10⁻⁹"),
        (-2.5e12, "−2.50·10¹²"),
        (True, "True"),
    ],
)
def test_a_cell_has_four_digits_or_its_text(value: Any, text: str) -> None:
    assert shown(value) == text


@pytest.mark.parametrize(
    ("value", "spread", "places", "text"),
    [
        (99.94, 0.06, 1, "99.9 ± 0.1"),
        (99.94, None, 1, "99.9"),
        (None, 0.1, 1, "–"),
        (1.7695, 0.0213, None, "1.770 ± 0.021"),
        (116.3, 12.4, None, "116 ± 12"),
        (-0.049, 0.012, None, "−0.049 ± 0.012"),
        (5.0, 0.0, None, "5 ± 0"),
        (5.25, None, None, "5.25"),
        (3e-9, 1e-9, None, "3.00·10⁻⁹ ± 1.00·10⁻⁹"),
    ],
)
def test_a_spread_has_two_digits_or_the_places_given(value: Any, spread: Any, places: int | None, text: str) -> None:
    assert with_spread(value, spread, places) == text


@pytest.mark.parametrize(
    ("values", "places"),
    [([100, 3.2], 1), ([1.98, None], 2), ([-0.017], 4), ([75, 100], 0), ([4321.5], 0), ([], 0), ([None], 0)],
)
def test_numbers_that_stand_together_have_the_same_places(values: list[Any], places: int) -> None:
    assert places_of(values) == places


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (64, "64"),
        (1024, "1K"),
        (65536, "64K"),
        (2**20, "1M"),
        (1000, "1000"),
        (0.01, "0.01"),
        (1e-6, "10⁻⁶"),
        (5e6, "5·10⁶"),
    ],
)
def test_ticks_are_short(value: float, text: str) -> None:
    assert tick(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (3.14, "3.1 s"), (43, "43 s"), (59.7, "1 min 0 s"), (312.4, "5 min 12 s"), (7400, "2 h 3 min")],
)
def test_durations_are_in_two_units_at_most(seconds: Any, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("text", "set_text"),
    [
        ("-0.195 ± 0.027", "−0.195\u00a0±\u00a00.027"),
        ("lower by (-2 %)", "lower by (−2\u00a0%)"),
        ("2026-11-16, 32-64, M-NIAH, --seed, a-1", "2026-11-16, 32-64, M-NIAH, --seed, a-1"),
    ],
)
def test_hyphens_before_numbers_become_minus_signs_and_numbers_keep_their_units(text: str, set_text: str) -> None:
    assert typeset(text) == set_text
