"""LUCID and its neighbours on tasks that others chose: one list of arms, each with its own learning rate.

Used by `forgetting_mqar`, `flip_flop` and `word_problems`. Keys and values of all arms also see the token before, where
the published models have a short convolution. One arm shows softmax attention without it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from .arms import LEARNED_SHARPNESS, Change, Group, arm, equal_time, time_ratios, train_arms
from .contest import best_rates
from .lab import Lab
from .results import Table, table
from .training import Toy

NO_SHIFT = Change("no_shift", "no token shift", {"token_shift": False})
CENTRED = Change("centred", "learned centre", {"options": {"center": "learned"}})
WHITENED = Change("whitened", "learned centre and map", {"options": {"center": "learned", "whiten": True}})
RUNNING = Change(
    "running", "running centre and map", {"options": {"center": "calibrated", "whiten": True, "following": True}}
)
BETA = Change("beta", "β to 1", {"options": {"learn_beta": True}})
BETA_2 = Change("beta_2", "β to 2", {"options": {"learn_beta": True, "double_beta": True}})
DOUBLE_BETA = Change("beta_2", "β to 2", {"options": {"double_beta": True}})

# (attention, change), in the order of tables.
Arms = Sequence[tuple[str, Change | None]]
STUDY: Arms = (
    ("softmax", None),
    ("softmax", NO_SHIFT),
    ("forgetting", None),
    ("lucid", None),
    ("deltaformer", None),
    ("exclusive", None),
    ("gated", None),
    ("lucid", CENTRED),
    ("lucid", LEARNED_SHARPNESS),
    ("lucid", BETA_2),
    ("path", None),
    ("gated_delta", None),
    ("lucid_path", None),
)
FEW = ("softmax", "forgetting", "lucid")
# Two layers; every arm takes the best of these rates, found in two thirds of the steps.
STUDY_TOY = Toy(layers=2, heads=2, head_dim=32, token_shift=True)
RATES = (3e-3, 1e-2)
EQUAL_TIME = "softmax+equal_time"


def run_study(
    lab: Lab,
    toy: Toy,
    study: Arms = STUDY,
    rates: Mapping[str, float] | None = None,
    grid: Sequence[float] = RATES,
) -> Group:
    """Every arm at its best rate of a grid, by key; and EQUAL_TIME, softmax attention for as long as LUCID takes.

    rates: of another group, by key, instead of trials. Below `--scale small` there are three arms and no trials.
    """
    if lab.tiny:
        toy = toy.but(steps=3, batch=2, test_batch=2, test_lengths=toy.test_lengths[:2])
    if not lab.scale.every_attention:
        study = [(name, change) for name, change in study if name in FEW and change is None]
    arms = [arm(toy.but(attention=name), change) for name, change in study]
    if rates is not None:
        arms = [replace(one, toy=one.toy.but(rate=rates[one.key])) for one in arms]
    elif lab.scale.every_attention:
        arms = best_rates(lab, arms, grid, 2 * toy.steps // 3)
    group = train_arms(lab, {"": arms})[""]
    softmax, lucid = (group[name].arm.toy for name in ("softmax", "lucid"))
    # Steps in turn: the times of whole trainings depend on what else the machine does.
    timing = {"ratio": 1.0} if lab.tiny else time_ratios(lab, {"": (lucid, softmax)})[""]
    return group | train_arms(lab, {"": [equal_time(softmax, timing)]})[""]


def study_table(title: str, group: Group, n: int, note: str = "") -> Table:
    """A row for every arm, a column for every length."""
    lengths = group["softmax"].arm.toy.test_lengths
    rows = [
        [
            one.arm.label,
            *(one.accuracy(n, length) for length in lengths),
            one.arm.toy.steps,
            one.arm.toy.rate,
            round(one.seconds),
        ]
        for one in group.values()
    ]
    return table(title, ["", *(f"{length} tokens" for length in lengths), "steps", "rate", "s"], rows, note=note)
