"""A real pretrained model (not in the paper): does a trained decoder move to LUCID, and does it gain by it?

(a) P of the keys of the model on real text, by layer and length, with untrained and random keys beside: the paper's
    Figure 2 on real keys; and hit rates. (b) The loss when LUCID is switched on without training, by strength,
    sharpness and layer. (c) Training continues from the checkpoint in three arms: softmax attention, LUCID in all
    layers by a sharpness ramp, LUCID by the same ramp in the layers that (b) finds cheap; each has its own sweep of
    learning rates, and softmax attention also gets the time of LUCID. Before and after: loss by position, needles in
    real text, memory update in words. (d) The cost of training and of decoding.

What is short, at the scale `small`, which is made for about 100 minutes of one core: one seed; 60 steps of one sequence
of 1024 tokens, of which every fourth is needles; sweeps of 8 steps, whose ramp is as short; few contexts in every cell
of needles, many questions about each; answers by the likeliest token at every place instead of free generation; κ of
prefixes above 512 tokens by iteration; disturbances on two texts of 512 tokens. Products in training and in tests are
in bfloat16 (autocast), LUCID's solve in float32; (a) and (b) are in float32 and float64. The model of
tools/get_smollm2.py was quantized to 4 bits before.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .engine.jobs import Job
from .engine.result import Claim, Conclusion
from .engine.scale import Scale
from .engine.steps import Step
from .engine.study import Done
from .engine.verdict import as_at_small_scale
from .real import figures, keys
from .real.given import text_files
from .real.runs import ALL, ARMS, CHOSEN, SOFTMAX, SOFTMAX_TIME, STOCK, Plan

CLAIM = Claim(
    title="A real pretrained model moves to LUCID",
    section="not in the paper",
    says="A decoder that was trained with softmax attention keeps its language when its layers become LUCID by a "
    "sharpness ramp, and then finds more needles than with softmax attention trained further for as long.",
    paper="none",
)
PAPER_NUMBERS, judge_paper = as_at_small_scale("pretrained")
# A loss within these nats of softmax attention is level. A loss that fell by more than FALLING from the first test
# after the ramp to the end of the run was still being learned.
LEVEL, FALLING = 0.05, 0.05
# A lead in needles counts above this many standard errors of its difference, taken over contexts.
ERRORS = 2.0


def lacks(scale: Scale) -> str | None:
    """What has to be given: a model and texts. The scale `smoke` has its own."""
    how = "python tools/get_smollm2.py models/smollm2; python tools/get_texts.py models/texts; then --model and --texts"
    if scale.tiny:
        return None
    if not scale.model or not scale.texts:
        return f"no --model and --texts were given ({how}; any checkpoint of a decoder and any folder of .txt will do)"
    if not (Path(scale.model) / "config.json").is_file():
        return f"--model {scale.model} is no checkpoint: it has no config.json ({how})"
    if not text_files(scale.texts):
        return f"--texts {scale.texts} holds no .txt files ({how})"
    return None


def plan(scale: Scale, done: Done) -> list[Job]:
    """The jobs that are known so far; none without a model."""
    return [] if lacks(scale) else Plan(scale, done).jobs()


@dataclass(frozen=True)
class Outcome:
    """The end of an arm. loss: on held-out text. fell: nats from the first test after the ramp to the end.

    needles: percent found in every context, over all cells, in the same order for every arm.
    """

    loss: float
    fell: float
    needles: tuple[float, ...]


def lead(lucid: Outcome, softmax: Outcome) -> tuple[float, float]:
    """By how many points LUCID finds more needles, context by context, and its standard error."""
    differences = [a - b for a, b in zip(lucid.needles, softmax.needles, strict=True)]
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
    return statistics.fmean(differences), error


def judge(lucid: Mapping[str, Outcome], softmax: Outcome) -> tuple[str, str]:
    """The verdict and its reason. lucid: by arm. softmax: trained as long as LUCID in all layers took.

    An arm is level if its loss is at most LEVEL above that of softmax attention, and gains if it finds more needles
    by more than ERRORS standard errors. Holds: an arm is level and gains. Partly: an arm is level, or gains. Otherwise
    too small to judge if the loss of every arm was still falling by more than FALLING, and else does not hold.
    """
    level = [arm for arm, outcome in lucid.items() if outcome.loss <= softmax.loss + LEVEL]
    leads = {arm: lead(outcome, softmax) for arm, outcome in lucid.items()}
    gains = [arm for arm, (points, error) in leads.items() if points > ERRORS * error and points > 0]
    falling = [arm for arm, outcome in lucid.items() if outcome.fell > FALLING]
    if set(level) & set(gains):
        verdict = "holds"
    elif level or gains:
        verdict = "partly"
    else:
        verdict = "too small to judge" if len(falling) == len(lucid) else "does not hold"
    words = [
        f"LUCID in {arm}: loss {outcome.loss - softmax.loss:+.3f} nats against softmax attention at equal time "
        f"({'level' if arm in level else 'not level'}), needles {leads[arm][0]:+.1f} ± {leads[arm][1]:.1f} points "
        f"({'a gain' if arm in gains else 'no gain'}); after the ramp the loss "
        f"{'still fell' if outcome.fell > 0 else 'rose'} by {abs(outcome.fell):.3f}"
        f"{', so this arm was stopped too early to be judged' if arm in falling else ''}"
        for arm, outcome in lucid.items()
    ]
    limits = f"Level is at most {LEVEL} nats above, a gain is above {ERRORS:g} standard errors over contexts"
    return verdict, f"{'; '.join(words)}. {limits}; still falling is more than {FALLING}."


def outcome(plan: Plan, name: str, seed: int) -> Outcome:
    """The end of an arm, from the records."""
    record = plan.done[plan.final(SOFTMAX if name == SOFTMAX_TIME else name, seed)]
    mark = plan.equal_time() if name == SOFTMAX_TIME else plan.size.steps
    tests = {int(step): loss for step, loss in zip(record["test_step"], record["test_loss"], strict=True)}
    # From the end of the ramp on, where every test is at the same sharpness.
    last = [loss for step, loss in tests.items() if plan.size.ramp * mark <= step <= mark]
    found = []
    model = plan.models(seed)[name]
    for (task, _, _), job in plan.asked(model).items():
        if task == "needles":
            found += [100 * sum(right) / len(right) for right in plan.done[job]["right"]]
    return Outcome(tests[mark], last[0] - tests[mark], tuple(found))


def conclude(scale: Scale, done: Done) -> Conclusion:
    """The verdict on the first seed's arms, with all figures and tables."""
    made = Plan(scale, done)
    seed = made.size.seeds[0]
    last = SOFTMAX_TIME if SOFTMAX_TIME in made.models(seed) else SOFTMAX
    arms = {arm: outcome(made, arm, seed) for arm in ARMS if arm != SOFTMAX}
    softmax = outcome(made, last, seed)
    verdict, because = judge(arms, softmax)
    growth = {kind: figures.growth(made, kind) for kind in (keys.TRAINED, keys.UNTRAINED, keys.RANDOM)}
    kappas = ", ".join(f"{kind} {low:.1f} → {high:.1f}" for kind, (low, high) in growth.items())
    stock = made.done[made.loss(made.models(seed)[STOCK])]["loss"]
    ours = (
        f"loss at the end: softmax {softmax.loss:.3f}, LUCID in all layers {arms[ALL].loss:.3f}, "
        f"in {len(made.chosen())} chosen layers {arms[CHOSEN].loss:.3f}; needles: "
        f"{statistics.fmean(softmax.needles):.0f}, {statistics.fmean(arms[ALL].needles):.0f}, "
        f"{statistics.fmean(arms[CHOSEN].needles):.0f} %; median κ(P), shortest → longest prefix: {kappas}"
    )
    assert stock, "the model as given was not measured"
    return Conclusion(
        ours=ours,
        verdict=verdict,
        because=because,
        seeds=len(made.size.seeds),
        figures=figures.figures(made),
        tables=figures.tables(made),
    )


def paper() -> list[Step]:
    """The same on a cluster, with the model and the texts of the tools. It needs both folders."""
    folders = ("--model", "models/smollm2", "--texts", "models/texts")
    return [Step(("experiment", "pretrained", "--scale", "small", "--out", "runs/paper/experiments", *folders))]
