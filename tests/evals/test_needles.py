"""Samples of S-NIAH and M-NIAH: their words, their length, the places of their needles."""

import ast
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import lm_eval.tasks
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.tasks.ruler import common_utils
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from lucid_lab.evals.benchmarks import needles
from lucid_lab.evals.benchmarks.haystacks import Prose, lines, most_units, noise, read_prose
from lucid_lab.evals.benchmarks.needles import Needles, draft, make_sample
from lucid_lab.evals.cells import EvalError
from lucid_lab.evals.tokens import count_tokens, load_tokenizer

CASES = {
    "one in noise": Needles(512, haystack="noise"),
    "four in noise": Needles(1024, 4, haystack="noise"),
    "short": Needles(256, 2, haystack="noise"),
    "ten in prose": Needles(2048, 10),
    "uuids for words": Needles(2048, 3, kind="uuids"),
    "words for uuids": Needles(2048, 3, keys="uuids", kind="words"),
    "numbers for numbers": Needles(1024, 3, keys="numbers"),
    "two of six keys": Needles(2048, 6, queries=2),
    "three values": Needles(2048, 2, values=3),
    "two keys with two values": Needles(2048, 4, queries=2, values=2),
    "among needle lines": Needles(2048, 4, haystack="needles"),
    "another seed": Needles(1024, 4, seed=7),
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


def prompt(sample: dict[str, Any]) -> str:
    return f"{sample['input']} {sample['gen_prefix']}"


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_a_sample_fills_its_length_and_no_more(settings: Needles, tokenizer: Any) -> None:
    for index in range(4):
        sample = make_sample(settings, tokenizer, index)
        tokens = len(tokenizer(prompt(sample))["input_ids"])
        assert sample["tokens"] == tokens
        answer = len(tokenizer(f" {', '.join(sample['outputs'])}.")["input_ids"])
        assert answer <= sample["answer_tokens"]
        total = tokens + sample["answer_tokens"]
        assert total <= settings.length
        # A line that looks like a needle is as long as a needle, and is not cut.
        line = max(needle["span"][1] - needle["span"][0] for needle in sample["needles"])
        spare = line if settings.haystack == "needles" else 10
        assert settings.length - total <= max(spare, 0.03 * settings.length)


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_needles_are_there_once_and_spread_over_the_depth(settings: Needles, tokenizer: Any) -> None:
    sample = make_sample(settings, tokenizer, 1)
    in_order = sample["needles"]
    total = settings.needles * settings.values
    assert len(in_order) == total
    lines = sample["input"].count("One of the special magic")
    assert lines > total + 10 if settings.haystack == "needles" else lines == total
    for needle in in_order:
        assert sample["input"].count(needle["text"]) == 1
        assert sample["input"].count(needle["value"]) == 1
    assert len({needle["key"] for needle in in_order}) == settings.needles
    assert len({needle["value"] for needle in in_order}) == total
    context = sample["input"].split("\n", 1)[1].rsplit("\n", 1)[0]
    for share, needle in enumerate(in_order):
        depth = context.index(needle["text"]) / len(context)
        # Depths are shares of the pieces of hay: needles, and pieces of unequal length, shift them in the text.
        shift = total * len(needle["text"]) / len(context) + 0.05
        assert share / total - shift <= depth <= (share + 1) / total + shift


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_the_question_asks_for_the_answers(settings: Needles, tokenizer: Any) -> None:
    sample = make_sample(settings, tokenizer, 2)
    question = sample["input"].rsplit("\n", 1)[1]
    asked = {needle["key"] for needle in sample["needles"] if needle["asked"]}
    assert {needle["key"] for needle in sample["needles"] if needle["key"] in question} == asked
    assert len(asked) == settings.queries
    answers = [needle["value"] for needle in sample["needles"] if needle["asked"]]
    assert sorted(sample["outputs"]) == sorted(answers)
    assert len(answers) == settings.queries * settings.values
    keys = [needle["key"] for value in sample["outputs"] for needle in sample["needles"] if needle["value"] == value]
    places = [question.index(key) for key in keys]
    assert places == sorted(places)


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
@pytest.mark.parametrize("kind", ["byte level", "metaspace"])
def test_spans_decode_to_needles_and_answers(settings: Needles, kind: str, tokenizer: Any, metaspace: Any) -> None:
    tokenizer = {"byte level": tokenizer, "metaspace": metaspace}[kind]
    if kind == "metaspace":
        settings = replace(settings, length=2 * settings.length)
    sample = make_sample(settings, tokenizer, 3)
    ids = tokenizer(prompt(sample))["input_ids"]
    for needle in sample["needles"]:
        for span, text in ((needle["span"], needle["text"]), (needle["value_span"], needle["value"])):
            part = ids[slice(*span)]
            assert text in tokenizer.decode(part)
            # With one token less on either side, the span would not hold the text.
            assert text not in tokenizer.decode(part[1:])
            assert text not in tokenizer.decode(part[:-1])
    spans = {tuple(needle["value_span"]): needle["value"] for needle in sample["needles"]}
    assert [spans[tuple(span)] for span in sample["answer_spans"]] == sample["outputs"]


def test_tokens_are_counted_as_the_model_gets_them(tokenizer: Any, metaspace: Any) -> None:
    for either in (tokenizer, metaspace):
        for text in ("", "The quick brown fox.", needles.PROMPT):
            assert count_tokens(either, text) == len(either(text)["input_ids"])


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
    sample = make_sample(Needles(1024, 2, queries=queries, haystack="noise"), tokenizer, 0)
    template, sentence = constants("niah_utils.py")["TEMPLATE"], constants("prepare_niah.py")["NEEDLE"]
    kind = "numbers"
    for needle in sample["needles"]:
        assert needle["text"] == sentence.format(type_needle_v=kind, key=needle["key"], value=needle["value"])
    if queries == 1:
        # The harness's `generate_input_output` does the same.
        template = template.replace("Some", "A").replace("are all", "is").replace("are", "is")
        kind = "number"
    context = sample["input"].split("\n", 1)[1].rsplit("\n", 1)[0]
    query = re.search(r"for (.*) mentioned", sample["gen_prefix"])
    assert query is not None
    assert sample["input"] == template.format(type_needle_v=kind, context=context, query=query[1])
    ending = "is" if queries == 1 else "are"
    assert sample["gen_prefix"] == f"The special magic {kind} for {query[1]} mentioned in the provided text {ending}"


def test_a_sample_depends_on_seed_length_needles_and_index_alone(tokenizer: Any) -> None:
    settings = Needles(512, 2)
    random.seed(1)
    before = random.getstate()
    sample = make_sample(settings, tokenizer, 5)
    assert random.getstate() == before
    make_sample(settings, tokenizer, 4)
    random.seed(2)
    assert make_sample(settings, tokenizer, 5) == sample
    others = [replace(settings, seed=1), replace(settings, length=640), replace(settings, needles=3)]
    drafts = [draft(settings, 5), draft(settings, 6), *(draft(other, 5) for other in others)]
    assert len({drawn.values[0] for drawn in drafts}) == 5
    assert len({drawn.keys[0] for drawn in drafts}) == 5


def test_which_needle_is_asked_for_and_where_it_stands_differ_between_samples() -> None:
    asked = [draft(Needles(512, 4, haystack="noise"), index).asked.index(True) for index in range(40)]
    assert {asked.count(place) > 3 for place in range(4)} == {True}


def test_keys_and_values_never_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(needles.MAKERS, "numbers", lambda random: str(random.randrange(100, 160)))
    settings = Needles(512, 10, keys="numbers", values=2, haystack="needles")
    drawn = draft(settings, 0)
    pairs = [re.findall(r"\d+", line) for line in drawn.hay.take(10)]
    used = [*dict.fromkeys(drawn.keys), *drawn.values, *(number for pair in pairs for number in pair)]
    assert len(used) == 50
    assert len(set(used)) == 50
    with pytest.raises(EvalError, match="not enough different numbers"):
        drawn.hay.take(20)


def test_values_of_one_key_stand_anywhere() -> None:
    drafts = [draft(Needles(2048, 2, values=2, haystack="noise"), index) for index in range(40)]
    together = sum(drawn.keys[0] == drawn.keys[1] for drawn in drafts)
    assert 3 < together < 30


@pytest.mark.parametrize("haystack", ["noise", "needles", "prose"])
def test_hay_grows_at_its_end(haystack: str) -> None:
    hay = draft(Needles(512, haystack=haystack), 0).hay
    for units in (0, 1, 4, 5, 6, 57, 100_000 if haystack == "prose" else 300):
        text = hay.separator.join(hay.take(units))
        assert hay.separator.join(hay.take(units + 9)).startswith(text)
        assert len(text) < len(hay.separator.join(hay.take(units + 1)))
        if haystack == "prose":
            assert len(text.split()) == units


def test_prose_starts_again_after_its_end() -> None:
    class First(random.Random):
        def randrange(self, *_: Any) -> int:
            return 1

    hay = Prose(["A b c.", "D e.", "F."]).from_random_place(First())
    assert hay.take(0) == []
    assert hay.take(4) == ["D e.", "F.", "A"]
    assert hay.take(9) == ["D e.", "F.", "A b c.", "D e.", "F."]


def test_noise_and_lines_are_cut_into_lines() -> None:
    assert [len(line.split(". ")) for line in noise().take(12)] == [5, 5, 2]
    numbers = iter(range(100))
    made = lines(lambda: str(next(numbers)))
    assert (made.take(3), made.take(1), made.take(4)) == (["0", "1", "2"], ["0"], ["0", "1", "2", "3"])


def test_a_text_of_ones_own_is_prose(tmp_path: Path, tokenizer: Any) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a fox. It lived\nin a wood! Did it? Yes.\n" * 9)
    assert read_prose(str(text)).sentences[:3] == [
        "Once upon a time there was a fox.",
        "It lived in a wood!",
        "Did it?",
    ]
    sample = make_sample(Needles(512, haystack=str(text)), tokenizer, 0)
    assert sample["input"].count("fox") > 5
    empty = tmp_path / "empty.txt"
    empty.write_text("  \n")
    with pytest.raises(EvalError, match="must have sentences"):
        read_prose(str(empty))


def test_an_unreachable_hub_is_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise ConnectionError("no way out")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(EvalError, match=r"--haystack essays: .*no way out"):
        read_prose("essays")


@pytest.mark.parametrize("haystack", ["noise", "prose"])
def test_131072_tokens_are_made_from_few_measurements(
    haystack: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def counted(tokenizer: Any, text: str) -> int:
        measured.append(len(text))
        return count_tokens(tokenizer, text)

    monkeypatch.setattr(needles, "count_tokens", counted)
    sample = make_sample(Needles(131_072, 10, haystack=haystack, answer_tokens=128), tokenizer, 0)
    assert 0.97 * 131_072 < sample["tokens"] + 128 <= 131_072
    assert len(measured) <= 8
    ids = tokenizer(prompt(sample))["input_ids"]
    for needle in sample["needles"]:
        assert tokenizer.decode(ids[slice(*needle["span"])]).strip() == needle["text"]


@given(
    st.integers(0, 60),
    st.lists(st.integers(1, 30), min_size=1, max_size=50),
    st.integers(60, 20_000),
    st.integers(0, 64),
)
def test_the_search_ends_with_the_most_units_that_fit(base: int, sizes: list[int], room: int, slack: int) -> None:
    calls = []

    def size(units: int) -> int:
        calls.append(units)
        rounds, over = divmod(units, len(sizes))
        return base + rounds * sum(sizes) + sum(sizes[:over])

    units = most_units(size, room, slack, str)
    assert size(units) <= room
    assert room - size(units) <= slack or size(units + 1) > room
    assert len(calls) < 32


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "too short": ({"length": 255}, "256 to 131072, got 255"),
    "too long": ({"length": 131_073}, "256 to 131072, got 131073"),
    "no needle": ({"needles": 0}, "--needles must be at least 1, got 0"),
    "no value": ({"values": 0}, "--values must be at least 1"),
    "more queries than keys": ({"needles": 2, "queries": 3}, "at most the number of needles, 2, got 3"),
    "an unknown kind": ({"kind": "poems"}, "numbers, words, uuids, got 'poems'"),
    "an unknown key": ({"keys": "poems"}, "--keys must be one of"),
    "an unknown haystack": ({"haystack": "no/such/file"}, "got 'no/such/file', which is none"),
    "a negative room": ({"answer_tokens": -1}, "--answer-tokens must not be negative"),
}


@pytest.mark.parametrize(("wrong", "message"), WRONG.values(), ids=WRONG)
def test_wrong_settings_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(EvalError, match=re.escape(message)):
        Needles(**{"length": 512, **wrong})


def test_a_length_that_is_too_short_is_refused_with_one_that_would_do(tokenizer: Any) -> None:
    settings = Needles(256, 20, haystack="noise")
    with pytest.raises(EvalError, match=r"20 needles .* more than --lengths 256: .* at least \d+") as refused:
        make_sample(settings, tokenizer, 0)
    needed = int(str(refused.value).rsplit(" ", 1)[1])
    longer = replace(settings, length=needed + 8 + needed // 16)
    assert make_sample(longer, tokenizer, 0)["tokens"] <= longer.length
    with pytest.raises(EvalError, match="20 needles"):
        needles.check_fits(settings, tokenizer, 1)


OUTPUTS = {
    "right": (lambda right: f" {right[0]} and {right[1]}.", 1.0),
    "half": (lambda right: f" {right[1]}", 0.5),
    "another case": (lambda right: f"\x00{right[0].upper()}\n{right[1].upper()}", 1.0),
    "wrong": (lambda right: " 42", 0.0),
    "nothing": (lambda right: "", 0.0),
}


@pytest.mark.parametrize(("output", "score"), OUTPUTS.values(), ids=OUTPUTS)
def test_scores_agree_with_those_of_the_harness(output: Callable[[Any], str], score: float, tokenizer: Any) -> None:
    sample = make_sample(Needles(4096, 4, queries=2, kind="words"), tokenizer, 0)
    results = [output(sample["outputs"])]
    assert needles.process_results(sample, results) == {"score": score}
    assert common_utils.process_results(sample, results)["4096"] == score
