"""The toy model is causal with every attention and control; the training loop is repeatable and keeps its weights."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lucid_attention.nn.attention import ATTENTIONS, LucidAttention
from lucid_attention.nn.attention.sliding import SlidingAttention
from lucid_lab.toys.tasks import IGNORED
from lucid_lab.toys.training import (
    FollowingLucid,
    Shifted,
    Toy,
    ToyModel,
    load_model,
    loss_of,
    score,
    time_in_turn,
    train,
    train_steps,
)

TOY = Toy(n=(2,), length=12, width=16, heads=1, steps=4, batch=4, test_n=(2, 3), test_lengths=(12, 16), test_batch=70)


class PairTask:
    """Sizes of a task whose tokens have two columns."""

    tables, answers = [11, 7], 5

    def batch(self, size: int, seed: int, step: int) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def test(self, size: int, n: int, length: int) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


def small(attention: str = "lucid", **changes: Any) -> ToyModel:
    torch.manual_seed(0)
    options = {"window": 4} if attention == "sliding" else {}
    toy = Toy(attention=attention, options=options, layers=2, width=16, heads=2, head_dim=8, mlp=2.0, embedding_std=1.0)
    return ToyModel(toy.but(**changes), PairTask())


def tokens(length: int = 9) -> Tensor:
    random = torch.Generator().manual_seed(1)
    return torch.stack([torch.randint(size, (2, length), generator=random) for size in (11, 7)], -1)


@pytest.mark.parametrize("shift", [False, True], ids=["plain", "token shift"])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_token_changes_what_comes_after_it_and_nothing_before(attention: str, shift: bool) -> None:
    model, x = small(attention, token_shift=shift).double(), tokens()
    for module in model.modules():
        if isinstance(module, Shifted):
            nn.init.normal_(module.before)
    before = model(x)
    assert before.shape == (2, 9, 5)
    changed = x.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 7
    after = model(changed)
    torch.testing.assert_close(after[:, :5], before[:, :5], rtol=1e-9, atol=1e-11)
    assert (after[:, 5:] - before[:, 5:]).abs().amax(-1).min() > 1e-6


def test_the_token_shift_adds_the_token_before_to_keys_and_values_alone() -> None:
    shifted = Shifted(nn.Linear(4, 3)).double()
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    torch.testing.assert_close(shifted(x), shifted.projection(x))  # nothing at the beginning of training
    nn.init.normal_(shifted.before)
    y, got = shifted.projection(x), shifted(x)
    torch.testing.assert_close(got[:, 0], y[:, 0])
    for t in range(1, 5):
        torch.testing.assert_close(got[:, t], y[:, t] + shifted.before * y[:, t - 1])
    for layer in small(token_shift=True).layers:
        attention: Any = layer.attention
        assert isinstance(attention.k_proj, Shifted)
        assert isinstance(attention.v_proj, Shifted)
        assert isinstance(attention.q_proj, nn.Linear)


def test_without_positions_softmax_reads_a_set_and_with_them_it_does_not() -> None:
    x = tokens()
    turned = torch.cat([x[:, :8].flip(1), x[:, 8:]], 1)
    for rope in (False, True):
        model = small("softmax", layers=1, rope=rope)
        same = torch.allclose(model(x)[:, 8], model(turned)[:, 8], atol=1e-5)
        assert same is not rope


def test_options_reach_the_attention_and_a_misspelt_one_is_refused() -> None:
    layer: Any = small(options={"sharpness": 4.0}).layers[0]
    assert layer.attention.fixed_sharpness == 4.0
    with pytest.raises(TypeError, match="sharpnes"):
        small(options={"sharpnes": 4.0})
    first, second = (dict(layer.attention.named_buffers()) | vars(layer.attention) for layer in small("diff").layers)
    # Differential attention gets the number of its layer.
    assert any(isinstance(first[name], float) and first[name] != second[name] for name in first if name in second)


def test_a_local_layer_is_a_sliding_window_and_the_others_have_the_same_weights_as_without() -> None:
    toy = Toy(task="needles", layers=2, token_shift=True)
    model, plain = toy.but(local={"0": 16}).make_model(), toy.make_model()
    sliding: Any = model.layers[0].attention
    assert isinstance(sliding, SlidingAttention)
    assert sliding.window == 16
    assert isinstance(sliding.k_proj, Shifted)
    for name, weight in plain.state_dict().items():
        assert name.startswith("layers.0.attention") or torch.equal(weight, model.state_dict()[name])


def test_the_score_is_the_share_of_right_answers_and_their_loss() -> None:
    model = TOY.make_model()
    batch = TOY.make_task().test(70, 3, 12)
    right, losses = 0, []
    with torch.no_grad():
        logits = model(batch[0])
    for row, labels in zip(logits, batch[1].tolist(), strict=True):
        for scores, label in zip(row.tolist(), labels, strict=True):
            if label != IGNORED:
                right += max(range(64), key=scores.__getitem__) == label
                losses.append(math.log(sum(map(math.exp, scores))) - scores[label])
    found = score(model, batch)
    assert found["accuracy"] == pytest.approx(100 * right / len(losses))
    assert found["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert float(loss_of(model, batch).detach()) == pytest.approx(found["loss"], rel=1e-5)


def test_training_is_repeatable_and_depends_on_the_seed(tmp_path: Path) -> None:
    record, repeated, different = (train(tmp_path, toy) for toy in (TOY, TOY, TOY.but(seed=1)))
    assert record["curve"] == repeated["curve"]
    assert record["tests"] == repeated["tests"]
    assert record["curve"]["loss"] != different["curve"]["loss"]
    assert record["curve"]["step"] == [1, 2, 3, 4]
    assert [(test["n"], test["length"]) for test in record["tests"]] == [(2, 12), (3, 12), (2, 16), (3, 16)]
    assert record["parameters"] == sum(weight.numel() for weight in TOY.make_model().parameters())


def test_the_curve_is_the_mean_loss_between_its_points(tmp_path: Path) -> None:
    toy = TOY.but(steps=45)
    losses = [float(loss) for loss in train_steps(toy, toy.make_model())]
    curve = train(tmp_path, toy)["curve"]
    assert curve["step"] == [*range(2, 45, 2), 45]
    expected = [sum(losses[i : i + 2]) / 2 for i in range(0, 44, 2)] + [losses[44]]
    assert curve["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_trained_model_comes_back_as_it_was_and_others_start_from_it(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    toy = TOY.but(steps=40)
    record = train(first, toy)
    model = load_model(first, toy)
    assert not model.training
    assert record["tests"][0] | score(model, toy.make_task().test(70, 2, 12)) == record["tests"][0]
    further = TOY.but(seed=3, start="first", attention="softmax", steps=1, rate=1e-9)
    with torch.no_grad():
        softmax = further.make_model()
        softmax.load_state_dict(model.state_dict())
        expected = loss_of(softmax, further.make_task().batch(4, 3, 0))
    assert train(second, further)["curve"]["loss"][0] == pytest.approx(float(expected), rel=1e-5)


def test_a_run_that_diverges_leaves_a_record_that_says_so(tmp_path: Path) -> None:
    record = train(tmp_path, TOY.but(steps=8, rate=1e30))
    assert record["curve"]["loss"][-1] is None
    assert record["tests"][0]["loss"] is None


def test_the_learning_rate_rises_then_falls_to_zero_and_gradients_are_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    step = torch.optim.AdamW.step

    def watched(self: Any, *args: Any) -> Any:
        rates.append(self.param_groups[0]["lr"])
        assert self.defaults["betas"] == (0.9, 0.99)
        return step(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    toy = TOY.but(steps=200, batch=1, rate=0.01)
    model = toy.make_model()
    norms = []
    for _ in train_steps(toy, model):
        norms.append(float(torch.stack([w.grad.norm() for w in model.parameters() if w.grad is not None]).norm()))
    assert rates[:50] == pytest.approx([0.01 * (i + 1) / 50 for i in range(50)])
    falling = [0.005 * (1 + math.cos(math.pi * i / 150)) for i in range(150)]
    assert rates[50:] == pytest.approx(falling, rel=1e-3, abs=1e-8)
    assert 0.9 < max(norms) <= 1.001


@pytest.mark.parametrize("muon", [False, True])
def test_muon_turns_matrices_of_layers_by_orthogonal_updates_and_leaves_the_rest_to_adamw(muon: bool) -> None:
    toy = TOY.but(muon=muon, steps=1, rate=1e-3)
    model, start = toy.make_model(), toy.make_model()
    next(train_steps(toy, model))
    moved: dict[str, Tensor] = {
        name: weight.detach() - before
        for (name, weight), before in zip(model.named_parameters(), start.state_dict().values(), strict=True)
    }
    # Muon's update has singular values near 0.2 √16 times the rate; the first one of AdamW moves every weight by the
    # rate, so its largest singular value is at least √16 times that.
    largest = torch.linalg.svdvals(moved["layers.0.attention.o_proj.weight"])[0].item()
    assert (5e-4 < largest < 1.2e-3) if muon else (largest >= 3.9e-3)
    assert moved["out.bias"].abs().max().item() == pytest.approx(1e-3, rel=0.1)


def test_lucid_learns_what_softmax_without_positions_cannot() -> None:
    accuracy: dict[str, Any] = {}
    for attention in ("softmax", "lucid"):
        toy = Toy(n=(4,), length=32, attention=attention, rope=False, heads=1, steps=200, rate=1e-2)
        model = toy.make_model()
        for _ in train_steps(toy, model):
            pass
        accuracy[attention] = score(model, toy.make_task().test(64, 4, 32))["accuracy"]
    assert accuracy["lucid"] > 90
    assert accuracy["softmax"] < 45


def test_steps_are_timed_in_turn_and_their_medians_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that each step sets forward: two steps are a warm-up, the last is an outlier."""
    clock = [0.0]
    monkeypatch.setattr("lucid_lab.toys.training.time.perf_counter", lambda: clock[0])
    order: list[str] = []

    def training(name: str, seconds: Sequence[float]) -> Iterator[Tensor]:
        for each in seconds:
            clock[0] += each
            order.append(name)
            yield torch.zeros(())

    found = time_in_turn([training("slow", (50, 50, 3, 3, 99)), training("fast", (50, 50, 2, 2, 99))], warm_up=2)
    assert order == ["slow", "fast"] * 5
    assert found == {"milliseconds": [3000, 2000], "ratio": 1.5}


