"""A report of all samples, written once."""

from pathlib import Path

import pytest

from lucid_lab.report.page import write_report

from .breaking import all_results


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With every kind of figure, in a folder that did not exist."""
    return write_report(all_results(), tmp_path_factory.mktemp("report") / "a" / "report.html")
