"""`lucid convert --auto-map`: programs with trust_remote_code=True open the checkpoint, where the package is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from lucid_attention.models.checkpoint import load_config, load_model
from lucid_attention.models.convert import ConversionError, convert
from lucid_lab import cli
from tests.models.tools_of_others import NEW, PROMPT, answer, environment, write_checkpoints


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_checkpoints(tmp_path_factory.mktemp("checkpoints"), auto_map=True)


# A process that knows nothing of LUCID.
STOCK = f"""
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer

def answer(folder, **options):
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    ids = tokenizer({PROMPT!r}, return_tensors="pt").input_ids
    new = model.generate(ids, max_new_tokens={NEW}, do_sample=False)[0, ids.shape[1] :]
    return tokenizer.decode(new, skip_special_tokens=True)

for folder in sys.argv[1:]:
    try:
        print("untrusted:", answer(folder, trust_remote_code=False))
    except ValueError as error:
        print("untrusted:", "trust_remote_code=True" in str(error))

class Uninstalled:
    def find_spec(self, name, path=None, target=None):
        if name == "lucid_attention":
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Uninstalled())
for folder in sys.argv[1:]:
    try:
        print("without:", answer(folder, trust_remote_code=True))
    except ImportError as error:
        print("without:", " ".join(str(error).split()))
del sys.meta_path[0]
for folder in sys.argv[1:]:
    print("answer:", answer(folder, trust_remote_code=True))
"""


@pytest.mark.slow
def test_a_stock_process_opens_it_with_trust_and_the_package_and_names_what_is_missing(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    folders = [checkpoints["dropin"], checkpoints["own"]]
    stock = environment(HF_MODULES_CACHE=str(tmp_path / "modules"))
    command = [sys.executable, "-c", STOCK, *map(str, folders)]
    done = subprocess.run(command, env=stock, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["untrusted: True"] * 2
    for line in lines[2:4]:
        assert line.startswith("without: ")
        assert "packages that were not found in your environment: lucid_attention" in line
        assert "pip install lucid_attention" in line
    expected = [answer(folder) for folder in folders]
    assert lines[4:] == [f"answer: {found}" for found in expected]
    assert len({answer(checkpoints["softmax"]), *expected}) == 3


@pytest.mark.parametrize("name", ["dropin", "own"])
def test_our_own_commands_open_it_and_never_run_its_code(
    name: str, checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints[name]
    content = json.loads((folder / "config.json").read_text())
    assert content["auto_map"] == {"AutoConfig": f"lucid_checkpoint.{type(load_config(folder)).__name__}"}
    code = (folder / "lucid_checkpoint.py").read_text()
    (folder / "lucid_checkpoint.py").write_text("raise RuntimeError('the code of the checkpoint was run')")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    try:
        assert not getattr(load_config(folder), "auto_map", None)
        model = load_model(folder)
        # Programs that called enable_lucid() leave trust_remote_code out.
        AutoConfig.from_pretrained(folder)
        AutoModelForCausalLM.from_pretrained(folder)
    finally:
        (folder / "lucid_checkpoint.py").write_text(code)
    model.save_pretrained(tmp_path / "again")
    assert "auto_map" not in (tmp_path / "again" / "config.json").read_text(), "its file would not be there"


def test_a_conversion_without_the_request_takes_it_away(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    convert(checkpoints["dropin"], tmp_path / "without", auto_map=False)
    assert not (tmp_path / "without" / "lucid_checkpoint.py").exists()
    assert "auto_map" not in (tmp_path / "without" / "config.json").read_text()
    convert(checkpoints["dropin"], tmp_path / "plain", to="softmax")
    assert not (tmp_path / "plain" / "lucid_checkpoint.py").exists()


def test_requests_that_make_no_sense_are_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    for name in ("dropin", "own"):
        with pytest.raises(ConversionError, match="only a checkpoint of another attention takes settings"):
            convert(checkpoints[name], tmp_path / "out", strength=0.5)


@pytest.mark.parametrize("name", ["dropin", "own"])
def test_the_command_says_how_programs_open_it(
    name: str, checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["convert", str(checkpoints[name]), str(tmp_path / "out"), "--auto-map"]) == 0
    shown = capsys.readouterr().out
    assert "trust_remote_code=True" in shown
