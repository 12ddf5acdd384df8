"""The sizes of `--scale hours`, a row each. A larger budget is another row."""

from dataclasses import dataclass

from .training import StagedRun

# About the milliseconds of a step with 1024 tokens, for the estimate of the time left.
MILLISECONDS = {"softmax": 12.0, "lucid": 19.0, "path": 29.0, "lucid_path": 40.0, "diff": 16.0, "delta": 21.0}


@dataclass(frozen=True)
class Size:
    """How much one claim about text may cost.

    run: the settings that all arms share. arms: attentions, the most valuable first.
    rates, tuning: every arm takes the best of these rates, found with one seed in `tuning` steps.
    longer: (faster arm, slower arm): the faster one is also trained for as long as the slower one takes.
    """

    run: StagedRun
    arms: tuple[str, ...]
    rates: tuple[float, ...]
    tuning: int
    longer: tuple[tuple[str, str], ...]


TEXT = StagedRun(layers=2, width=64, heads=4, head_dim=16, mlp=2.0, token_shift=True, embedding_std=0.1, test_batch=64)
HOURS_SIZES = {
    "needle_lm": Size(
        TEXT.but(
            task="needle_sentences",
            steps=2000,
            batch=16,
            stages=((64, (1, 2)), (112, (2, 4)), (128, (2, 4)), (256, (2, 4, 8))),
            test_n=(1, 2, 4, 8),
            test_lengths=(256, 512, 1024),
        ),
        arms=("softmax", "lucid", "path", "lucid_path", "diff", "delta"),
        rates=(3e-3, 6e-3),
        tuning=600,
        longer=(("softmax", "lucid"), ("path", "lucid_path")),
    ),
    "babilong": Size(
        TEXT.but(
            task="stories",
            steps=2000,
            batch=16,
            stages=((96, (1,)), (96, (1, 2)), (160, (1, 2, 3)), (256, (1, 2, 3))),
            test_n=(1, 2, 3),
            test_lengths=(256, 512, 1024),
        ),
        arms=("softmax", "lucid", "path", "lucid_path"),
        rates=(3e-3, 6e-3),
        tuning=600,
        longer=(("softmax", "lucid"), ("path", "lucid_path")),
    ),
}