def test_a_running_map_follows_mean_and_covariance_of_the_keys_in_training_alone() -> None:
    """The oracle: averages of the means and the ridged covariances that `calibrate` gives each batch."""
    module = FollowingLucid(24, 4, num_kv_heads=2, bias=True, center="calibrated", whiten=True)
    fixed = LucidAttention(24, 4, num_kv_heads=2, bias=True, center="calibrated", whiten=True)
    with torch.no_grad():
        module.k_proj.bias.fill_(2.0)
    fixed.load_state_dict(module.state_dict())
    center, covariance = torch.zeros(2, 6), torch.eye(6)
    outputs = []
    for _ in range(3):
        x = torch.randn(2, 30, 24)
        outputs.append(module(x)[0])
        fixed.calibrate(x)
        center = 0.9 * center + 0.1 * fixed.key_center
        covariance = 0.9 * covariance + 0.1 * torch.linalg.inv(fixed.key_matrix @ fixed.key_matrix)
        torch.testing.assert_close(module.key_center, center, rtol=0, atol=1e-5)
        torch.testing.assert_close(
            module.key_matrix @ covariance @ module.key_matrix, torch.eye(6).repeat(2, 1, 1), rtol=0, atol=1e-4
        )
    sum(o.square().sum() for o in outputs).backward()
    assert module.k_proj.weight.grad.abs().max() > 0
    module.eval()(torch.randn(2, 9, 24))
    torch.testing.assert_close(module.key_center, center, rtol=0, atol=1e-5)
