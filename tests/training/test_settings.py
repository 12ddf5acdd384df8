"""Which settings change the result of a run, and that every attention trains."""

from pathlib import Path
from typing import Any

import pytest

from lucid_attention.nn.attention import ATTENTIONS

from .running import METRICS, assert_same, finished, losses, read_metrics, summary, weights, words


@pytest.mark.parametrize("setting", [{"gradient_checkpointing": True}, {"workers": 1}, {"evaluate_every": 3}], ids=str)
def test_a_setting_of_cost_does_not_change_the_result(setting: dict[str, Any], whole: Path, tmp_path: Path) -> None:
    assert_same(finished(words("tiny_needle", tmp_path / "run", **setting)), whole)


@pytest.mark.parametrize("setting", [{"loss_rows": 0}, {"loss_rows": 7}, {"micro_batch_size": 1}], ids=str)
def test_a_setting_that_reorders_sums_changes_the_last_digits_only(
    setting: dict[str, Any], whole: Path, tmp_path: Path
) -> None:
    run = finished(words("tiny_needle", tmp_path / "run", **setting))
    assert losses(run) == pytest.approx(losses(whole), abs=1e-5)
    assert summary(run)["validation_loss"] == pytest.approx(summary(whole)["validation_loss"], abs=1e-5)


@pytest.mark.parametrize("setting", [{"seed": 1}, {"weight_decay": 0.9}, {"beta1": 0.5}, {"beta2": 0.5}], ids=str)
def test_the_seed_and_the_optimiser_change_the_result(setting: dict[str, Any], whole: Path, tmp_path: Path) -> None:
    run = finished(words("tiny_needle", tmp_path / "run", **setting))
    assert abs(losses(run)[8] - losses(whole)[8]) > 1e-5
    # The seed changes weights and data, hence the first loss. The optimiser acts only after it.
    assert (losses(run)[1] == losses(whole)[1]) == ("seed" not in setting)


def rates(run: Path) -> list[float]:
    return [entry["learning_rate"] for entry in read_metrics(run / METRICS) if "loss" in entry]


def test_the_rate_rises_and_falls_as_the_recipe_says(whole: Path, tmp_path: Path) -> None:
    cosine = finished(words("tiny_needle", tmp_path / "cosine", warmup=0.5, save_every=0))
    expected = [0, 0.00075, 0.0015, 0.00225, 0.003, 0.003 * (1 + 2**-0.5) / 2, 0.0015, 0.003 * (1 - 2**-0.5) / 2]
    assert rates(cosine) == pytest.approx(expected)
    constant = finished(words("tiny_needle", tmp_path / "constant", warmup=0.25, schedule="constant", save_every=0))
    assert rates(constant) == pytest.approx([0, 0.0015, *[0.003] * 6])
    # 6 % of 8 steps round to no warm-up.
    assert rates(whole)[0] == 0.003


def test_losses_in_bfloat16_are_near_those_in_float32(whole: Path, tmp_path: Path) -> None:
    run = finished(words("tiny_needle", tmp_path / "run", precision="bfloat16"))
    assert losses(run) == pytest.approx(losses(whole), abs=5e-3)
    assert losses(run) != losses(whole)
    assert all(tensor.dtype.itemsize == 4 and tensor.isfinite().all() for tensor in weights(run).values())


def test_clipping_changes_the_losses(whole: Path, tmp_path: Path) -> None:
    norms = [entry["grad_norm"] for entry in read_metrics(whole / METRICS) if "loss" in entry]
    # Some gradients must exceed the limit of 1.
    assert max(norms) > 1.2
    free = finished(words("tiny_needle", tmp_path / "free", clip=0))
    assert losses(free)[8] != losses(whole)[8]
    assert all("grad_norm" in entry for entry in read_metrics(free / METRICS) if "loss" in entry)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_every_attention_trains(attention: str, tmp_path: Path) -> None:
    argv = words("tiny_needle", tmp_path / "run", "--attention", attention, steps=2, save_every=0)
    run = finished(argv)
    assert list(losses(run)) == [1, 2]
    assert all(tensor.isfinite().all() for tensor in weights(run).values())


def test_layers_can_have_different_attentions(tmp_path: Path) -> None:
    run = finished(words("tiny_needle", tmp_path / "run", steps=1, attention='["softmax", "lucid"]'))
    assert '"attention": [\n' in (run / "model" / "config.json").read_text()


def test_a_validation_set_smaller_than_a_batch_counts_every_sequence_once(tmp_path: Path) -> None:
    few = finished(words("tiny_needle", tmp_path / "few", steps=1, evaluation_sequences=3))
    one = finished(words("tiny_needle", tmp_path / "one", steps=1, evaluation_sequences=3, micro_batch_size=1))
    assert summary(few)["validation_loss"] == pytest.approx(summary(one)["validation_loss"], abs=1e-5)


def test_a_model_learns_to_recall(tmp_path: Path) -> None:
    """With one needle among few tokens, the loss falls far below that of guessing."""
    changes: dict[str, Any] = {
        "steps": 150,
        "sequence_length": 9,
        "batch_size": 32,
        "micro_batch_size": 32,
        "learning_rate": 0.01,
        "data_options": {"n": 1, "keys": 4, "values": 4, "fillers": 2},
        "evaluation_sequences": 128,
        "save_every": 0,
        "log_every": 50,
    }
    run = finished(words("tiny_needle", tmp_path / "run", small=False, **{"model.hidden_size": 32, **changes}))
    assert losses(run)[1] > 2
    assert summary(run)["validation_loss"] < 0.7
