"""Tokenizers that are trained or loaded."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from lucid_lab.data import DataError
from lucid_lab.data import tokenizer as ours
from lucid_lab.data.sources import open_source
from lucid_lab.data.tokenizer import Encoder, load, requested_size, sample, tokenizer_hash, train

from .folders import text, trained, write_texts, write_tokenizer

STRANGE = "naïve 漢字 🜲 \x07\r\n\t  mixed   spaces\u2028 ends"


def test_training_gives_the_same_bytes_every_time() -> None:
    texts = [text(seed) for seed in range(20)]
    assert train(texts, 300) == train(texts, 300)
    assert train(texts, 300) != train(texts[1:], 300)


def test_every_text_is_decoded_back_and_there_is_no_unknown_token() -> None:
    encoder = Encoder(trained())
    assert encoder.vocab_size == 300
    decoder = Tokenizer.from_str(trained()["tokenizer.json"].decode())
    for content in (STRANGE, "".join(map(chr, range(0x500)))):
        ids = encoder(content)
        assert ids[-1] == encoder.eos_id == 1
        assert encoder.eos_id not in ids[:-1]
        assert decoder.decode(ids, skip_special_tokens=True) == content


def test_a_text_cannot_end_its_own_document() -> None:
    encoder = Encoder(trained())
    ids = encoder("before <|eos|> after <|pad|><|bos|>")
    assert [token for token in ids if token < 3] == [encoder.eos_id]
    assert ids.index(encoder.eos_id) == len(ids) - 1


def test_the_folder_is_an_ordinary_tokenizer_of_transformers(tmp_path: Path) -> None:
    loaded = AutoTokenizer.from_pretrained(write_tokenizer(tmp_path))
    assert (loaded.bos_token, loaded.eos_token, loaded.pad_token) == ("<|bos|>", "<|eos|>", "<|pad|>")
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (0, 1, 2)
    assert loaded(STRANGE)["input_ids"] == Encoder(trained())(STRANGE)[:-1]
    assert loaded.decode(loaded(STRANGE)["input_ids"]) == STRANGE


def test_a_long_document_is_encoded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = Encoder(trained())
    lines = "".join(f"line {number}\n" for number in range(50))
    whole = encoder(lines)
    monkeypatch.setattr(ours, "LONGEST", 40)
    assert encoder(lines) == whole  # merges do not cross the ends of these lines
    decoder = Tokenizer.from_str(trained()["tokenizer.json"].decode())
    assert decoder.decode(encoder("x" * 100)) == "x" * 100


def test_a_tokenizer_is_loaded_from_a_file_a_folder_or_by_transformers(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "t")
    assert load(str(folder)) == trained()
    from_file = load(str(folder / "tokenizer.json"))
    assert Encoder(from_file).eos_token == "<|eos|>"
    assert Encoder(from_file).sha256 == tokenizer_hash(folder)


def test_a_tokenizer_without_a_fast_form_is_converted_by_transformers(tmp_path: Path) -> None:
    model = json.loads(trained()["tokenizer.json"])["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(map(" ".join, model["merges"])))
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "eos_token": "<|eos|>",
        "bos_token": "<|bos|>",
        "unk_token": "<|eos|>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Encoder(load(str(tmp_path)))("the key writes") == Encoder(trained())("the key writes")


def test_truncation_and_padding_of_a_loaded_tokenizer_are_switched_off() -> None:
    tokenizer = Tokenizer.from_str(trained()["tokenizer.json"].decode())
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    narrow = Encoder(trained() | {"tokenizer.json": tokenizer.to_str().encode()})
    assert narrow(STRANGE) == Encoder(trained())(STRANGE)


@pytest.mark.parametrize("name", ["train:10", "train:", "train:many", "train:-5"])
def test_a_vocabulary_that_cannot_be_trained_is_refused(name: str) -> None:
    with pytest.raises(DataError, match=r"N from 259"):
        requested_size(name)


def test_a_tokenizer_that_cannot_be_loaded_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"'no/such' cannot be loaded: .*folder with a tokenizer.json, or train:32000"
    ) as caught:
        load("no/such")
    assert "\n" not in str(caught.value)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="not a tokenizer"):
        load(str(tmp_path))
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</end>"}}))
    with pytest.raises(DataError, match="must have an 'eos_token' in its vocabulary, got '</end>'"):
        load(str(tmp_path))


def test_the_sample_is_bounded_and_spread_over_the_source(tmp_path: Path) -> None:
    texts = write_texts(tmp_path, 200)
    source = open_source(str(tmp_path))
    parts = source.parts(2000)
    assert len(parts) > 64
    chosen = list(sample(source, parts, print, 12_800))
    assert 6_400 <= sum(len(content.encode()) for content in chosen) <= 16_000
    assert len(chosen) == 64
    starts = [int(content.split()[1]) for content in chosen]
    assert starts[0] == 0
    assert starts[-1] > 190
    assert list(sample(source, parts, print)) != texts
    assert list(sample(source, parts[:5], print)) == texts[: sum(len(part.pieces) for part in parts[:5])]
