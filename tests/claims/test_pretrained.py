"""`pretrained`: the whole path on a tiny Llama, answers as without a cache, and a verdict by its rule."""

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from lucid_attention import enable_lucid
from lucid_lab import cli
from lucid_lab.claims import pretrained, run_claim
from lucid_lab.claims.pretrained import ALL, CHOSEN, Outcome, cheapest, choose, end_of, judge, share, sweep_table
from lucid_lab.data import IGNORED
from lucid_lab.toys import tuning
from lucid_lab.toys.lab import SMALL, SMOKE, Lab
from lucid_lab.toys.questions import (
    TEST_SEED,
    TRAIN_SEED,
    Context,
    answers,
    needle_context,
    token_losses,
    update_context,
)
from lucid_lab.toys.tuning import Sequences, Subject, Tuning, given, read_texts, texts_sha256, tune

# The words of RULER's prompt and of the boxes, so that a prompt has few tokens.
WORDS = re.findall(
    r"\w+",
    "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about it "
    "afterwards. What are all the numbers for, mentioned in the provided text? One of. Now box holds thing put place.",
)
PIECES = r" ?\d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def write_texts(folder: Path) -> list[str]:
    folder.mkdir()
    texts = []
    for number in range(40):
        random = Random(number)
        texts.append(" ".join(" ".join(random.choices(WORDS, k=9)).capitalize() + "." for _ in range(80)))
        (folder / f"text-{number}.txt").write_text(texts[-1])
    return texts


def write_model(folder: Path, texts: list[str]) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PIECES), "isolated"), as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """The smallest scale, with a tiny checkpoint and texts."""
    root = tmp_path_factory.mktemp("pretrained")
    write_model(root / "model", write_texts(root / "texts"))
    folders = {"model": str(root / "model"), "texts": str(root / "texts")}
    return Lab(SMOKE, root / "out", processes=1, quiet=True, **folders)


@pytest.fixture(scope="module")
def result(lab: Lab) -> dict[str, Any]:
    # Filling memory with NaN would be timed too.
    torch.use_deterministic_algorithms(False)
    return run_claim("pretrained", lab)


@pytest.fixture(scope="module")
def subject(lab: Lab) -> Subject:
    settings = {"train_tokens": 2000, "long_texts": 2, "long_tokens": 513, "texts": lab.texts}
    first = given(lab.model)
    (record,) = lab.map(read_texts, [{"subject": first, "sha256": texts_sha256(lab.texts), **settings}])
    return Subject(first.model, first.sha256, record["folder"])


def kept(lab: Lab) -> Path:
    return lab.out / "kept"


def test_it_runs_to_a_result_with_all_models(lab: Lab, result: dict[str, Any]) -> None:
    assert result["verdict"] == "too small to judge"
    assert result["rule"].startswith("The verdict")
    assert "κ(P)" in result["ours"]
    assert [figure["kind"] for figure in result["figures"]] == ["lines"] * 4
    assert all(len(row) == len(table["columns"]) for table in result["tables"] for row in table["rows"])
    found = next(table for table in result["tables"] if table["title"] == "Needles found, percent")
    assert {"before training", "softmax", "LUCID, all layers", "LUCID, chosen layers"} <= set(found["columns"])


def test_the_ramp_ends_at_the_root_of_the_head_size_and_is_kept(lab: Lab, result: dict[str, Any]) -> None:
    records = {path.parent: json.loads(path.read_text()) for path in kept(lab).glob("tune-*/record.json")}
    trained = [(folder, one) for folder, one in records.items() if one["settings"]["keep"]]
    assert len(trained) == 3
    for folder, one in trained:
        layers, sharpness = one["settings"]["layers"], one["result"]["sharpness"]
        assert [sharpness[0], sharpness[-1]] == ([8 * 4, 4] if layers else [0, 0])
        model = tuning.load_model(folder / "model-4")
        changed = token_losses(model, torch.arange(3, 60)[None])
        plain = token_losses(enable_lucid(model, strength=0.0), torch.arange(3, 60)[None])
        assert torch.equal(changed, plain) != bool(layers)
    assert {tuple(one["settings"]["layers"]) for _, one in trained} > {(), (0, 1, 2)}


