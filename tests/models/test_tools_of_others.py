"""Real tools of others, each in its own process, without an edit: they compute with LUCID what this process does."""

import json
import math
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lucid_attention.models.checkpoint import load_config, load_model, load_tokenizer
from lucid_attention.models.dropin.settings import uses_lucid
from tests.models.tools_of_others import NEW, PROMPT, answer, environment, lucid_run, program, write_checkpoints

# Each starts several processes that import Transformers: minutes beside other busy processes.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TARGET = "w3 w1 w7 w9"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_checkpoints(tmp_path_factory.mktemp("checkpoints"), auto_map=True)


@torch.no_grad()
def log_likelihood(folder: Path) -> float:
    """Of TARGET after PROMPT."""
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    ids = tokenizer(f"{PROMPT} {TARGET}", return_tensors="pt").input_ids
    first = len(PROMPT.split())
    logits = model(ids).logits[0, first - 1 : -1].double().log_softmax(-1)
    return float(logits.gather(1, ids[0, first:, None]).sum())


TASK = """
task: tiny
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{prompt}}}}"
doc_to_target: " {{{{target}}}}"
metric_list:
  - {{metric: perplexity, aggregation: perplexity, higher_is_better: false}}
"""


@pytest.mark.parametrize(("name", "launch"), [("dropin", True), ("own", True), ("dropin", False)])
@pytest.mark.shows("`lm_eval` through `lucid run`", model="drop-in")
@pytest.mark.shows("`lm_eval` through `lucid run`", model="decoder")
def test_lm_eval_gives_the_number_of_this_process(
    name: str, launch: bool, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": PROMPT, "target": TARGET}) + "\n")
    (tmp_path / "tiny.yaml").write_text(TASK.format(data=tmp_path / "data.jsonl"))
    model = f"pretrained={checkpoints[name]}" + ("" if launch else ",trust_remote_code=True")
    words = ["--model", "hf", "--model_args", model, "--tasks", "tiny", "--include_path", tmp_path]
    words += ["--output_path", tmp_path / "results.json", "--batch_size", "1", "--device", "cpu"]
    caches = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_DATASETS_CACHE": str(tmp_path / "datasets")}
    if launch:
        done = lucid_run("lm_eval", *words, cwd=tmp_path, **caches)
    else:
        command = [sys.executable, "-m", "lm_eval", *map(str, words)]
        done = subprocess.run(command, cwd=tmp_path, env=environment(**caches), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("results_*.json")
    found = json.loads(file.read_text())["results"]["tiny"]["perplexity,none"]
    expected, softmax = (math.exp(-log_likelihood(checkpoints[kind])) for kind in (name, "softmax"))
    assert found == pytest.approx(expected, rel=1e-4)
    assert abs(expected / softmax - 1) > 0.01


@contextmanager
def server(words: list[str], folder: Path) -> Iterator[str]:
    """The address of a `transformers serve`. At its end the server must shut down by itself."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = folder / "serve.log"
    with log.open("w") as output:
        command = [*words, "--host", "127.0.0.1", "--port", str(port)]
        variables = environment(HF_MODULES_CACHE=str(folder / "modules"))
        process = subprocess.Popen(command, cwd=folder, env=variables, stdout=output, stderr=subprocess.STDOUT)
    try:
        while process.poll() is None and not accepts(port):
            time.sleep(0.2)
        assert process.poll() is None, log.read_text()
        yield f"http://127.0.0.1:{port}/v1"
        process.send_signal(signal.SIGINT)
        # Its exit code is the tool's own: 0 or 1, by the release of its command-line library.
        process.wait(timeout=300)
        assert "Application shutdown complete" in log.read_text()
    finally:
        process.kill()
        process.wait()


def accepts(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize(("name", "launch"), [("dropin", True), ("own", True), ("own", False)])
@pytest.mark.shows("`transformers serve` through `lucid run`", model="drop-in")
@pytest.mark.shows("`transformers serve` through `lucid run`", model="decoder")
@pytest.mark.shows("`transformers chat` with that server", model="drop-in")
@pytest.mark.shows("`transformers chat` with that server", model="decoder")
def test_transformers_serve_answers_with_lucid_and_chat_shows_it(
    name: str, launch: bool, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    pytest.importorskip("uvicorn", reason="pip install transformers[serving]")
    openai: Any = pytest.importorskip("openai", reason="pip install transformers[serving]")
    folder = checkpoints[name]
    expected = answer(folder, f"<bos> {PROMPT}")
    assert expected != answer(checkpoints["softmax"], f"<bos> {PROMPT}")
    serve = program("transformers", "serve", folder)
    if not launch:
        serve = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(folder), "--trust-remote-code"]
    with server(serve, tmp_path) as address:
        client = openai.OpenAI(base_url=address, api_key="none")
        message = {"role": "user", "content": PROMPT}
        made = client.chat.completions.create(
            model=str(folder), messages=[message], temperature=0, max_tokens=NEW, timeout=600
        )
        assert made.choices[0].message.content == expected
        # A client, which loads no model. Offline mode would keep it from the server.
        chat = [sys.executable, "-m", "transformers.cli.transformers", "chat", str(folder), address]
        chat += [f"max_new_tokens={NEW}", "do_sample=False", "--user", "somebody"]
        # It asks whether an answer of full length is to go on.
        said = f"{PROMPT}\n!exit\n!exit\n"
        online = environment(HF_HUB_OFFLINE="0")
        done = subprocess.run(chat, cwd=tmp_path, env=online, input=said, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert f"<{folder}>:\n{expected}" in "\n".join(line.rstrip() for line in done.stdout.splitlines())


@pytest.mark.parametrize("name", ["dropin", "own"])
@pytest.mark.shows("`trl` through `lucid run`", model="drop-in")
@pytest.mark.shows("`trl` through `lucid run`", model="decoder")
def test_trl_trains_with_lucid(name: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("trl")
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.jsonl").write_text(f"{json.dumps({'text': PROMPT})}\n" * 4)
    words = ["--model_name_or_path", checkpoints[name], "--dataset_name", data, "--output_dir", tmp_path / "out"]
    words += ["--max_steps", "1", "--report_to", "none", "--use_cpu", "true", "--bf16", "false"]
    done = lucid_run("trl", "sft", *words, cwd=tmp_path, HF_DATASETS_CACHE=str(tmp_path / "datasets"))
    assert done.returncode == 0, done.stderr
    config = load_config(tmp_path / "out")
    assert config.attention == "lucid" if name == "own" else uses_lucid(config)
    assert config.architectures == ["LucidForCausalLM" if name == "own" else "LlamaForCausalLM"]
