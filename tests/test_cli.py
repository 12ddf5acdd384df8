"""The command line: its overview, help and errors."""

import argparse
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from lucid_attention import cli, commands

ROOT = Path(__file__).parents[1]


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
# Each line is answered in a fork: processes of their own would start Python forty times.
PARSE = """
import os, sys
from lucid_attention import cli, commands
for line in sys.argv[1:]:
    sys.stdout.flush()
    if os.fork() == 0:
        code = "none"
        try:
            code = cli.main(line.split())
        except SystemExit as exited:
            code = exited.code
        finally:
            print("|", line, "|", code, "|", *(name for name in {heavy} if name in sys.modules))
            sys.stdout.flush()
            os._exit(0)
    os.wait()
"""


def test_help_and_misspelt_words_are_answered_before_anything_heavy_is_imported() -> None:
    helps = ["--help", *(f"{name} --help" for name in commands.COMMANDS)]
    # What follows the tool of `lucid run`, and the checkpoint of `lucid serve`, belongs to the tool and the server.
    own = [command for name, command in commands.COMMANDS.items() if name not in ("run", "serve")]
    others = [command.example.removeprefix("lucid ") for command in own]
    wrong = ["convrt", "run --no-such-option lm_eval", "serve --no-such-option ./model"]
    wrong += [*(f"{words} --no-such-option" for words in others)]
    expected = dict.fromkeys(helps, 0) | dict.fromkeys(wrong, 2) | {"run lm_evla": 127}
    command = [sys.executable, "-c", PARSE.format(heavy=HEAVY), *expected]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    answers = [line.split("|")[1:] for line in done.stdout.splitlines() if line.startswith("| ")]
    assert [(line.strip(), code.strip(), heavy.strip()) for line, code, heavy in answers] == [
        (line, str(code), "") for line, code in expected.items()
    ]


# Without another package that only some commands need: the message must not need it.
CONVERT = "sys.modules['filelock'] = None; from lucid_attention.cli import main; sys.exit(main(['convert', 'a', 'b']))"


MISSING = {
    "enable": ("transformers", "lucid_attention.enable_lucid()"),
    "convert": ("transformers", CONVERT),
    "configuration": ("huggingface_hub", "lucid_attention.LucidConfig"),
    "model": ("safetensors", "lucid_attention.LucidForCausalLM"),
}
# In forks of one process, which has imported torch.
WITHOUT = """
import os, sys, traceback
import lucid_attention, torch
for name, (package, call) in {missing}.items():
    if os.fork() == 0:
        sys.modules[package], sys.stderr = None, open(name, "w")
        code = 0
        try:
            exec(call)
        except SystemExit as exited:
            code = exited.code
        except Exception:
            code = 1
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 1, name
assert "transformers" not in sys.modules
print(lucid_attention.lucid_attention.__module__)
"""


def test_a_missing_package_is_named_with_what_to_install(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", WITHOUT.format(missing=MISSING)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    for name, (package, _) in MISSING.items():
        message = (tmp_path / name).read_text()
        assert package in message
        assert 'pip install "lucid-attention[transformers]"' in message
    # The package and its main function have the same name.
    assert done.stdout == "lucid_attention.ops.lucid.api\n"
