"""A new attention is one file and one line: a toy that is only registered passes the contract, analysis and report."""

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lucid_attention import ATTENTIONS, LucidForCausalLM
from lucid_attention.models.decoder.presets import tiny
from lucid_attention.nn.causal import CausalAttention
from lucid_lab import cli
from lucid_lab.analysis.conditioning import condition_numbers
from lucid_lab.analysis.hit_rate import Query, attention_maps, hit_rates
from lucid_lab.analysis.jacobian import jacobians
from lucid_lab.data.tokenizer import train
from lucid_lab.report.figures import RESERVE, colour_of
from tests.analysis.subjects import Plain, layers_of, tokens
from tests.nn import (
    contract,
    test_contract_cache,
    test_contract_precision,
    test_contract_tokens,
    test_contract_training,
    test_contract_weights,
)
from tests.report.samples import memory_update

NAME = "toy"
CONTRACT = (
    test_contract_cache,
    test_contract_precision,
    test_contract_tokens,
    test_contract_training,
    test_contract_weights,
)


class ToyAttention(CausalAttention):
    """Softmax attention over values that a gate of their own token has scaled."""

    title = "gated values"

    def __init__(self, hidden_size: int, num_heads: int, **options: Any) -> None:
        super().__init__(hidden_size, num_heads, **options)
        self.gate = nn.Linear(hidden_size, self.num_kv_heads)

    def gates(self, x: Tensor) -> Tensor:
        return self.gate(x).sigmoid().transpose(1, 2)

    def values(self, x: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        return v * self.gates(x)[..., None]

    def analysis_inputs(self, x: Tensor, q: Tensor, k: Tensor, key_mask: Tensor | None) -> dict[str, Any]:
        # P = I: W = A diag(gates).
        return {"preconditioned": True, "strength": 0.0, "beta": self.gates(x)}


class SilentAttention(CausalAttention):
    """Overrides `values` and does not tell analysis about it."""

    def values(self, x: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        return 2 * v


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ATTENTIONS, NAME, ToyAttention)
    monkeypatch.setitem(contract.CASES, NAME, (NAME, {}))


def contract_calls() -> Iterator[Any]:
    """Every contract test that runs for all of ATTENTIONS, with the toy in the place of the attention."""
    for module in CONTRACT:
        for function_name, function in vars(module).items():
            marks = [mark for mark in getattr(function, "pytestmark", []) if mark.name == "parametrize"]
            choices: list[list[dict[str, Any]]] = []
            for mark in marks:
                names = [name.strip() for name in mark.args[0].split(",")] if isinstance(mark.args[0], str) else None
                names = list(mark.args[0]) if names is None else names
                values = [value if len(names) > 1 else (value,) for value in mark.args[1]]
                chosen = [dict(zip(names, value, strict=True)) for value in values]
                if not {"name", "case"} & set(names):
                    choices.append(chosen)
                elif any(set(ATTENTIONS) <= {row.get(key) for row in chosen} for key in ("name", "case")):
                    toys = [row | {key: NAME for key in ("name", "case") if key in row} for row in chosen]
                    choices.append([row for at, row in enumerate(toys) if row not in toys[:at]])
                else:
                    break
            else:
                if marks and function_name.startswith("test_"):
                    for rows in product(*choices):
                        arguments = {key: value for row in rows for key, value in row.items()}
                        if NAME in arguments.values():
                            others = [str(value) for value in arguments.values() if value != NAME]
                            yield pytest.param(function, arguments, id="-".join([function_name, *others]))


CALLS = list(contract_calls())


@pytest.mark.parametrize(("function", "arguments"), CALLS)
def test_the_contract_holds(function: Any, arguments: dict[str, Any]) -> None:
    function(**arguments)


def test_the_contract_is_complete() -> None:
    """Of every file with contract tests some ran, and of all files most tests."""
    assert {call.values[0].__module__ for call in CALLS} == {module.__name__ for module in CONTRACT}
    assert len({call.values[0] for call in CALLS}) >= 25


def test_analysis_reads_the_layer_as_the_attention_describes_it() -> None:
    model, ids = Plain(NAME, NAME).double(), tokens(2, 13)
    outputs: list[Tensor] = []
    for module in model.layers:
        module.register_forward_hook(lambda module, x, output: outputs.append(output[0]))
    layers = layers_of(model, ids)
    assert [layer.attention for layer in layers] == [NAME, NAME]
    rows = torch.arange(13)
    for layer, module, output in zip(layers, model.layers, outputs, strict=True):
        o = torch.zeros(2, 4, 13, layer.v.shape[-1], dtype=torch.float64)
        for head in layer.heads():
            torch.testing.assert_close(head.weights(rows).sum(-1), torch.ones(2, 13, dtype=torch.float64))
            o[head.row, head.query_heads] = head.effective(rows) @ head.v
        torch.testing.assert_close(module.o_proj(o.transpose(1, 2).flatten(2)), output)
    (record,) = hit_rates(model, ids, [Query(12, ((0, 13),))], layers=[1], heads=[2])
    assert record["softmax"] == pytest.approx(1)
    assert 0 < record["signed"] < 0.9
    assert attention_maps(model, ids, bins=5)[0]["attention"] == NAME
    assert len(jacobians(model, ids, layers=[0])) == 2 * 4
    assert len(condition_numbers(model, ids, [13], layers=[0])) == 2 * 2


def test_an_attention_that_does_not_describe_its_change_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ATTENTIONS, "silent", SilentAttention)
    with pytest.raises(ValueError, match="layer 1 has attention 'silent', which has no softmax that analysis knows"):
        layers_of(Plain("softmax", "silent"), tokens(1, 9))


def test_lucid_analyze_takes_a_checkpoint_of_it(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    LucidForCausalLM(tiny(NAME, vocab_size=320, num_key_value_heads=1, head_dim=8, **sizes)).save_pretrained(tmp_path)
    train([Path(__file__).read_text()], 300).save_pretrained(tmp_path)
    words = ["analyze", str(tmp_path), "--tokens-from", "stdlib", "--length", "30", "--out", str(tmp_path / "out")]
    assert cli.main(words) == 0
    results = json.loads((tmp_path / "out" / "analysis.json").read_text())["results"]
    assert set(results) >= {"conditioning", "jacobian"}
    assert (tmp_path / "out" / "maps.json").exists()


def test_the_report_gives_it_a_colour_of_its_own(tmp_path: Path) -> None:
    made = memory_update()
    for figure in made["figures"][:2]:
        for group in figure["groups"]:
            group["bars"].append({"name": ToyAttention.title, "role": NAME, "value": 50.0, "spread": 1.0})
    made["figures"][2]["series"].append(
        {"name": ToyAttention.title, "role": NAME, "x": [64, 256], "y": [20, 30], "spread": None}
    )
    (tmp_path / "result.json").write_text(json.dumps(made))
    page = tmp_path / "page.html"
    assert cli.main(["report", str(tmp_path / "result.json"), "--out", str(page)]) == 0
    assert colour_of(NAME) in RESERVE
    assert ToyAttention.title in page.read_text()
