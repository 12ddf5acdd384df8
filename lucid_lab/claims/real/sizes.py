"""How much of the experiment is run at each scale: one row of `SIZES` each."""

from dataclasses import dataclass

from ..engine.scale import Scale


@dataclass(frozen=True)
class Sizes:
    """How much is run.

    train_tokens, long_texts, long_tokens: of the corpus.
    key_layers: layers whose keys are measured up to the longest of key_lengths, as shares of the depth.
    all_lengths: lengths at which the keys of every layer are measured, `layers_a_job` at a time.
    hit_lengths, hit_samples: of the hit rates.
    switch_texts, switch_length: of the disturbances. sharpnesses: in units of √D. counts: of cheap layers, as shares.
    length: tokens of a training sequence. rates, sweep_steps: of the sweeps. steps: of a run. ramp: share of its steps
    in which the sharpness falls. seeds: of the runs.
    needles: (length, needles, contexts) of every cell. boxes: (boxes, writes, contexts).
    loss_texts, loss_length: of the loss by position.
    cost_training, cost_decoding: lengths. rounds: of each.
    """

    train_tokens: int
    long_texts: int
    long_tokens: int
    key_layers: tuple[float, ...]
    key_lengths: tuple[int, ...]
    all_lengths: tuple[int, ...]
    layers_a_job: int
    hit_lengths: tuple[int, ...]
    hit_samples: int
    switch_texts: int
    switch_length: int
    sharpnesses: tuple[float, ...]
    counts: tuple[float, ...]
    length: int
    rates: tuple[float, ...]
    sweep_steps: int
    steps: int
    ramp: float
    seeds: tuple[int, ...]
    needles: tuple[tuple[int, int, int], ...]
    boxes: tuple[tuple[int, int, int], ...]
    loss_texts: int
    loss_length: int
    cost_training: tuple[int, ...]
    cost_decoding: tuple[int, ...]
    rounds: int


# About 100 minutes of one core with a model of 135 million weights.
SMALL = Sizes(
    train_tokens=400_000,
    long_texts=6,
    long_tokens=8193,
    key_layers=(0.0, 1 / 3, 2 / 3, 1.0),
    key_lengths=(128, 256, 512, 1024, 2048, 4096, 8192),
    all_lengths=(512, 1024),
    layers_a_job=15,
    hit_lengths=(1024, 2048, 4096),
    hit_samples=2,
    switch_texts=2,
    switch_length=512,
    sharpnesses=(8.0, 4.0, 2.0, 1.4, 1.0),
    counts=(1 / 8, 1 / 4, 1 / 2),
    length=1024,
    rates=(3e-5, 1e-4, 3e-4),
    sweep_steps=8,
    steps=60,
    ramp=0.75,
    seeds=(0,),
    needles=(
        *((1024, 1, 4), (1024, 2, 4), (1024, 4, 3), (1024, 10, 2)),
        *((2048, 1, 4), (2048, 2, 3), (2048, 4, 2), (2048, 10, 2)),
        *((4096, 2, 2), (4096, 10, 2), (8192, 2, 1), (8192, 10, 1)),
    ),
    boxes=((4, 2, 8), (8, 3, 6)),
    loss_texts=3,
    loss_length=4096,
    cost_training=(1024,),
    cost_decoding=(1024, 4096),
    rounds=4,
)
SMOKE = Sizes(
    train_tokens=2_000,
    long_texts=2,
    long_tokens=513,
    key_layers=(0.0, 1.0),
    key_lengths=(64, 128),
    all_lengths=(64,),
    layers_a_job=3,
    hit_lengths=(320,),
    hit_samples=1,
    switch_texts=1,
    switch_length=64,
    sharpnesses=(8.0, 1.0),
    counts=(1 / 3, 2 / 3),
    length=512,
    rates=(1e-3,),
    sweep_steps=2,
    steps=4,
    ramp=0.5,
    seeds=(0,),
    needles=((256, 1, 1), (320, 2, 1)),
    boxes=((4, 2, 1),),
    loss_texts=1,
    loss_length=256,
    cost_training=(64,),
    cost_decoding=(64,),
    rounds=1,
)


def sizes(scale: Scale) -> Sizes:
    """The sizes at a scale."""
    return SMOKE if scale.tiny else SMALL