def test_without_a_model_it_is_skipped_with_a_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["experiment", "pretrained", "--out", str(tmp_path / "out")]) == 1
    assert "python tools/get_smollm2.py" in capsys.readouterr().err
    assert "is no checkpoint" in str(pretrained.lacks(Lab(SMALL, tmp_path, model=str(tmp_path), texts=str(tmp_path))))


def test_too_few_texts_are_refused(lab: Lab, tmp_path: Path) -> None:
    settings = {"train_tokens": 10**6, "long_texts": 2, "long_tokens": 513, "texts": lab.texts}
    with pytest.raises(ValueError, match="--texts must hold 1000000 tokens to train on"):
        read_texts(tmp_path, {"subject": given(lab.model), **settings})


@pytest.mark.parametrize("lucid", [False, True])
def test_questions_after_one_context_are_answered_as_each_alone(lab: Lab, subject: Subject, lucid: bool) -> None:
    model = subject.load(kept(lab))
    if lucid:
        enable_lucid(model)
    context = update_context(subject.tokenizer(), 4, 3, 0)
    assert len(context.questions) == 4
    for question, record in zip(context.questions, answers(model, context), strict=True):
        ids = torch.tensor([[*context.ids, *question.ids, *question.answer]])
        alone = token_losses(model, ids)[-len(question.answer) :].mean().item()
        assert record["loss"] == pytest.approx(alone, abs=0.02)


def text_of(subject: Subject, context: Context, number: int) -> str:
    return str(subject.tokenizer().decode([*context.ids, *context.questions[number].ids]))


def test_a_context_holds_the_answers_of_its_questions(lab: Lab, subject: Subject) -> None:
    tokenizer = subject.tokenizer()
    hay = subject.hay(kept(lab), "test")
    context = needle_context(tokenizer, hay, 512, 3, 0, asked=2)
    keys = set()
    for number, question in enumerate(context.questions):
        text = text_of(subject, context, number)
        assert len(context.ids) + len(question.ids) + len(question.answer) <= 512
        key, again = re.findall(r"number for (\S+) mentioned", text)
        assert key == again
        assert f"for {key} is: {tokenizer.decode(question.answer).strip()}." in text
        keys.add(key)
    assert len(keys) == 2
    boxes = update_context(tokenizer, 4, 3, 0)
    for number, question in enumerate(boxes.questions):
        name = re.findall(r"the (\w+) box holds the$", text_of(subject, boxes, number))[0]
        things = re.findall(rf"Now the {name} box holds the (\w+)\.", text_of(subject, boxes, number))
        assert len(set(things)) == 3
        assert tokenizer.decode(question.answer).strip() == things[-1]
        assert question.stale == tuple(
            tokenizer(f" {thing}", add_special_tokens=False)["input_ids"][0] for thing in things[:-1]
        )


def test_training_and_tests_have_different_needles(lab: Lab, subject: Subject) -> None:
    hay, tokenizer = subject.hay(kept(lab), "train"), subject.tokenizer()
    first, second = (needle_context(tokenizer, hay, 256, 1, 3, asked=1, seed=seed) for seed in (TEST_SEED, TRAIN_SEED))
    assert first.questions[0].answer != second.questions[0].answer


def test_a_sequence_of_needles_has_labels_on_its_answers_only(lab: Lab, subject: Subject) -> None:
    sequences = Sequences(Tuning(subject, (), 0.0, (8,), length=512), kept(lab))
    # The second sequence with needles has two of them.
    ids, labels = (tensor[0] for tensor in sequences.sequence(7))
    assert len(ids) == len(labels) <= 512
    learned = labels != IGNORED
    assert torch.equal(ids[learned], labels[learned])
    tokenizer = subject.tokenizer()
    text, given_answers = tokenizer.decode(ids), tokenizer.decode(labels[learned]).split()
    written = dict(re.findall(r"numbers for (\S+) is: (\d+)", text))
    asked = re.findall(r"number for (\S+) mentioned in the provided text is", text)
    assert len(set(asked)) == len(written) == 2
    assert given_answers == [written[key] for key in asked]
    plain, all_labels = sequences.sequence(6)
    assert plain.shape == (1, 512)
    assert torch.equal(plain, all_labels)
    # Other seeds have other orders.
    other = Sequences(Tuning(subject, (), 0.0, (8,), length=512, seed=1), kept(lab))
    assert any(not torch.equal(sequences.sequence(step)[0], other.sequence(step)[0]) for step in range(3))


