"""From the records of `language_model` to gaps, figures and tables."""

from collections.abc import Sequence

from lucid_attention.nn.attention import ATTENTIONS

from ..engine.result import Figure, Spread, Table, heatmaps, lines, series, spread, table
from ..engine.study import Done
from ..small.training import SmallRun
from .runs import (
    SIDES,
    Choice,
    decoder_timing,
    extent,
    finite_loss,
    loss_of,
    position_job,
    setting_run,
    sweep_losses,
    timing,
)

TITLES = {side: ATTENTIONS[side].title for side in SIDES}
# At 512 tokens and width 256, a step of LUCID may take this many times as long as one of softmax attention.
TIME_BAR = 1.25
NATS = "loss, nats a character"


def runs_of(choice: Choice, setting: str, side: str) -> list[SmallRun]:
    """The runs of a setting, one for every seed."""
    return [setting_run(choice, setting, side, seed) for seed in choice.scale.seeds]


def losses(choice: Choice, setting: str, side: str, done: Done) -> Spread:
    """The loss on unseen text, over seeds."""
    return spread([loss_of(done[run.job()]) for run in runs_of(choice, setting, side)], digits=3)


def gap(choice: Choice, setting: str, done: Done) -> Spread:
    """The loss of softmax attention minus that of LUCID, seed by seed."""
    pairs = zip(*(runs_of(choice, setting, side) for side in SIDES), strict=True)
    return spread([loss_of(done[a.job()]) - loss_of(done[b.job()]) for a, b in pairs], digits=3)


def clear(gap: Spread) -> bool:
    """Whether LUCID is ahead by more than the spread over seeds."""
    return gap.mean > gap.std


def curve(runs: Sequence[SmallRun], done: Done) -> tuple[list[float], list[float], list[float]]:
    """Steps, training losses and their spreads over seeds."""
    curves = [done[run.job()]["curve"] for run in runs]
    points = zip(*(record["loss"] for record in curves), strict=True)
    losses = [spread(map(finite_loss, values)) for values in points]
    return list(curves[0]["step"]), [loss.mean for loss in losses], [loss.std for loss in losses]


def figures(choice: Choice, done: Done) -> list[Figure]:
    """Learning curves by steps and by time, loss by position, the sweep."""
    by_step, by_time, lowest, early = [], [], [], []
    milliseconds = dict(zip(("lucid", "softmax"), done[timing(choice.scale)]["milliseconds"], strict=True))
    for side in SIDES:
        steps, y, deviations = curve(runs_of(choice, "tuned", side), done)
        by_step.append(series(TITLES[side], side, steps, y, spread=deviations))
        steps, y, deviations = curve(runs_of(choice, "equal_time", side), done)
        seconds = [step * milliseconds[side] / 1000 for step in steps]
        by_time.append(series(TITLES[side], side, seconds, y, spread=deviations))
        lowest.append(min(y))
        early.append(y[min(2, len(y) - 1)])
        steps, y, deviations = curve(runs_of(choice, "untuned", side), done)
        by_step.append(series(f"{TITLES[side]}, untuned", side, steps, y, spread=deviations, dashed=True))
    # The first points are far above the others: cut them off.
    loss_range = [min(lowest) - 0.1, max(*early, min(lowest) + 0.2)]
    mean = "Training loss, a mean over the steps between two points."
    return [
        lines("Loss against steps", "step", NATS, by_step, range=loss_range, note=mean),
        lines(
            "Loss against time",
            "seconds on one core",
            NATS,
            by_time,
            range=loss_range,
            note=f"{mean} Seconds are steps times the time of a step, measured for both in turn.",
        ),
        position_figure(choice, done),
        sweep_figure(choice, done),
    ]


def position_figure(choice: Choice, done: Done) -> Figure:
    """The loss of both attentions by position, with the short and the long context."""
    curves = []
    for setting, dashed in (("tuned", True), ("long_context", False)):
        for side in SIDES:
            runs = runs_of(choice, setting, side)
            records = [done[position_job(run)] for run in runs]
            losses = [spread(values) for values in zip(*(record["losses"] for record in records), strict=True)]
            name = f"{TITLES[side]}, {runs[0].length} tokens"
            y, deviations = [loss.mean for loss in losses], [loss.std for loss in losses]
            curves.append(series(name, side, records[0]["ends"], y, spread=deviations, dashed=dashed))
    note = "On unseen text. A point is the mean over the positions from the point before on."
    return lines("Loss by position", "position up to", NATS, curves, log="x", note=note)


