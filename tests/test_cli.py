"""The command line: its overview, help and errors."""

import subprocess
import sys
from importlib.metadata import version

import pytest

from lucid_attention import cli


def test_the_overview_lists_every_command_with_its_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name, command in cli.COMMANDS.items():
        assert name in shown
        assert command.summary in shown


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        cli.main([name, "--help"])
    assert exited.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"usage: lucid {name}" in shown
    assert cli.COMMANDS[name].example in shown


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_example_of_a_command_parses(name: str) -> None:
    import argparse
    from importlib import import_module

    words = cli.COMMANDS[name].example.split()
    assert words[:2] == ["lucid", name]
    parser = argparse.ArgumentParser(exit_on_error=False)
    import_module(f"lucid_attention.{cli.COMMANDS[name].module}").add_arguments(parser)
    parser.parse_args(words[2:])


def test_no_command_shows_the_overview_and_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "commands:" in capsys.readouterr().out


def test_an_unknown_command_is_refused_with_the_nearest_and_all_others(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        cli.main(["convrt"])
    assert exited.value.code == 2
    message = capsys.readouterr().err
    assert "'convrt' (did you mean 'convert'?)" in message
    assert all(name in message for name in cli.COMMANDS)


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"lucid-attention {version('lucid-attention')}"


def test_the_overview_needs_no_transformers() -> None:
    program = (
        "import sys; sys.modules['transformers'] = None; from lucid_attention import cli; sys.exit(cli.main(['-h']))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == 0


@pytest.mark.parametrize(
    "call",
    ["lucid_attention.enable_lucid()", "from lucid_attention.cli import main; raise SystemExit(main(['convert']))"],
)
def test_a_missing_transformers_is_named_with_what_to_install(call: str) -> None:
    program = f"import sys; sys.modules['transformers'] = None; import lucid_attention; {call}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert 'pip install "lucid-attention[transformers]"' in done.stderr
