"""Other tools in processes of their own, through the code of the checkpoint: they compute what this process does."""

import json
import math
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from lucid_attention.models.checkpoint import load_model, load_tokenizer
from tests.models.tools_of_others import NEW, PROMPT, answer, environment, write_checkpoints

# Each starts several processes that import Transformers: minutes beside other busy processes.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TARGET = "w3 w1 w7 w9"
TRANSFORMERS = str(Path(sys.executable).with_name("transformers"))


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


@pytest.mark.parametrize("name", ["dropin", "own"])
@pytest.mark.shows("`lm_eval` with trust_remote_code=True", model="drop-in")
def test_lm_eval_gives_the_number_of_this_process(name: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": PROMPT, "target": TARGET}) + "\n")
    (tmp_path / "tiny.yaml").write_text(TASK.format(data=tmp_path / "data.jsonl"))
    model = f"pretrained={checkpoints[name]},trust_remote_code=True"
    words = ["--model", "hf", "--model_args", model, "--tasks", "tiny", "--include_path", tmp_path]
    words += ["--output_path", tmp_path / "results.json", "--batch_size", "1", "--device", "cpu"]
    caches = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_DATASETS_CACHE": str(tmp_path / "datasets")}
    command = [sys.executable, "-m", "lm_eval", *map(str, words)]
    done = subprocess.run(command, cwd=tmp_path, env=environment(**caches), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("results_*.json")
    found = json.loads(file.read_text())["results"]["tiny"]["perplexity,none"]
    expected, softmax = (math.exp(-log_likelihood(checkpoints[kind])) for kind in (name, "softmax"))
    assert found == pytest.approx(expected, rel=1e-4)
    assert abs(expected / softmax - 1) > 0.01


@contextmanager
def serving(checkpoint: Path, folder: Path) -> Iterator[str]:
    """The address of a `transformers serve`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [TRANSFORMERS, "serve", str(checkpoint), "--trust-remote-code", "--port", str(port)]
    log = folder / "serve.log"
    with log.open("w") as output:
        variables = environment(HF_MODULES_CACHE=str(folder / "modules"))
        process = subprocess.Popen(command, cwd=folder, env=variables, stdout=output, stderr=subprocess.STDOUT)
    try:
        while process.poll() is None:
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.2)
        assert process.poll() is None, log.read_text()
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("name", ["dropin", "own"])
@pytest.mark.shows("`transformers serve --trust-remote-code`, `transformers chat`", model="drop-in")
def test_the_server_of_transformers_gives_the_answers_of_this_process(
    name: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    openai = pytest.importorskip("openai")
    prompts = [" ".join(PROMPT.split()[:length]) for length in range(4, 24)]
    expected = [answer(checkpoints[name], f"<bos> {prompt}") for prompt in prompts]
    assert expected != [answer(checkpoints["softmax"], f"<bos> {prompt}") for prompt in prompts]
    with serving(checkpoints[name], tmp_path) as address:
        client = openai.OpenAI(base_url=address, api_key="none", timeout=300)

        def ask(prompt: str, **options: object) -> object:
            messages = [{"role": "user", "content": prompt}]
            settings = {"model": str(checkpoints[name]), "max_tokens": NEW, "temperature": 0} | options
            return client.chat.completions.create(messages=messages, **settings)

        with ThreadPoolExecutor(20) as pool:
            found = [one.choices[0].message.content for one in pool.map(ask, prompts)]
        assert found == expected
        parts = [part.choices[0].delta.content for part in ask(prompts[-1], stream=True) if part.choices]
        assert "".join(part for part in parts if part).split() == expected[-1].split()
        with pytest.raises(openai.APIStatusError):
            ask(prompts[0], model="no/such-model")
        assert ask(prompts[0]).choices[0].message.content == expected[0]
        command = [TRANSFORMERS, "chat", str(checkpoints[name]), address, f"max_new_tokens={NEW}", "do_sample=False"]
        # "n": do not continue after the limit of tokens.
        typed = f"{prompts[-1]}\nn\n!exit\n"
        # Its client takes every address for the hub's, this machine's too.
        online = environment(HF_HUB_OFFLINE="0")
        chat = subprocess.run(command, cwd=tmp_path, env=online, input=typed, capture_output=True, text=True)
        assert chat.returncode == 0, chat.stderr
        assert expected[-1] in " ".join(chat.stdout.split())
