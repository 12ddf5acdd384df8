"""A real pretrained model (not in the paper): does a trained decoder move to LUCID, and does it gain by it?

(a) κ(P) of the model's keys on real text, by length, next to untrained and random keys: the paper's Figure 2
    on real keys. (b) The loss when LUCID is switched on without training, by sharpness and layer. (c) Training
    continues from the checkpoint in three arms: softmax attention, LUCID in all layers by a sharpness ramp, LUCID by
    the same ramp in the layers that (b) finds cheap. Each has its own sweep of learning rates, and softmax attention
    also gets the time of LUCID. Before and after: needles in real text, memory update in words.
    (d) The cost of training and of decoding.

What is short, at the scale `small`, which is made for about 100 minutes of one core: one seed; 60 steps of one sequence
of 1024 tokens, of which every fourth is needles; sweeps of 8 steps, whose ramp is as short; few contexts in every cell
of needles, many questions about each; answers by the likeliest token at every place instead of free generation; κ of
prefixes above 512 tokens by iteration; disturbances on two texts of 512 tokens. (a) and (b) are in float32 and float64.
The model of tools/get_smollm2.py was quantized to 4 bits before.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lucid_attention import enable_lucid
from lucid_attention.models.checkpoint import load_config

from ..analysis.conditioning import condition_numbers, key_condition_numbers
from ..analysis.disturbance import disturbances, mean_loss
from ..bench.harness import Run, race, ratios
from ..toys.lab import Lab, Record
from ..toys.results import Claim, Conclusion, Figure, Table, lines, series, table
from ..toys.tuning import TEST, Subject, Tuning, ask, given, read_texts, text_files, texts_sha256, tune

CLAIM = Claim(
    title="A real pretrained model moves to LUCID",
    section="not in the paper",
    says="A decoder that was trained with softmax attention keeps its language when its layers become LUCID by a "
    "sharpness ramp, and then finds more needles than with softmax attention trained further for as long.",
    paper="none",
)
# A loss within these nats of softmax attention is level. A loss that fell by more than FALLING from the first test
# after the ramp to the end of the run was still being learned.
LEVEL, FALLING = 0.05, 0.05
# A lead in needles counts above this many standard errors of its difference, taken over contexts.
ERRORS = 2.0
# Nats that the chosen layers may cost together, before training.
ALLOWED = 0.25
# Sizes of the sets of cheap layers, as shares of all layers. The ramps start at START · √D and take RAMP of the steps.
SHARES, START, RAMP = (1 / 8, 1 / 4, 1 / 2), 8.0, 0.75
# Longest prefix whose singular values are computed exactly.
EXACT = 512

# The arms of the training, and the models that are asked: softmax attention counts twice, at equal steps and time.
SOFTMAX, ALL, CHOSEN = "softmax", "all layers", "chosen layers"
STOCK, SOFTMAX_TIME = "before training", "softmax, equal time"
TITLES = {
    STOCK: "before training",
    SOFTMAX: "softmax",
    SOFTMAX_TIME: "softmax, equal time",
    ALL: "LUCID, all layers",
    CHOSEN: "LUCID, chosen layers",
}
ROLES = {SOFTMAX: "softmax", ALL: "lucid", CHOSEN: "lucid_path"}
TRAINED, UNTRAINED, RANDOM = "trained", "untrained", "random"
KEYS = {TRAINED: ("trained, on text", "lucid"), UNTRAINED: ("untrained, on text", "control")}
KEYS |= {RANDOM: ("random keys", "softmax")}


@dataclass(frozen=True)
class Sizes:
    """How much is run. The defaults take about 100 minutes of one core with a model of 135 million weights.

    train_tokens, long_texts, long_tokens: of the texts. key_lengths: of prefixes. switch_texts, switch_length: of (b).
    length: tokens of a training sequence. rates, sweep_steps: of the sweeps. steps: of a training.
    needles: (tokens, needles, contexts) of every cell. boxes: (boxes, writes, contexts).
    training, decoding: tokens whose cost is measured in `rounds`.
    """

    train_tokens: int = 400_000
    long_texts: int = 6
    long_tokens: int = 8193
    key_lengths: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096, 8192)
    switch_texts: int = 2
    switch_length: int = 512
    length: int = 1024
    rates: tuple[float, ...] = (3e-5, 1e-4, 3e-4)
    sweep_steps: int = 8
    steps: int = 60
    needles: tuple[tuple[int, int, int], ...] = (
        *((1024, 1, 4), (1024, 2, 4), (1024, 4, 3), (1024, 10, 2)),
        *((2048, 1, 4), (2048, 2, 3), (2048, 4, 2), (2048, 10, 2)),
        *((4096, 2, 2), (4096, 10, 2), (8192, 2, 1), (8192, 10, 1)),
    )
    boxes: tuple[tuple[int, int, int], ...] = ((4, 2, 8), (8, 3, 6))
    training: int = 1024
    decoding: tuple[int, ...] = (1024, 4096)
    rounds: int = 4


TINY = Sizes(
    train_tokens=2000,
    long_texts=2,
    long_tokens=513,
    key_lengths=(64, 128),
    switch_texts=1,
    switch_length=64,
    length=512,
    rates=(1e-3,),
    sweep_steps=2,
    steps=4,
    needles=((256, 1, 1), (320, 2, 1)),
    boxes=((4, 2, 1),),
    training=64,
    decoding=(64,),
    rounds=1,
)


def lacks(lab: Lab) -> str | None:
    """What has to be given: a model and texts."""
    how = "python tools/get_smollm2.py models/smollm2; python tools/get_texts.py models/texts; then --model and --texts"
    if not lab.model or not lab.texts:
        return f"no --model and --texts were given ({how}; any checkpoint of a decoder and any folder of .txt will do)"
    if not (Path(lab.model) / "config.json").is_file():
        return f"--model {lab.model} is no checkpoint: it has no config.json ({how})"
    if not text_files(lab.texts):
        return f"--texts {lab.texts} holds no .txt files ({how})"
    return None


def measure_keys(folder: Path, settings: Mapping[str, Any]) -> Record:
    """For `lab.map`: {"heads": records of `condition_numbers`}, for prefixes of one test text.

    settings: subject; kind, TRAINED, UNTRAINED (new weights) or RANDOM (normal keys); layers, or draws of random keys;
    lengths; head_dim, of random keys.
    """
    subject, kind, layers, lengths = (settings[name] for name in ("subject", "kind", "layers", "lengths"))
    if kind == RANDOM:
        shape = max(lengths), settings["head_dim"]
        draws = [torch.randn(shape, generator=torch.Generator().manual_seed(draw)) for draw in layers]
        found = [key_condition_numbers(keys, lengths, exact_up_to=EXACT) for keys in draws]
        return {
            "heads": [{"layer": draw, **one} for draw, records in zip(layers, found, strict=True) for one in records]
        }
    model = _untrained(subject.model) if kind == UNTRAINED else subject.load(folder.parent)
    ids = _test_text(folder, subject, 0, max(lengths))
    return {"heads": condition_numbers(model, ids, lengths, layers=layers, exact_up_to=EXACT)}


def _untrained(model: str) -> Any:
    from transformers import AutoModelForCausalLM, set_seed

    set_seed(0)
    return AutoModelForCausalLM.from_config(load_config(model), trust_remote_code=False)


def _test_text(folder: Path, subject: Subject, text: int, length: int) -> Tensor:
    """The beginning of a long test text, [1, length]."""
    return subject.tokens(folder.parent)[TEST][text : text + 1, :length]


def switch(folder: Path, settings: Mapping[str, Any]) -> Record:
    """For `lab.map`: {"records": of `disturbances`}. settings: subject, text, length."""
    subject = settings["subject"]
    ids = _test_text(folder, subject, settings["text"], settings["length"])
    return {"records": disturbances(subject.load(folder.parent), ids, keys=["raw"])}


def switch_together(folder: Path, settings: Mapping[str, Any]) -> Record:
    """For `lab.map`: {"changes"}: by how much the loss rises when a set of layers becomes LUCID, for every set.

    settings: subject, text, length, sets.
    """
    subject = settings["subject"]
    model, ids = subject.load(folder.parent), _test_text(folder, subject, settings["text"], settings["length"])
    base = mean_loss(model, ids)
    return {"changes": [mean_loss(enable_lucid(model, layers=layers), ids) - base for layers in settings["sets"]]}


def time_model(folder: Path, settings: Mapping[str, Any]) -> Record:
    """For `lab.map(..., alone=True)`: {"seconds", "ratio"}: medians, and LUCID over softmax, median and quartiles.

    Seconds are of the core, so that other processes do not count.
    settings: subject; what, "training" (forward and backward of one sequence in bfloat16) or "decoding" (16 tokens
    after a context, in float32, without the context); length; layers with LUCID; rounds.
    """
    subject = settings["subject"]
    ids = _test_text(folder, subject, 0, settings["length"])
    models = {name: subject.load(folder.parent) for name in ("softmax", "lucid")}
    enable_lucid(models["lucid"], layers=settings["layers"])
    make = {"training": _training, "decoding": _decoding}[settings["what"]]
    runs = {name: make(model, ids) for name, model in models.items()}
    times = race(runs, budget=0.0, seed=settings["what"], least=settings["rounds"], clock=_core_seconds)
    seconds = {name: statistics.median(rounds) for name, rounds in times.items()}
    return {"seconds": seconds, "ratio": ratios(times["lucid"], times["softmax"])[:3]}


def _core_seconds(run: Run) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def _training(model: Any, ids: Tensor) -> Run:
    model.train()

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        model.zero_grad(set_to_none=True)

    return step


def _decoding(model: Any, ids: Tensor) -> Run:
    with torch.no_grad():
        cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values

    def steps() -> None:
        with torch.no_grad():
            for _ in range(16):
                model(ids[:, -1:], past_key_values=cache)
        cache.crop(-16)

    return steps


def cheapest(records: Sequence[Sequence[Record]]) -> list[list[int]]:
    """Sets of layers that disturb least one by one, a set for each of SHARES. records: of `disturbances`, by text."""
    costs: dict[int, float] = {}
    for record in (record for text in records for record in text if len(record["layers"]) == 1):
        (layer,) = record["layers"]
        costs[layer] = costs.get(layer, 0.0) + record["change"]
    order = sorted(costs, key=costs.__getitem__)
    return [sorted(order[: max(1, round(share * len(order)))]) for share in SHARES]


def choose(sets: Sequence[Sequence[int]], changes: Sequence[float]) -> list[int]:
    """The largest set whose change is at most ALLOWED; the smallest set if none is. sets: from small to large."""
    fitting = [layers for layers, change in zip(sets, changes, strict=True) if change <= ALLOWED]
    return list(fitting[-1] if fitting else sets[0])


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

    An arm is level if its loss is at most 0.05 nats above that of softmax attention, and gains if it finds more needles
    by more than 2 standard errors. Holds: an arm is level and gains. Partly: an arm is level, or gains. Otherwise too
    small to judge if the loss of every arm was still falling by more than 0.05 after its ramp, and else does not hold.
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


def run(lab: Lab) -> Conclusion:
    """Keys, disturbances, costs, training in three arms, questions."""
    size = TINY if lab.tiny else Sizes()
    config = load_config(lab.model).get_text_config(decoder=True)
    context = config.max_position_embeddings
    subject = given(lab.model)
    texts = {"texts": lab.texts, "sha256": texts_sha256(lab.texts), "train_tokens": size.train_tokens}
    texts |= {"long_texts": size.long_texts, "long_tokens": min(size.long_tokens, context + 1)}
    (record,) = lab.map(read_texts, [{"subject": subject, **texts}], title="texts")
    subject = Subject(subject.model, subject.sha256, record["folder"])

    # (b): the layers that can be LUCID, and those that are cheap.
    switched = [{"subject": subject, "text": text, "length": size.switch_length} for text in range(size.switch_texts)]
    disturbed = [record["records"] for record in lab.map(switch, switched, title="disturbance")]
    root = disturbed[0][0]["sharpness"]
    every = sorted({layer for record in disturbed[0] for layer in record["layers"]})
    sets = cheapest(disturbed)
    together = lab.map(switch_together, [{**one, "sets": sets} for one in switched], title="layers together")
    set_costs = [statistics.fmean(costs) for costs in zip(*(record["changes"] for record in together), strict=True)]
    layers: dict[str, tuple[int, ...]] = {SOFTMAX: (), ALL: tuple(every), CHOSEN: tuple(choose(sets, set_costs))}

    # (a)
    last = config.num_hidden_layers - 1
    some = sorted({round(share * last) for share in (0, 1 / 3, 2 / 3, 1)})
    lengths = [length for length in size.key_lengths if length <= context]
    base = {"subject": subject, "lengths": lengths, "head_dim": round(root**2)}
    measured = [{**base, "kind": kind, "layers": [0, 1, 2] if kind == RANDOM else some} for kind in KEYS]
    by_kind = (record["heads"] for record in lab.map(measure_keys, measured, title="keys"))
    keys = dict(zip(KEYS, by_kind, strict=True))

    # (d)
    timed = [
        (what, length, arm)
        for what, length in (("training", size.training), *(("decoding", length) for length in size.decoding))
        for arm in (ALL, CHOSEN)
    ]
    settings: list[Any] = [
        {"subject": subject, "what": what, "length": length, "layers": layers[arm], "rounds": size.rounds}
        for what, length, arm in timed
    ]
    costs = dict(zip(timed, lab.map(time_model, settings, title="costs", alone=True), strict=True))

    # (c)
    def tuning(arm: str, rate: float, *marks: int, **more: Any) -> Tuning:
        return Tuning(
            subject,
            layers[arm],
            rate,
            marks,
            ramp=max(1, round(RAMP * marks[0])),
            start=START * root,
            length=size.length,
            warm_up=max(1, size.sweep_steps // 2),
            **more,
        )

    trials = {
        arm: [tuning(arm, rate, size.sweep_steps, test_every=size.sweep_steps) for rate in size.rates] for arm in layers
    }
    swept = {
        arm: [_last_loss(record) for record in records]
        for arm, records in lab.map_groups(tune, trials, title="sweep of rates").items()
    }
    rates = {arm: size.rates[losses.index(min(losses))] for arm, losses in swept.items()}
    # The time of a tiny model is noise, and a long run would come to needles that do not fit into its sequences.
    factor = min(max(1.0, costs["training", size.training, ALL]["ratio"][0]), 2.0 if lab.tiny else math.inf)
    equal_time = math.ceil(size.steps * factor)
    marks = {
        arm: (size.steps,) if arm != SOFTMAX or equal_time == size.steps else (size.steps, equal_time) for arm in layers
    }
    finals = [tuning(arm, rates[arm], *marks[arm], keep=True, test_every=max(1, size.steps // 6)) for arm in layers]
    tuned = dict(zip(layers, lab.map(tune, finals, title="training"), strict=True))

    subjects = {STOCK: subject, **{arm: subject.tuned_by(tuned[arm], size.steps) for arm in layers}}
    if equal_time > size.steps:
        subjects[SOFTMAX_TIME] = subject.tuned_by(tuned[SOFTMAX], equal_time)
    cells = [("needles", *cell) for cell in size.needles if cell[0] <= context]
    cells += [("boxes", *cell) for cell in size.boxes]
    questions = {
        name: [
            {"subject": one, "task": task, "size": tokens, "count": count, "contexts": contexts}
            for task, tokens, count, contexts in cells
        ]
        for name, one in subjects.items()
    }
    asked = lab.map_groups(ask, questions, title="questions")
    found = {name: dict(zip(cells, records, strict=True)) for name, records in asked.items()}

    def outcome(name: str, arm: str, mark: int) -> Outcome:
        needles = [record["right"] for cell, record in found[name].items() if cell[0] == "needles"]
        shares = tuple(100 * statistics.fmean(context) for contexts in needles for context in contexts)
        return Outcome(*end_of(tuned[arm], mark), shares)

    softmax = outcome(SOFTMAX_TIME if SOFTMAX_TIME in subjects else SOFTMAX, SOFTMAX, equal_time)
    ends = {arm: outcome(arm, arm, size.steps) for arm in (ALL, CHOSEN)}
    verdict, because = judge(ends, softmax)
    kappas = ", ".join(f"{kind} {values[0]:.1f} → {values[-1]:.1f}" for kind, values in _medians(keys, lengths).items())
    finds = [f"{statistics.fmean(one.needles):.0f}" for one in (softmax, ends[ALL], ends[CHOSEN])]
    return Conclusion(
        ours=f"loss at the end: softmax {softmax.loss:.3f}, LUCID in all layers {ends[ALL].loss:.3f}, "
        f"in {len(layers[CHOSEN])} chosen layers {ends[CHOSEN].loss:.3f}; needles: {', '.join(finds)} %; "
        f"median κ(P), shortest → longest prefix: {kappas}",
        verdict=verdict,
        because=because,
        seeds=1,
        figures=[
            keys_figure(keys, lengths, some),
            *switch_figures(disturbed),
            curves_figure(tuned, round(RAMP * size.steps)),
        ],
        tables=[
            sets_table(sets, set_costs, layers[CHOSEN]),
            sweep_table(swept, rates, size.rates),
            needles_table(found),
            boxes_table(found),
            costs_table(costs),
        ],
    )


def _last_loss(record: Record) -> float:
    """The last loss on held-out text; infinite where it diverged."""
    loss = record["test_loss"][-1]
    return math.inf if loss is None else float(loss)


def end_of(record: Record, mark: int) -> tuple[float, float]:
    """Loss and fall of a record of `tune` at a mark, as in `Outcome`."""
    pairs = zip(record["test_step"], record["test_loss"], strict=True)
    tests = {step: math.inf if loss is None else loss for step, loss in pairs}
    # From the end of the ramp on, where every test is at the same sharpness.
    late = [loss for step, loss in tests.items() if RAMP * mark <= step <= mark]
    return tests[mark], late[0] - tests[mark]


Found = Mapping[str, Mapping[tuple[str, int, int, int], Record]]


def share(record: Record, name: str = "right") -> float:
    """The share of the questions whose answer is right, or stale, in percent."""
    return 100 * statistics.fmean(answer for context in record[name] for answer in context)


def _medians(keys: Mapping[str, Sequence[Record]], lengths: Sequence[int]) -> dict[str, list[float]]:
    """κ by length, median over layers and heads, by kind."""
    return {
        kind: [statistics.median(head["kappa"] for head in heads if head["length"] == length) for length in lengths]
        for kind, heads in keys.items()
    }


def keys_figure(keys: Mapping[str, Sequence[Record]], lengths: Sequence[int], layers: Sequence[int]) -> Figure:
    """κ(P) against the length of the prefix."""
    curves = [
        series(*KEYS[kind], lengths, values, dashed=kind != TRAINED) for kind, values in _medians(keys, lengths).items()
    ]
    note = f"Medians over heads and the layers {', '.join(map(str, layers))}."
    return lines("Keys of the model: κ(P)", "tokens", "κ(P)", curves, log="xy", note=note)


def switch_figures(texts: Sequence[Sequence[Record]]) -> list[Figure]:
    """Nats above softmax attention without training, by layer and by sharpness: means over texts."""

    def curve(chosen: Callable[[Record], bool], x: Callable[[Record], float]) -> tuple[list[float], list[float]]:
        records = [[record for record in text if chosen(record)] for text in texts]
        changes = [statistics.fmean(record["change"] for record in same) for same in zip(*records, strict=True)]
        return [x(record) for record in records[0]], changes

    one = curve(lambda record: len(record["layers"]) == 1, lambda record: record["layers"][0])
    all_layers = curve(lambda record: len(record["layers"]) > 1, lambda record: record["sharpness"])
    dearest = sorted(zip(one[1], one[0], strict=True), reverse=True)[:2]
    note = "The dearest: " + ", ".join(f"layer {layer} {cost:+.2f}" for cost, layer in dearest) + "."
    label = "nats above softmax"
    return [
        lines("LUCID in one layer, without training", "layer", label, [series("c = √D", "lucid", *one)], note=note),
        lines("LUCID in all layers, without training", "c", label, [series("s = 1", "lucid", *all_layers)], log="x"),
    ]


def curves_figure(tuned: Mapping[str, Record], ramp: int) -> Figure:
    """The loss on held-out text in training."""
    curves = [
        series(TITLES[arm], ROLES[arm], record["test_step"], record["test_loss"]) for arm, record in tuned.items()
    ]
    note = "LUCID is tested at the sharpness that it has at that step."
    title = "Continued training: loss on held-out text"
    return lines(title, "steps", "nats a token", curves, marks=[(ramp, "c = √D")], note=note)


def sets_table(sets: Sequence[Sequence[int]], costs: Sequence[float], chosen: Sequence[int]) -> Table:
    """Sets of cheap layers."""
    rows = [
        [len(layers), ", ".join(map(str, layers)), round(cost, 3), "chosen" if list(layers) == list(chosen) else ""]
        for layers, cost in zip(sets, costs, strict=True)
    ]
    return table("The cheapest layers together, without training", ["layers", "which", "nats", ""], rows)


def sweep_table(swept: Mapping[str, Sequence[float]], chosen: Mapping[str, float], rates: Sequence[float]) -> Table:
    """The loss with every rate, and which was taken. A rate at the edge is named: one beyond it may be better."""
    edge = {rates[-1]: ", the largest tried", rates[0]: ", the smallest tried"} if len(rates) > 1 else {}
    rows = [
        [TITLES[arm], *(round(loss, 3) for loss in losses), f"{chosen[arm]:g}{edge.get(chosen[arm], '')}"]
        for arm, losses in swept.items()
    ]
    note = "Held-out loss at the end of short runs, in which LUCID's whole ramp lies."
    return table("Sweep of learning rates", ["arm", *(f"{rate:g}" for rate in rates), "chosen"], rows, note=note)


def needles_table(found: Found) -> Table:
    """The share of needles that every model finds."""
    rows = [
        [
            tokens,
            count,
            contexts,
            contexts * count,
            *(round(share(one[task, tokens, count, contexts]), 1) for one in found.values()),
        ]
        for task, tokens, count, contexts in found[STOCK]
        if task == "needles"
    ]
    columns = ["tokens", "needles", "contexts", "questions", *(TITLES[name] for name in found)]
    return table("Needles found, percent", columns, rows)


def boxes_table(found: Found) -> Table:
    """The latest content of boxes, or an overwritten one."""
    rows = [
        [boxes, writes, contexts * boxes, TITLES[name], round(share(record), 1), round(share(record, "stale"), 1)]
        for name, records in found.items()
        for (task, boxes, writes, contexts), record in records.items()
        if task == "boxes"
    ]
    columns = ["boxes", "writes of each", "questions", "model", "latest, %", "an overwritten one, %"]
    return table("Memory update in words", columns, rows)


def costs_table(costs: Mapping[tuple[str, int, str], Record]) -> Table:
    """LUCID's time over that of softmax attention."""
    rows = []
    for (what, length, arm), record in costs.items():
        seconds = (round(record["seconds"][name], 3) for name in ("softmax", "lucid"))
        rows.append([what, length, TITLES[arm], *seconds, *(round(ratio, 3) for ratio in record["ratio"])])
    columns = ["what", "tokens", "arm", "softmax, s", "LUCID, s", "ratio", "lower quartile", "upper quartile"]
    note = "Core seconds, in turn: a forward and backward pass in bfloat16; 16 tokens after a context in float32."
    return table("What LUCID costs in this model", columns, rows, note=note)
