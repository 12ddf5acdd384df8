"""The costs in the guide are those of the dry runs."""

import pytest

from tools import costs


def test_costs_stand_in_their_column_and_in_the_total() -> None:
    row = "| Figure 4 | x | `lucid experiment needle_grid` | 31 | 7 |\n"
    total = "<!-- total: written by tools/costs.py -->\nold\n<!-- end of total -->\n"
    text = costs.written(f"{row}{row}{total}", {"needle_grid": 1234.4, "language_model": 3.0}, 5000.0)
    first, second, *rest = text.splitlines()
    assert first.endswith("| 31 | 1,234 |")
    assert second.endswith("| 31 | above |")
    assert "about 5,000 hours, of which `language_model` takes 3" in rest[1]
    assert "old" not in text
    assert costs.written(row, {"needle_grid": 0.0, "language_model": 0.0}, 0.0).endswith(f"| {costs.NONE} |\n")


@pytest.mark.slow
def test_the_guide_has_the_costs_of_the_dry_runs() -> None:
    text = costs.GUIDE.read_text(encoding="utf-8")
    assert costs.written(text, costs.hours(), costs.total()) == text, "run python tools/costs.py"
