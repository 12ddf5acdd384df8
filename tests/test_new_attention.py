"""A new attention is one class and one line: a toy that is only registered works in analysis, claims and report.

The contract tests of tests/nn run for the same toy.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lucid_attention import ATTENTIONS, LucidForCausalLM
from lucid_attention.nn.causal import CausalAttention
from lucid_lab import cli
from lucid_lab.analysis.conditioning import condition_numbers
from lucid_lab.analysis.hit_rate import Query, attention_maps, hit_rates
from lucid_lab.analysis.jacobian import jacobians
from lucid_lab.claims import memory_update, needle_grid
from lucid_lab.data.tokenize import train
from lucid_lab.toys.lab import DEMO
from lucid_lab.training.presets import tiny
from tests.analysis.subjects import Plain, layers_of, tokens
from tests.claims.made_up import MadeUpLab, accuracies
from tests.nn.contract import ToyAttention

NAME = "toy"


class SilentAttention(CausalAttention):
    """Overrides `values` and does not tell analysis about it."""

    def values(self, x: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        return 2 * v


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ATTENTIONS, NAME, ToyAttention)


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


@pytest.mark.parametrize("claim", [memory_update, needle_grid])
def test_it_takes_part_in_claims(claim: Any) -> None:
    named = {"lucid": 99.9, NAME: 77.7}
    conclusion = claim.run(MadeUpLab(DEMO, accuracies(lambda toy: named.get(toy.attention, 9.0))))
    assert conclusion.verdict == "holds"
    rows = [row for table in conclusion.tables for row in table["rows"] if row[0] == ToyAttention.title]
    assert rows
    assert all("77.7 ± 0.0" in row for row in rows)
    assert f'"name": "{ToyAttention.title}"' in json.dumps(conclusion.figures)
