"""`learnability`: the model is what it says, J is what the paper draws, and the verdict is what the records say."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lucid_lab.claims import learnability
from lucid_lab.claims.learnability import OneLayer, ScriptLayer, TwoTasks, averaged, copied, draw
from lucid_lab.toys.lab import SMALL, Record

from .made_up import MadeUpLab


@pytest.mark.parametrize("attention", ["softmax", "lucid"])
@pytest.mark.parametrize("rope", [True, False])
def test_the_model_is_the_plain_one_in_fewer_operations(attention: str, rope: bool) -> None:
    torch.manual_seed(0)
    model = OneLayer(TwoTasks(attention, rope=rope, layer_norm=rope, embedding_std=1.0, width=16)).double()
    digits = torch.randint(10, (3, 10))
    plain = model.out(model.attention(model.norm(model.embedding(digits)))[0])[..., 0]
    answers = []
    for output in (model(digits), plain):
        model.zero_grad()
        output.square().sum().backward()
        answers.append([output, *(weight.grad for weight in model.parameters())])
    torch.testing.assert_close(*answers)


def test_the_tasks_are_to_copy_and_to_average() -> None:
    digits = torch.tensor([[4, 2, 9]])
    assert copied(digits).tolist() == [[4, 2, 9]]
    assert averaged(digits).tolist() == [[4, 3, 5]]
    generator = torch.Generator().manual_seed(0)
    assert (draw(50, True, generator).sort(-1).values == torch.arange(10)).all()
    assert (draw(50, False, generator).sort(-1).values != torch.arange(10)).any()


@pytest.mark.parametrize("attention", ["softmax", "lucid"])
def test_j_of_uniform_weights_has_a_closed_form(attention: str) -> None:
    model = OneLayer(TwoTasks(attention, width=16))
    torch.nn.init.zeros_(model.attention.q_proj.weight)
    record: dict[str, list[Any]] = {"step": [], "loss": [], "off_diagonal": [], "query_jacobian": []}
    digits = torch.randint(10, (4, 10))
    learnability.measure(record, model, digits, copied(digits), 0)
    # Row i has a = 1/i: i (i − 1) pairs of 1/i², over all pairs Σ i (i − 1) = 330.
    assert record["off_diagonal"][0] == pytest.approx(sum(1 - 1 / i for i in range(1, 11)) / 330, rel=1e-6)
    assert record["loss"][0] == pytest.approx((model(digits) - digits).square().mean().item(), rel=1e-5)


def test_phase_2_begins_with_the_weights_of_phase_1(tmp_path: Path) -> None:
    run = TwoTasks("lucid", copy_steps=3, average_steps=2, every=2, batch=4, width=16, rate=0.1)
    record = learnability.train_two_tasks(tmp_path, run)
    assert record["step"] == [0, 2, 3, 3, 5]
    assert record["off_diagonal"][2] == record["off_diagonal"][3] != record["off_diagonal"][4]
    # The record before the switch has the loss of copying, the one after it that of averaging.
    assert record["loss"][2] != record["loss"][3]


@pytest.mark.parametrize("attention", ["softmax", "lucid"])
def test_the_model_of_the_script_and_its_ratio_of_gradients_are_those_of_the_definition(attention: str) -> None:
    torch.manual_seed(0)
    model = ScriptLayer(TwoTasks(attention, script=True, width=8)).double()
    model.embedding.weight.data.normal_()
    assert ("key_norm.weight" in model.state_dict()) == (attention == "lucid")
    if model.key_norm is not None:
        model.key_norm.weight.data.uniform_(0.5, 1.2)
    digits = draw(2, True, torch.Generator().manual_seed(0))
    x = model.embedding(digits)
    q, k, v = model.q_proj(x), model.k_proj(x), model.v_proj(x)
    scores = (q @ k.mT / 8**0.5 + torch.full((10, 10), float("-inf")).triu(1)).detach().requires_grad_()
    P = torch.eye(10, dtype=torch.float64)
    if model.key_norm is not None:
        u = model.key_norm.weight * k * (k.square().mean(-1, keepdim=True) + torch.finfo(torch.float64).eps) ** -0.5
        P = P + (u @ u.mT / 8**0.5 - 8**0.5).exp().tril(-1)
    a = scores.softmax(-1)
    answers = (a @ P.inverse() @ v @ model.out.weight[0]) + model.out.bias
    torch.testing.assert_close(model(digits), answers)
    da, ds = torch.autograd.grad((answers - digits).square().mean(), (a, scores))
    below = torch.ones(10, 10).tril(-1).bool()
    expected = ds[:, below].abs().mean() / da[:, below].abs().mean()
    assert model.gradient_ratio(digits, copied(digits).double()) == pytest.approx(expected.item(), rel=1e-6)


def test_the_script_has_one_adam_for_both_phases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adams: list[torch.optim.Optimizer] = []
    plain = learnability.training_loop

    def loop(steps: int, loss: Any, optimizer: torch.optim.Optimizer) -> Any:
        adams.append(optimizer)
        return plain(steps, loss, optimizer)

    monkeypatch.setattr(learnability, "training_loop", loop)
    for script in (True, False):
        run = TwoTasks("lucid", script=script, copy_steps=2, average_steps=2, every=1, batch=2, width=8)
        record = learnability.train_two_tasks(tmp_path, run)
        assert len(record["off_diagonal"]) == 6
    assert (adams[0] is adams[1], adams[2] is adams[3]) == (True, False)


@pytest.mark.parametrize(
    ("softmax", "lucid", "copy_loss", "verdict"),
    [
        ((300, 2.0), (3, 0.01), 0.01, "holds"),
        ((290, 2.0), (3, 0.01), 0.01, "partly"),
        ((1000, 0.01), (3, 0.01), 0.01, "partly"),
        ((15, 0.01), (3, 0.01), 0.01, "partly"),
        ((1000, 2.0), (3, 2.0), 0.01, "partly"),
        ((3, 2.0), (15, 0.01), 0.01, "partly"),
        ((3, 0.01), (15, 0.01), 0.01, "does not hold"),
        # Nothing was learned, so nothing had to be kept.
        ((1000, 2.0), (3, 2.0), 1.0, "does not hold"),
    ],
)
def test_the_verdict_is_what_the_records_say(
    softmax: tuple[float, float], lucid: tuple[float, float], copy_loss: float, verdict: str
) -> None:
    """softmax, lucid: (by what J falls, loss at the end)."""

    def rule(name: str, run: TwoTasks) -> Record:
        fall, last = lucid if run.attention == "lucid" else softmax
        switch, fall = run.copy_steps, fall * (1 + 0.01 * run.seed)
        return {
            "step": [0, switch, switch, switch + 50],
            "loss": [28.0, copy_loss, 5.8, last],
            "off_diagonal": [0.02, 0.02 / fall, 0.02 / fall, 0.02],
            "query_jacobian": [0.1] * 4,
            "milliseconds": 3.0,
        }

    conclusion = learnability.run(MadeUpLab(SMALL, rule))
    assert conclusion.verdict == verdict
    assert conclusion.figures[0]["marks"] == [{"x": 1200, "name": "task switch"}]
    if verdict == "holds":
        standard, ours = conclusion.ours.split("; ")
        assert standard == "J of standard attention falls 303.0 ± 3.0×, adapts: never (loss 2 at the end)"
        assert ours == "of LUCID 3.0 ± 0.0×, adapts: 50 ± 0 steps"
