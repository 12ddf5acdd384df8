"""The command line: its overview, help and errors."""

import argparse
import subprocess
import sys
from importlib.metadata import version

import pytest

from lucid_attention import cli, commands


def test_the_overview_lists_every_command_with_its_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name, command in commands.COMMANDS.items():
        assert name in shown
        assert command.summary in shown


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_every_command_has_help_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        cli.main([name, "--help"])
    assert exited.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"usage: lucid {name}" in shown
    assert commands.COMMANDS[name].example in shown


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_the_example_of_a_command_parses(name: str) -> None:
    words = commands.COMMANDS[name].example.split()
    assert words[:2] == ["lucid", name]
    parser = argparse.ArgumentParser(exit_on_error=False)
    commands.add_arguments(name, parser)
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
    assert all(name in message for name in commands.COMMANDS)


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"lucid-attention {version('lucid-attention')}"


HEAVY = ("torch", "transformers", "numpy", "datasets", "matplotlib", "tokenizers", "pyarrow", "lm_eval", "psutil")
PARSE = """
import sys
from lucid_attention import cli, commands
try:
    raise SystemExit(cli.main(sys.argv[1:]))
finally:
    print("imported:", *(name for name in {heavy} if name in sys.modules))
"""


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("--help", 0),
        ("convrt", 2),
        *((f"{name} --help", 0) for name in commands.COMMANDS),
        # What follows the tool of `lucid run`, and the checkpoint of `lucid serve`, belongs to the tool and the server.
        ("run --no-such-option lm_eval", 2),
        ("run lm_evla", 127),
        ("serve --no-such-option ./model", 2),
        *(
            (f"{command.example.removeprefix('lucid ')} --no-such-option", 2)
            for name, command in commands.COMMANDS.items()
            if name not in ("run", "serve")
        ),
    ],
)
def test_help_and_misspelt_words_are_answered_before_anything_heavy_is_imported(words: str, code: int) -> None:
    program = PARSE.format(heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", program, *words.split()], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert done.stdout.splitlines()[-1].split() == ["imported:"]


CONVERT = "from lucid_attention.cli import main; raise SystemExit(main(['convert', 'a', 'b']))"


@pytest.mark.parametrize(
    ("package", "call"),
    [
        ("transformers", "lucid_attention.enable_lucid()"),
        ("transformers", CONVERT),
        ("huggingface_hub", "lucid_attention.LucidConfig"),
        ("safetensors", "lucid_attention.LucidForCausalLM"),
    ],
)
def test_a_missing_package_is_named_with_what_to_install(package: str, call: str) -> None:
    program = f"import sys; sys.modules['{package}'] = None; import lucid_attention; {call}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert package in done.stderr
    assert 'pip install "lucid-attention[transformers]"' in done.stderr


def test_the_package_and_its_main_function_have_the_same_name() -> None:
    program = "from lucid_attention import lucid_attention; print(lucid_attention.__module__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "lucid_attention.ops.lucid.api\n"
