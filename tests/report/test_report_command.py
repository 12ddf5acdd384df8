"""`lucid report`, and the page in Markdown."""

import json
import re
from html import escape
from pathlib import Path

import pytest

from lucid_lab import cli
from lucid_lab.report.markdown import markdown, plain
from lucid_lab.report.records import checked

from .breaking import NASTY, all_results
from .samples import condition_number, result


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    for made in (result("a"), condition_number()):
        (folder / made["name"]).mkdir(parents=True)
        (folder / made["name"] / "result.json").write_text(json.dumps(made))
    return folder


def test_the_command_writes_the_page_and_the_numbers(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "b" / "c.html"
    assert cli.main(["report", str(runs), "--out", str(out), "--title", "Ours"]) == 0
    assert "<h1>Ours</h1>" in out.read_text()
    assert [each["name"] for each in json.loads(out.with_suffix(".json").read_text())["results"]] == [
        "a",
        "condition_number",
    ]
    assert capsys.readouterr().out == f"{out}: 2 experiments; numbers in {out.with_suffix('.json')}\n"


def test_without_a_name_it_is_report_html(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", str(runs / "a")]) == 0
    assert (tmp_path / "report.html").exists()


def test_markdown_alone_writes_no_page(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", str(runs), "--markdown", "docs/results.md"]) == 0
    assert "κ(P) grows with the length" in (tmp_path / "docs" / "results.md").read_text()
    assert not (tmp_path / "report.html").exists()


def test_an_error_is_one_line_that_names_the_file(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "a" / "result.json").write_text("{")
    assert cli.main(["report", str(runs), "--out", str(tmp_path / "x.html")]) == 1
    message = capsys.readouterr().err
    assert message.startswith("lucid report: error: ")
    assert str(runs / "a" / "result.json") in message
    assert not (tmp_path / "x.html").exists()
    assert cli.main(["report", str(tmp_path / "nowhere")]) == 1
    assert "nowhere" in capsys.readouterr().err


def test_the_markdown_page_has_every_result_in_tables_of_equal_width() -> None:
    made = [checked(each, "here") for each in all_results()]
    text = markdown(made)
    assert text == markdown(made)
    assert text.endswith("\n")
    for each in made:
        for key in ("title", "claim", "paper", "ours", "because", "machine", "finished"):
            assert plain(each[key]) in text, key
        command = " ".join(each["command"].split())
        block = f"<pre><code>{escape(command)}</code></pre>" if "<" in command else f"    {command}"
        assert f"\n\n{block}\n\n" in text
    rows = [line for line in text.split("\n") if line.startswith("|")]
    assert len(rows) > 60
    for block in re.findall(r"(?:^\|.*\n)+", text, re.M):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in block.strip().split("\n")}
        assert len(widths) == 1, block
    assert "<" not in re.sub(r"^<pre><code>([^<]*)</code></pre>$", r"\1", text, flags=re.M)


def test_markdown_shows_text_as_text() -> None:
    assert plain("a|b *c* _d_ `e` [f](g) #h\n<i> & ~j~") == r"a\|b \*c\* \_d\_ \`e\` \[f\](g) \#h &lt;i&gt; &amp; \~j\~"
    assert "<script>" not in plain(NASTY)


def test_the_numbers_of_a_page_never_replace_another_file(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = runs / "a" / "result.json"
    before = record.read_bytes()
    assert cli.main(["report", str(runs), "--out", str(record.with_suffix(".html"))]) == 1
    assert "would be overwritten" in capsys.readouterr().err
    assert record.read_bytes() == before
    # A report replaces an earlier one.
    page = str(tmp_path / "page.html")
    assert [cli.main(["report", str(runs), "--out", page]) for _ in range(2)] == [0, 0]


@pytest.mark.parametrize(
    "words", [["--out", ""], ["--out", "p.html", "--markdown", "p.html"], ["--out", "p.html", "--markdown", "p.json"]]
)
def test_files_that_would_replace_each_other_are_refused(
    runs: Path, tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", str(runs), *words]) == 1
    assert "lucid report: error: " in capsys.readouterr().err
    assert not list(tmp_path.glob("p.*"))
