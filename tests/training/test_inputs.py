"""The data of a run: their order, where they come from, and the errors for data that cannot be used."""

import json
import math
import os
import pickle
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from lucid_lab.data import DataError
from lucid_lab.data.datasets import PackedTokens
from lucid_lab.data.shards import HEADER, VERIFIED, open_folder
from lucid_lab.training import inputs as module
from lucid_lab.training.inputs import Passes, load_inputs
from lucid_lab.training.recipe import Recipe
from lucid_lab.training.recipes import qasper, tiny_lm, tiny_needle

from .running import finished, losses, lucid, weights, words


def on_tokens(out: Path, tokens: Path, *more: str, **changes: Any) -> list[str]:
    """A small run on a folder of tokens."""
    argv = words("tiny_lm", out, "--data", str(tokens), *more, **changes)
    return [word for word in argv if not word.startswith("--set=data_options")]


def small(tokens: Path, **changes: Any) -> Recipe:
    given: dict[str, Any] = {"data": str(tokens), "data_options": {}, "sequence_length": 32, "steps": 90}
    return replace(tiny_lm(), **{**given, "batch_size": 4, "micro_batch_size": 4, **changes})


def keys(items: list[dict[str, torch.Tensor]]) -> list[tuple[int, ...]]:
    return [tuple(item["input_ids"].tolist()) for item in items]


def test_passes_over_a_small_corpus_see_every_item_once_in_an_order_of_their_own(tokens: Path) -> None:
    train = load_inputs(small(tokens)).train
    assert isinstance(train, Passes)
    assert len(train) == 360
    size = train.size
    assert size < 150
    passes = [keys([train[i] for i in range(number * size, (number + 1) * size)]) for number in range(2)]
    for items in passes:
        assert len(set(items)) == size
    assert passes[0] != passes[1]
    # Documents come in another order and are cut at other places, but the tokens are the same.
    first, second = (Counter(token for item in items for token in item) for items in passes)
    assert sum((first - second).values()) < 64


def test_items_depend_on_the_seed_and_the_index_and_not_on_earlier_items(tokens: Path) -> None:
    one, other = load_inputs(small(tokens)).train, load_inputs(small(tokens)).train
    indices = [250, 3, 249, 70, 3]
    expected = {i: keys([other[i]]) for i in sorted(indices)}
    assert [keys([one[i]]) for i in indices] == [expected[i] for i in indices]
    assert keys([pickle.loads(pickle.dumps(one))[250]]) == expected[250]
    assert keys([load_inputs(small(tokens, seed=1)).train[3]]) != keys([one[3]])


def test_synthetic_items_do_not_repeat_and_none_is_a_validation_item() -> None:
    recipe = replace(tiny_needle(), steps=20, evaluation_sequences=30)
    inputs = load_inputs(recipe)
    train = keys([inputs.train[i] for i in range(320)])
    validation = keys([inputs.validation[i] for i in range(30)])
    assert len(set(train)) == 320
    assert len(set(validation)) == 30
    assert not set(train) & set(validation)
    other = load_inputs(replace(recipe, seed=1))
    assert not set(keys([other.train[i] for i in range(320)])) & set(train + validation)


def test_validation_has_the_asked_number_of_sequences_or_all_there_are(tokens: Path) -> None:
    assert len(load_inputs(small(tokens, evaluation_sequences=3)).validation) == 3  # type: ignore[arg-type]
    available = len(load_inputs(small(tokens, evaluation_sequences=10**6)).validation)  # type: ignore[arg-type]
    assert 3 < available < 1000


def test_a_language_model_is_trained_on_a_folder_of_tokens(language_model: Path, tokens: Path) -> None:
    values = list(losses(language_model).values())
    assert values[0] == pytest.approx(math.log(286), abs=0.1)
    assert values[-1] < values[0] - 0.3
    config = json.loads((language_model / "model" / "config.json").read_text())
    manifest = json.loads((tokens / "manifest.json").read_text())
    assert config["vocab_size"] == manifest["tokenizer"]["vocab_size"]
    # The tokenizer is saved with the model.
    saved, original = (AutoTokenizer.from_pretrained(folder) for folder in (language_model / "model", tokens))
    assert saved.get_vocab() == original.get_vocab()
    assert saved.encode("the key\n 12") == original.encode("the key\n 12")
    assert config["eos_token_id"] is not None


def test_documents_that_see_each_other_change_the_losses(language_model: Path, tokens: Path, tmp_path: Path) -> None:
    run = finished(on_tokens(tmp_path / "run", tokens, separate_documents=False))
    assert losses(run)[1] != losses(language_model)[1] or losses(run)[8] != losses(language_model)[8]
    whole = finished(on_tokens(tmp_path / "rows", tokens, separate_documents=False, loss_rows=0))
    assert losses(run) == pytest.approx(losses(whole), abs=1e-5)


def test_a_run_says_at_its_start_how_much_context_its_tokens_have(tokens: Path) -> None:
    recipe = replace(tiny_lm(), data=str(tokens), data_options={}, sequence_length=32)
    (separate,) = load_inputs(recipe).context
    data = PackedTokens(tokens, 32, seed=recipe.seed)
    seen = np.sort(
        np.concatenate([item["position_ids"].numpy() + 1 for item in map(data.__getitem__, range(len(data)))])
    )
    median, ninety = (int(seen[math.ceil(share * seen.size) - 1]) for share in (0.5, 0.9))
    numbers = f"{median} (median), {ninety} (90 %), {seen[-1]} (longest)"
    assert separate == f"context of a token, in tokens: {numbers}"
    whole = load_inputs(replace(recipe, separate_documents=False)).context
    assert whole == [
        "context of a token, in tokens: 16 (median), 29 (90 %), 32 (longest)",
        f"of it in its own document: {numbers}",
    ]
    needles = load_inputs(replace(tiny_needle(), steps=2)).context
    assert needles == ["context of a token, in tokens: 33 (median), 59 (90 %), 65 (longest)"]


