"""Samples of S-NIAH and M-NIAH: their words, their length, the places of their needles; and haystacks."""

import ast
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lm_eval.tasks
import pytest
from lm_eval.tasks.ruler import common_utils
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from lucid_lab.evals import needles
from lucid_lab.evals.haystacks import read_prose
from lucid_lab.evals.needles import make_needles
from lucid_lab.evals.tokens import count_tokens, load_tokenizer

CASES: dict[str, dict[str, Any]] = {
    "one in noise": {"length": 512, "haystack": "noise"},
    "ten in prose": {"length": 2048, "needles": 10},
    "uuids for words": {"length": 2048, "needles": 3, "kind": "uuids"},
    "words for uuids": {"length": 2048, "needles": 3, "keys": "uuids", "kind": "words"},
    "two of six keys": {"length": 2048, "needles": 6, "queries": 2},
    "two keys with two values": {"length": 2048, "needles": 4, "queries": 2, "values": 2},
    "among needle lines": {"length": 2048, "needles": 4, "haystack": "needles"},
}


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> Any:
    return load_tokenizer(str(tokenizer_folder))


@pytest.fixture(scope="module")
def metaspace() -> Any:
    """A tokenizer of another kind: words begin with ▁, and a special token is before every text."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    texts = [needles.NEEDLE, needles.PROMPT, *read_prose("prose").sentences[:300], "0123456789 - 1 2 3 4 5 6 7 8 9 0"]
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>", "<s>"]))
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", unk_token="<unk>")


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_a_sample_fills_its_length_with_needles_and_asks_for_its_answers(
    settings: dict[str, Any], tokenizer: Any
) -> None:
    length, keys, values = settings["length"], settings.get("needles", 1), settings.get("values", 1)
    for index in range(3):
        sample = make_needles(tokenizer, index=index, **settings)
        assert sample.tokens == len(tokenizer(sample.prompt)["input_ids"])
        assert len(tokenizer(sample.answer)["input_ids"]) <= sample.answer_tokens
        # A line that looks like a needle is as long as a needle, and is not cut.
        line = max(needle.span[1] - needle.span[0] for needle in sample.needles)
        spare = line if settings.get("haystack") == "needles" else 10
        assert 0 <= length - sample.tokens - sample.answer_tokens <= max(spare, 0.03 * length)
    total = keys * values
    assert len({needle.key for needle in sample.needles}) == keys
    assert len({needle.value for needle in sample.needles}) == len(sample.needles) == total
    for needle in sample.needles:
        assert sample.question.count(needle.text) == sample.question.count(needle.value) == 1
    question = sample.question.rsplit("\n", 1)[1]
    assert {needle.key for needle in sample.needles if needle.key in question} == set(sample.query)
    assert len(sample.query) == settings.get("queries", 1)
    assert sample.answer == f" {', '.join(needle.value for needle in sample.asked)}."
    places = [question.index(needle.key) for needle in sample.asked]
    assert places == sorted(places)
    assert len(sample.asked) == len(sample.query) * values


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
@pytest.mark.parametrize("kind", ["byte level", "metaspace"])
def test_spans_decode_to_needles_and_answers(
    settings: dict[str, Any], kind: str, tokenizer: Any, metaspace: Any
) -> None:
    tokenizer = {"byte level": tokenizer, "metaspace": metaspace}[kind]
    sample = make_needles(tokenizer, index=3, **settings | {"length": settings["length"] * (1 + (kind == "metaspace"))})
    ids = tokenizer(sample.prompt)["input_ids"]
    assert count_tokens(tokenizer, sample.prompt) == len(ids)
    for needle in sample.needles:
        for span, text in ((needle.span, needle.text), (needle.value_span, needle.value)):
            part = ids[slice(*span)]
            assert text in tokenizer.decode(part)
            # With one token less on either side, the span would not hold the text.
            assert text not in tokenizer.decode(part[1:])
            assert text not in tokenizer.decode(part[:-1])
    assert sample.answer_spans == [needle.value_span for needle in sample.asked]


def constants(file: str) -> dict[str, Any]:
    """The strings of a harness module. It is parsed, not imported: an import takes seconds and a download."""
    source = (Path(lm_eval.tasks.__file__).parent / "ruler" / file).read_text()
    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.Assign)]
    return {
        node.targets[0].id: node.value.value
        for node in nodes
        if isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Constant)
    }


@pytest.mark.parametrize("queries", [1, 2])
def test_the_words_are_those_of_ruler(queries: int, tokenizer: Any) -> None:
    sample = make_needles(tokenizer, 1024, 2, queries=queries, haystack="noise")
    template, sentence = constants("niah_utils.py")["TEMPLATE"], constants("prepare_niah.py")["NEEDLE"]
    kind = "numbers"
    for needle in sample.needles:
        assert needle.text == sentence.format(type_needle_v=kind, key=needle.key, value=needle.value)
    if queries == 1:
        # The harness's `generate_input_output` does the same.
        template = template.replace("Some", "A").replace("are all", "is").replace("are", "is")
        kind = "number"
    query = re.search(r"for (.*) mentioned", sample.prefix)
    assert query is not None
    assert sample.question == template.format(type_needle_v=kind, context=sample.context, query=query[1])
    ending = "is" if queries == 1 else "are"
    assert sample.prefix == f"The special magic {kind} for {query[1]} mentioned in the provided text {ending}"


def test_a_sample_depends_on_its_arguments_alone(tokenizer: Any) -> None:
    random.seed(1)
    before = random.getstate()
    sample = make_needles(tokenizer, 512, 2, index=5)
    assert random.getstate() == before
    make_needles(tokenizer, 512, 2, index=4)
    random.seed(2)
    assert make_needles(tokenizer, 512, 2, index=5) == sample
    others = [{"seed": 1}, {"length": 640}, {"needles": 3}, {"index": 6}]
    drawn = [sample, *(make_needles(tokenizer, **{"length": 512, "needles": 2, "index": 5, **how}) for how in others)]
    assert len({one.needles[0].value for one in drawn}) == 5


def test_which_needle_is_asked_for_differs_between_samples(tokenizer: Any) -> None:
    samples = [make_needles(tokenizer, 512, 4, haystack="noise", index=index) for index in range(40)]
    asked = [sample.needles.index(sample.asked[0]) for sample in samples]
    assert {asked.count(place) > 3 for place in range(4)} == {True}
    two = [make_needles(tokenizer, 1024, 2, values=2, haystack="noise", index=index).needles for index in range(40)]
    assert 3 < sum(first.key == second.key for first, second, *_ in two) < 30


def test_depths_are_independent_as_in_ruler(tokenizer: Any) -> None:
    samples = [make_needles(tokenizer, 1024, 2, haystack="noise", index=index).needles for index in range(60)]
    assert all(first.depth < second.depth for first, second in samples)
    # Two draws lie in one half of the text half of the time.
    assert 18 < sum((first.depth < 0.5) == (second.depth < 0.5) for first, second in samples) < 42


def test_keys_and_values_never_repeat(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(needles.MAKERS, "numbers", lambda random: str(random.randrange(100, 160)))
    with pytest.raises(ValueError, match="not enough different numbers"):
        make_needles(tokenizer, 2048, 2, keys="numbers", haystack="needles")
    sample = make_needles(tokenizer, 2048, 10, keys="numbers", values=2, haystack="noise")
    used = [*{needle.key for needle in sample.needles}, *(needle.value for needle in sample.needles)]
    assert len(used) == len(set(used)) == 30


def test_a_text_of_ones_own_is_prose(tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a fox. It lived\nin a wood! Did it? Yes.\n" * 4)
    (tmp_path / "more.jsonl").write_text('{"text": "A line of JSON."}\n')
    sentences = ["Once upon a time there was a fox.", "It lived in a wood!", "Did it?"]
    assert read_prose(str(text)).sentences[:3] == sentences
    assert "A line of JSON." in read_prose(str(tmp_path)).sentences
    made = needles.dataset(
        variant="single_2", length=512, samples=2, haystack=str(text), tokenizer=tokenizer.name_or_path
    )
    assert made["test"][0]["input"].count("fox") > 5
    assert made["test"][0]["haystack_repeats"] >= 1
    assert "is too short for 512 tokens: in 2 of 2 samples its text repeats" in capsys.readouterr().err
    empty, bad = tmp_path / "empty.txt", tmp_path / "bad.jsonl"
    empty.write_text("  \n")
    bad.write_text('{"words": 1}\n')
    for name, message in {str(empty): "must have sentences", str(bad): "text"}.items():
        with pytest.raises(ValueError, match=message):
            read_prose(name)
    for name in ("", "no/such/file"):
        with pytest.raises(ValueError, match="--haystack must be one of"):
            read_prose(name)


@pytest.mark.parametrize("haystack", ["noise", "prose"])
def test_131072_tokens_are_made_from_few_measurements(
    haystack: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def counted(tokenizer: Any, text: str) -> int:
        measured.append(len(text))
        return count_tokens(tokenizer, text)

    monkeypatch.setattr(needles, "count_tokens", counted)
    sample = make_needles(tokenizer, 131_072, 10, haystack=haystack, answer_tokens=128)
    assert 0.97 * 131_072 < sample.tokens + 128 <= 131_072
    assert len(measured) <= 9


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"length": 131_073}, "--lengths must be 1 to 131072, got 131073"),
        ({"needles": 0}, "--needles must be 1 to --lengths 512, got 0"),
        ({"needles": 2, "queries": 3}, "queries 1 to needles, got 3"),
        ({"kind": "poems"}, "numbers, words, uuids, got 'words' and 'poems'"),
        ({"haystack": "no/such/file"}, "got 'no/such/file', which is none"),
        ({"answer_tokens": -1}, "--answer-tokens must not be negative"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any], message: str, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make_needles(tokenizer, **{"length": 512, **wrong})


def test_a_length_that_is_too_short_is_refused_with_one_that_would_do(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"20 needles .* more than --lengths 256: .* at least \d+") as refused:
        make_needles(tokenizer, 256, 20, haystack="noise")
    needed = int(str(refused.value).rsplit(" ", 1)[1])
    longer = needed + 8 + needed // 16
    assert make_needles(tokenizer, longer, 20, haystack="noise").tokens <= longer


OUTPUTS = {
    "right": (lambda right: f" {right[0]} and {right[1]}.", 1.0),
    "half": (lambda right: f" {right[1]}", 0.5),
    "another case": (lambda right: f"\x00{right[0].upper()}\n{right[1].upper()}", 1.0),
    "nothing": (lambda right: "", 0.0),
}


@pytest.mark.parametrize(("output", "score"), OUTPUTS.values(), ids=OUTPUTS)
def test_scores_agree_with_those_of_the_harness(output: Callable[[Any], str], score: float) -> None:
    sample = {"outputs": ["quiet-river", "loud-stone"], "max_length": 4096}
    results = [output(sample["outputs"])]
    assert needles.process_results(sample, results) == {"score": score}
    assert common_utils.process_results(sample, results)["4096"] == score
