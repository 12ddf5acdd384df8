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


# Two layers of attention without MLPs, whose keys and values also see the token before. In trials with MLPs, softmax
# attention did not get beyond a value of any needle in 420 steps, where the trial ended; without them it did after 300.
TEXT = StagedRun(layers=2, token_shift=True, test_batch=64)
HOURS_SIZES = {
    "needle_lm": Size(
        TEXT.but(
            task="needle_sentences",
            steps=1000,
            stages=((72, (1, 2, 4)), (144, (2, 4, 8)), (256, (4, 8, 12))),
            test_n=(1, 2, 4, 8, 12),
            test_lengths=(256, 512, 1024),
        ),
        arms=("softmax", "lucid", "path", "lucid_path", "diff", "delta"),
        rates=(3e-3, 6e-3),
        tuning=400,
        longer=(("softmax", "lucid"), ("path", "lucid_path")),
    ),
    "babilong": Size(
        TEXT.but(
            task="stories",
            steps=1600,
            stages=((56, (1,)), (96, (1, 2)), (160, (1, 2, 3)), (192, (1, 2, 3))),
            test_n=(1, 2, 3),
            test_lengths=(192, 384, 768),
            test_batch=128,
        ),
        arms=("softmax", "lucid", "path", "lucid_path"),
        rates=(3e-3, 6e-3),
        tuning=300,
        longer=(("softmax", "lucid"), ("path", "lucid_path")),
    ),
}