def test_a_process_that_reads_data_changes_no_loss(language_model: Path, tokens: Path, tmp_path: Path) -> None:
    run = finished(on_tokens(tmp_path / "run", tokens, workers=1))
    assert losses(run) == losses(language_model)


def test_missing_data_are_named_with_the_command_that_makes_them(tmp_path: Path) -> None:
    ended = lucid(on_tokens(tmp_path / "run", tmp_path / "nowhere"))
    assert ended.code == 1
    message = f"{tmp_path / 'nowhere'}: there is no such folder of tokens. Make one with: lucid tokenize SOURCE"
    assert message in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("kind", ["empty", "unfinished", "text"])
def test_a_folder_that_is_not_one_of_tokens_is_named(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    (folder / "unfinished" if kind == "unfinished" else folder).mkdir(parents=True)
    if kind == "text":
        (folder / "a.txt").write_text("text")
    ended = lucid(on_tokens(tmp_path / "run", folder))
    assert ended.code == 1
    assert str(folder) in ended.err
    assert "lucid tokenize" in ended.err
    assert "Traceback" not in ended.err


def test_options_for_data_that_have_none_are_refused(tokens: Path) -> None:
    with pytest.raises(DataError, match="a folder of tokens has no data_options"):
        load_inputs(small(tokens, data_options={"vocab_size": 3}))
    with pytest.raises(DataError, match=r"have one option, vocab_size, got also \['size'\]"):
        load_inputs(replace(tiny_lm(), data_options={"size": 3}))


def test_the_standard_library_is_tokenized_once_on_first_use(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []

    def tokenize(source: str, folder: Path, **options: Any) -> None:
        calls.append((source, options["tokenizer"]))
        shutil.copytree(tokens, folder)

    monkeypatch.setattr(module, "STDLIB_FOLDER", tmp_path / "tokenized")
    monkeypatch.setattr(module, "tokenize", tokenize)
    recipe = small(tokens, data="stdlib", data_options={"vocab_size": 300})
    first = load_inputs(recipe)
    assert keys([first.train[0]]) == keys([load_inputs(recipe).train[0]])
    assert calls == [("stdlib", "train:300")]
    assert first.tokenizer is not None


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("answers") / "some.jsonl"
    lines = [{"prompt": f"the key {i} reads ", "answer": f"last {i}"} for i in range(40)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


SETTINGS: dict[str, Any] = {"precision": "float32", "workers": 0, "data_options.validation": 0.3, "rope_theta": 500}


def with_answers(out: Path, *more: str) -> list[str]:
    argv = words("qasper", out, *more, **SETTINGS)
    return [word for word in argv if not word.startswith(("--set=model.", "--set=data_options.n="))]


def test_a_trained_model_learns_answers(answers: Path, language_model: Path, tmp_path: Path) -> None:
    argv = with_answers(tmp_path / "run", "--data", str(answers), "--from", str(language_model / "model"))
    run = finished([*argv, "--set=learning_rate=3e-3"])
    values = losses(run)
    assert values[8] < values[1]
    assert weights(run).keys() == weights(language_model).keys()
    assert (run / "model" / "tokenizer.json").exists()


def test_answers_without_a_model_are_refused(answers: Path, tmp_path: Path) -> None:
    ended = lucid(with_answers(tmp_path / "run", "--data", str(answers)))
    assert ended.code == 1
    assert f"{answers}: prompts with answers are for a trained model: give one with --from" in ended.err


def test_the_missing_file_of_a_recipe_is_named(language_model: Path) -> None:
    with pytest.raises(DataError, match=r"data/qasper_train\.jsonl: there is no such file"):
        load_inputs(replace(qasper(), start=str(language_model / "model")))


def alter(folder: Path) -> Path:
    """Write the largest id into the first shard, and keep its size and time. Returns the shard."""
    shard = min(folder.glob("train-*.bin"))
    times = shard.stat()
    content = bytearray(shard.read_bytes())
    content[HEADER:] = b"\xff" * (len(content) - HEADER)
    shard.write_bytes(content)
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    return shard


def test_altered_tokens_are_not_trained_on(tokens: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tokens, tmp_path / "tokens")
    (folder / VERIFIED).unlink(missing_ok=True)
    shard = alter(folder)
    ended = lucid(on_tokens(tmp_path / "run", folder))
    assert ended.code == 1
    assert f"lucid train: error: {shard} was altered: expected checksum " in ended.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("workers", [0, 1])
def test_ids_beyond_the_vocabulary_stop_a_run_with_a_sentence(workers: int, tokens: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tokens, tmp_path / "tokens")
    open_folder(folder, verify=True)
    shard = alter(folder)
    ended = lucid(on_tokens(tmp_path / "run", folder, workers=workers))
    assert ended.code == 1
    assert f"lucid train: error: {shard} was altered: expected ids below " in ended.err
    assert "Traceback" not in ended.err
