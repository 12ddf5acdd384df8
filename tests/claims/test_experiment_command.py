"""`lucid experiment` and `lucid demo`, as their user sees them."""

import json
from pathlib import Path
from typing import Any

import pytest

from lucid_lab import claims, cli
from lucid_lab.claims import CLAIMS, DEMONSTRATED, HAVE_HOURS, NOT_JUDGED, load
from lucid_lab.locks import locked
from lucid_lab.toys.lab import KEPT, Lab
from lucid_lab.toys.results import Claim, Conclusion, table

Capture = pytest.CaptureFixture[str]


class Probe:
    """A claim that counts its calls."""

    CLAIM = Claim("Probes run", "A.4", "They do.", "1 run")

    def __init__(self, missing: str | None = None) -> None:
        self.missing, self.labs = missing, []  # type: ignore[var-annotated]

    def judge(self) -> str:
        """The verdict is always the same."""
        return "holds"

    def lacks(self, lab: Lab) -> str | None:
        return self.missing

    def run(self, lab: Lab) -> Conclusion:
        self.labs.append(lab)
        rows = [["a", 1.23456], [None, "long cell"]]
        return Conclusion("14", self.judge(), "of this", 3, tables=[table("T", ["name", "x"], rows, note="N")])


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Probe:
    made = Probe()
    monkeypatch.setattr(claims, "CLAIMS", ("probe",))
    monkeypatch.setattr(claims, "import_module", lambda name: made)
    return made


def test_list_names_every_claim_with_its_section_and_number(capsys: Capture) -> None:
    assert cli.main(["experiment", "list"]) == 0
    shown = capsys.readouterr().out
    for name in CLAIMS:
        claim = load(name).CLAIM
        assert f"\n{name} " in "\n" + shown
        assert claim.title in shown
        assert claim.paper in shown


def test_the_guide_names_every_claim() -> None:
    guide = (Path(cli.__file__).parents[1] / "docs" / "guides" / "reproduce.md").read_text()
    for name in CLAIMS:
        assert f"`{name}`" in guide


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["probe", "probes"], 1, "there is no experiment 'probes' (did you mean 'probe'?)"),
        (["probe", "--scale", "large"], 1, "--scale must be one of smoke, quick, small, hours, demo, got 'large'"),
        (
            ["probe", "--scale", "hours"],
            1,
            f"--scale hours is for {', '.join(HAVE_HOURS)}, got probe: use --scale small",
        ),
        (["probe", "--processes", "0"], 2, "--processes"),
        (["probe", "--processes", "two"], 2, "--processes"),
        ([], 2, "NAME"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line_before_anything_runs(
    words: list[str], code: int, message: str, probe: Probe, tmp_path: Path, capsys: Capture
) -> None:
    assert cli.main(["experiment", *words, *(["--out", str(tmp_path)] if words else [])]) == code
    assert message in capsys.readouterr().err
    assert probe.labs == []


def test_a_run_shows_the_verdict_and_says_where_the_result_is(probe: Probe, tmp_path: Path, capsys: Capture) -> None:
    words = ["experiment", "probe", "--out", str(tmp_path), "--processes", "1"]
    assert cli.main([*words, "--restart"]) == 0
    shown = capsys.readouterr().out
    for text in ("probe (small): Probes run", "paper: 1 run", "here:  14", "HOLDS: of this", "3 seeds"):
        assert text in shown
    assert "    name  x\n    ----  ---------\n    a     1.235\n          long cell\n    N\n" in shown
    assert (probe.labs[0].processes, probe.labs[0].restart) == (1, True)
    result = json.loads((tmp_path / "probe-small" / "result.json").read_text())
    assert str(tmp_path / "probe-small" / "result.json") in shown
    assert (result["verdict"], result["rule"]) == ("holds", "The verdict is always the same.")
    assert cli.main([*words, "--scale", "smoke"]) == 0
    assert f"TOO SMALL TO JUDGE: {NOT_JUDGED}" in capsys.readouterr().out


def test_a_claim_that_lacks_something_is_an_error_and_all_skips_it(
    probe: Probe, tmp_path: Path, capsys: Capture
) -> None:
    probe.missing = "it needs --model"
    assert cli.main(["experiment", "probe", "--out", str(tmp_path)]) == 1
    assert "probe cannot run: it needs --model" in capsys.readouterr().err
    assert cli.main(["experiment", "all", "--out", str(tmp_path)]) == 0
    assert "skipped: it needs --model" in capsys.readouterr().out
    assert probe.labs == []


def test_a_second_command_in_the_same_folder_is_refused(probe: Probe, tmp_path: Path, capsys: Capture) -> None:
    with locked(tmp_path):
        assert cli.main(["experiment", "probe", "--out", str(tmp_path)]) == 1
    assert f"error: {tmp_path} is being written by another process" in capsys.readouterr().err


def one(folder: Path, item: int) -> dict[str, Any]:
    return {"value": item}


def test_ctrl_c_leaves_one_line_and_what_is_finished(
    probe: Probe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def interrupted(lab: Lab) -> Conclusion:
        lab.map(one, [1])
        raise KeyboardInterrupt

    monkeypatch.setattr(probe, "run", interrupted)
    assert cli.main(["experiment", "probe", "--processes", "1", "--out", str(tmp_path)]) == 130
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last == "lucid experiment: stopped by Ctrl-C; finished runs are kept, the same command resumes"
    assert len(list(tmp_path.glob(f"{KEPT}/one-*/record.json"))) == 1


def test_the_demonstration_writes_a_report_and_a_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    probe = Probe()
    monkeypatch.setattr(claims, "load", lambda name: probe)
    for words, scale in (([], "quick"), (["--full"], "demo")):
        assert cli.main(["demo", "--out", str(tmp_path), *words]) == 0
        shown, page = capsys.readouterr().out, (tmp_path / "report.html").read_text()
        assert shown.count("HOLDS          Probes run") == len(DEMONSTRATED)
        assert "Probes run" in page
        assert ("ARGS=--full" in shown) == (words == [])
        assert [lab.scale.name for lab in probe.labs[-4:]] == [scale] * 4
        for name in DEMONSTRATED:
            result = json.loads((tmp_path / f"{name}-{scale}" / "result.json").read_text())
            assert result["command"] == " ".join(["lucid demo", *words])
            assert "torch" in result["machine"]