def test_a_stopped_training_resumes_with_the_same_numbers(
    lab: Lab, subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Tuning(subject, (0, 2), 1e-3, (6,), ramp=2, start=32.0, length=512, test_every=2)
    folders = [kept(lab) / name for name in ("whole", "stopped")]
    for folder in folders:
        folder.mkdir()
    whole = tune(folders[0], run)
    monkeypatch.setattr(tuning, "SAVE_EVERY", 2)
    steps: list[int] = []
    sequence = Sequences.sequence

    def stopping(self: Sequences, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        steps.append(step)
        if len(steps) == 4:
            raise KeyboardInterrupt
        return sequence(self, step)

    monkeypatch.setattr(Sequences, "sequence", stopping)
    with pytest.raises(KeyboardInterrupt):
        tune(folders[1], run)
    resumed = tune(folders[1], run)
    assert steps == [0, 1, 2, 3, 2, 3, 4, 5]
    assert resumed["test_step"] == whole["test_step"] == [0, 2, 4, 6]
    assert resumed["loss"] == pytest.approx(whole["loss"], abs=1e-6)
    assert resumed["test_loss"] == pytest.approx(whole["test_loss"], abs=1e-6)
    assert resumed["sharpness"] == whole["sharpness"]
    assert not (folders[1] / tuning.STATE).exists()


def test_the_largest_set_of_cheap_layers_that_is_allowed_is_chosen() -> None:
    changes = (0.5, 0.1, 0.2, 0.05, 0.6, 0.7, 0.8, 0.9)
    one = [{"layers": [layer], "change": change} for layer, change in enumerate(changes)]
    # The second text turns layers 1 and 3 around.
    other = [{**record, "change": {1: -0.1, 3: 0.3}.get(record["layers"][0], record["change"])} for record in one]
    sets = cheapest([[*one, {"layers": [0, 1], "change": 9.0}], other])
    assert sets == [[1], [1, 3], [0, 1, 2, 3]]
    assert choose(sets, [0.1, 0.25, 0.3]) == [1, 3]
    assert choose(sets, [0.5, 0.6, 0.7]) == [1]


def test_the_fall_of_a_loss_is_read_after_the_ramp() -> None:
    record = {"test_step": [0, 10, 15, 20, 25], "test_loss": [9.0, 5.0, 3.0, 2.5, 2.0]}
    assert end_of(record, 20) == (2.5, 0.5)
    assert end_of(record, 25) == (2.0, 0.5)


def test_every_question_counts_once_and_a_rate_at_the_edge_is_named() -> None:
    assert share({"right": [[True, False, False], [True]]}) == 50
    rates = (1e-5, 1e-4, 1e-3)
    chosen = dict(zip(("softmax", ALL, CHOSEN), rates, strict=True))
    rows = sweep_table(dict.fromkeys(chosen, (1.0, 2.0, 3.0)), chosen, rates)["rows"]
    assert [row[-1] for row in rows] == ["1e-05, the smallest tried", "0.0001", "0.001, the largest tried"]


SOFTMAX_END = Outcome(loss=2.4, fell=0.02, needles=(50.0, 60.0, 40.0, 70.0))
BETTER = (80.0, 95.0, 75.0, 98.0)


@pytest.mark.parametrize(
    ("chosen", "verdict"),
    [
        (Outcome(2.42, 0.0, BETTER), "holds"),
        (Outcome(2.42, 0.0, SOFTMAX_END.needles), "partly"),
        (Outcome(2.46, 0.0, SOFTMAX_END.needles), "does not hold"),
        (Outcome(2.60, 0.2, BETTER), "partly"),
        (Outcome(2.60, 0.0, SOFTMAX_END.needles), "does not hold"),
        (Outcome(2.60, 0.2, SOFTMAX_END.needles), "too small to judge"),
        # A lead within two standard errors is no gain.
        (Outcome(2.60, 0.0, (50.0, 60.0, 40.0, 90.0)), "does not hold"),
    ],
)
def test_the_verdict_follows_the_rule(chosen: Outcome, verdict: str) -> None:
    everywhere = Outcome(loss=3.1, fell=0.3, needles=(0.0, 0.0, 10.0, 0.0))
    found, because = judge({ALL: everywhere, CHOSEN: chosen}, SOFTMAX_END)
    assert found == verdict
    assert because.count("too early to be judged") == 1 + (chosen.fell > 0.05)