def sweep_figure(choice: Choice, done: Done) -> Figure:
    """Both sweeps, with one range of colours."""
    size = extent(choice.scale)
    panels, all_losses, settings_texts = {}, [], []
    for side in SIDES:
        losses = sweep_losses(choice.scale, side, done)
        values = [[losses[rate, std] for std in size.stds] for rate in size.rates]
        panels[TITLES[side]] = ([f"{rate:g}" for rate in size.rates], [f"{std:g}" for std in size.stds], values)
        all_losses += list(losses.values())
        settings_texts.append(f"{TITLES[side]} {described(choice.tuned[side])}")
    return heatmaps(
        f"The sweep: loss after {size.sweep_steps} steps",
        "learning rate",
        "embeddings, std at the start",
        panels,
        range=(min(all_losses), max(all_losses)),
        unit="nats",
        note=f"One seed, not used again. Chosen: {'; '.join(settings_texts)}.",
    )


def described(settings: dict[str, float]) -> str:
    """Settings in words: "rate 0.01, embeddings 1"."""
    return f"rate {settings['rate']:g}, embeddings {settings['embedding_std']:g}"


def tables(choice: Choice, done: Done) -> list[Table]:
    """Every setting beside the paper's number, and the times."""
    size = extent(choice.scale)
    base = size.base
    shape = f"{base.heads} heads of {base.head_dim}, {base.length} tokens"
    # The setting in words, and the paper's number for the most similar one.
    settings = {
        "tuned": (f"{shape}; {size.steps} steps each", "0.1 (heads of 16, 4096 tokens)"),
        "equal_time": (f"equal time: {choice.late} steps of softmax", "not given"),
        "untuned": ("untuned: rate 0.003, embeddings 0.02", "not given"),
        "no_positions": ("without RoPE", "0.12 (32 768 tokens)"),
        "one_wide_head": (f"one head of {size.wide}", "0.012 (heads of 64, 4096 tokens)"),
        "long_context": (f"{size.long} tokens", "0.048 (heads of 64, 32 768 tokens)"),
    }
    rows = [
        [words, *(losses(choice, name, side, done) for side in SIDES), gap(choice, name, done), paper]
        for name, (words, paper) in settings.items()
    ]
    sweeps = "; ".join(f"{TITLES[side]} {described(choice.tuned[side])}" for side in SIDES)
    return [
        table(
            "Loss on unseen text",
            ["setting", "softmax", "LUCID", "LUCID lower by", "paper"],
            rows,
            note=f"Nats a character, mean ± std over {len(choice.scale.seeds)} seeds; differences are taken seed by "
            f"seed. Tuned for each side at {shape}, and kept elsewhere: {sweeps}. A step of the long context has as "
            "many tokens.",
        ),
        time_table(choice, done),
        position_table(choice, done),
    ]


def time_table(choice: Choice, done: Done) -> Table:
    """Milliseconds of a step."""
    size = extent(choice.scale)
    sizes = size.decoder["sizes"]
    jobs = {
        f"the model here: width {size.base.width}, {size.base.batch} × {size.base.length} tokens": timing(choice.scale),
        f"decoder: width {sizes['hidden_size']}, {size.decoder['batch']} × {size.decoder['length']} tokens": (
            decoder_timing(choice.scale)
        ),
    }
    rows = []
    for model, job in jobs.items():
        lucid, softmax = done[job]["milliseconds"]
        rows.append([model, f"{softmax:.1f}", f"{lucid:.1f}", f"{done[job]['ratio']:.2f}"])
    note = f"Milliseconds on one core, steps of both in turn, medians. At width 256 and 512 tokens at most {TIME_BAR}."
    return table("Time of a training step", ["model", "softmax", "LUCID", "ratio"], rows, note=note)


def position_table(choice: Choice, done: Done) -> Table:
    """The loss of softmax attention minus that of LUCID, in each range of positions."""
    rows: dict[int, list[str | None]] = {}
    for column, setting in enumerate(("tuned", "long_context")):
        pairs = list(zip(*(runs_of(choice, setting, side) for side in SIDES), strict=True))
        records = [[done[position_job(run)] for run in pair] for pair in pairs]
        for index, end in enumerate(records[0][0]["ends"]):
            gaps = [softmax["losses"][index] - lucid["losses"][index] for softmax, lucid in records]
            rows.setdefault(end, [None, None])[column] = str(spread(gaps, digits=3))
    size = extent(choice.scale)
    columns = ["positions up to", f"{size.base.length} tokens", f"{size.long} tokens"]
    body = [[end, *cells] for end, cells in sorted(rows.items())]
    return table("LUCID lower by, by position", columns, body, note="Nats a character, seed by seed, tuned models.")
