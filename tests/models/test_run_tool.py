"""`lucid run`: tools that know nothing of the package open checkpoints with LUCID, in all of their processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lucid_attention.models.run_tool import AT_START, NoSuchTool, command_of, environment_of
from tests.models.tools_of_others import NEW, PROMPT, answer, environment, lucid_run, write_checkpoints


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_checkpoints(tmp_path_factory.mktemp("checkpoints"))


def test_a_program_a_script_and_a_module_are_found(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.touch()
    program, *rest = command_of(["lm_eval", "--help", "-m"])
    assert Path(program).parent == Path(sys.executable).parent, "the tool of this environment"
    assert (Path(program).name, rest) == ("lm_eval", ["--help", "-m"])
    assert command_of([str(script), "-x"]) == [sys.executable, str(script), "-x"]
    assert command_of(["lm_eval", "--help"], module=True) == [sys.executable, "-m", "lm_eval", "--help"]
    assert command_of(["--", "lm_eval", "--", "a"])[1:] == ["--", "a"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lm_evla"], r"no program 'lm_evla' \(did you mean 'lm_eval'\?\)"),
        (["lucid_attention"], "is a module and not a program: lucid run -m lucid_attention"),
        (["no/such.py"], "script 'no/such.py' is not there"),
        ([""], "no program ''"),
        ([], "needs a tool"),
    ],
)
def test_what_is_not_there_is_refused_with_the_way_out(words: list[str], message: str) -> None:
    with pytest.raises(NoSuchTool, match=message):
        command_of(words)


def test_the_environment_keeps_what_it_had_and_does_not_grow() -> None:
    once = environment_of({"A": "b", "PYTHONPATH": os.pathsep.join(["x", "y"])})
    assert once == {"A": "b", "PYTHONPATH": os.pathsep.join([str(AT_START), "x", "y"])}
    assert environment_of(once) == once
    assert environment_of({}) == {"PYTHONPATH": str(AT_START)}


def test_a_misspelt_tool_is_one_line_and_the_exit_code_of_shells(tmp_path: Path) -> None:
    done = lucid_run("lm_evla", "--help", cwd=tmp_path)
    assert done.returncode == 127
    assert done.stdout == ""
    assert done.stderr.startswith("lucid run: error: there is no program 'lm_evla' (did you mean 'lm_eval'?)")
    assert len(done.stderr.splitlines()) == 1


SCRIPT = """
import sys
print(sys.argv[1:], __name__, "torch" in sys.modules, "lucid_attention" in sys.modules)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("way", ["script", "module", "program"])
def test_words_and_exit_code_are_the_tools_own_and_nothing_is_imported(way: str, tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text(SCRIPT)
    words = {"script": ["tool.py"], "module": ["-m", "tool"], "program": ["python", "tool.py"]}[way]
    done = lucid_run(*words, "7", "--help", "-m", "--", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout == "['7', '--help', '-m', '--'] __main__ False False\n"


def test_an_error_of_the_tool_is_shown_as_python_shows_it(tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text("open('no such file')\n")
    done = lucid_run("tool.py", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    assert "lucid" not in done.stderr


def test_a_sitecustomize_of_the_environment_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.theirs = 'theirs'\n")
    program = "import sys, sitecustomize; print(theirs, sitecustomize.__file__, sys.path)"
    paths = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    done = lucid_run("python", "-c", program, cwd=tmp_path, PYTHONPATH=paths)
    assert done.stdout.startswith(f"theirs {tmp_path / 'sitecustomize.py'} "), done.stderr
    assert str(AT_START) not in done.stdout


def test_a_python_without_the_package_is_named_when_it_imports_transformers(tmp_path: Path) -> None:
    (tmp_path / "transformers.py").write_text("")
    start = environment_of({"PYTHONPATH": str(tmp_path)})
    hidden = "import sys; sys.modules['lucid_attention'] = None\nimport json; print('other'); import transformers"
    done = subprocess.run([sys.executable, "-c", hidden], env=start, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "other\n")
    assert f"{sys.executable} lacks the package lucid_attention" in done.stderr
    assert f"{sys.executable} -m pip install lucid-attention" in done.stderr


PIPELINE = f"""
import sys
from transformers import pipeline
for folder in sys.argv[1:]:
    generate = pipeline("text-generation", folder)
    made = generate({PROMPT!r}, max_new_tokens={NEW}, do_sample=False, return_full_text=False)
    print("answer:", made[0]["generated_text"])
"""


def answers(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return [line.partition("answer: ")[2].strip() for line in done.stdout.splitlines() if "answer: " in line]


@pytest.mark.slow
@pytest.mark.shows("`pipeline`", model="decoder")
def test_a_pipeline_in_a_script_opens_both_kinds_of_checkpoints(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text(PIPELINE)
    done = lucid_run("tool.py", *checkpoints.values(), cwd=tmp_path)
    found = answers(done)
    assert found == [answer(folder) for folder in checkpoints.values()]
    assert len(set(found)) == 3, "LUCID in one layer, in all layers, and softmax differ"


CHILDREN = f"""
import multiprocessing, os, sys

def work(folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer({PROMPT!r}, return_tensors="pt").input_ids
    new = model.generate(ids, max_new_tokens={NEW}, do_sample=False)[0, ids.shape[1] :]
    return "answer: " + tokenizer.decode(new, skip_special_tokens=True)

if __name__ == "__main__":
    if "RANK" in os.environ:
        os.write(1, (work(sys.argv[1]) + "\\n").encode())
    else:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(pool.map(work, sys.argv[1:])[0])
"""
LAUNCHERS = {
    "spawn": ("tool.py",),
    "torchrun": ("torchrun", "--nproc-per-node", "2", "tool.py"),
    "accelerate": ("accelerate", "launch", "--cpu", "--num_processes", "1", "--num_machines", "1", "tool.py"),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_processes_that_a_tool_starts_know_lucid(launcher: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text(CHILDREN)
    done = lucid_run(*LAUNCHERS[launcher], checkpoints["dropin"], cwd=tmp_path)
    assert answers(done) == [answer(checkpoints["dropin"])] * (2 if launcher == "torchrun" else 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_torchrun_can_start_lucid_run_itself(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text(CHILDREN)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "lucid_lab.cli", "run", "tool.py", str(checkpoints["own"])]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert answers(done) == [answer(checkpoints["own"])] * 2
