"""Figures and tables of the experiment, from its records."""

import statistics
from collections.abc import Callable, Iterable
from itertools import pairwise

from ..engine.jobs import Record
from ..engine.result import Figure, Table, lines, series, table
from . import keys
from .runs import ALL, ARMS, CHOSEN, SOFTMAX, SOFTMAX_TIME, STOCK, Plan, share_right

ROLES = {STOCK: "control", SOFTMAX: "softmax", SOFTMAX_TIME: "softmax", ALL: "lucid", CHOSEN: "lucid_path"}
TITLES = {
    STOCK: "before training",
    SOFTMAX: "softmax",
    SOFTMAX_TIME: "softmax, equal time",
    ALL: "LUCID, all layers",
    CHOSEN: "LUCID, chosen layers",
}
KINDS = {
    keys.TRAINED: ("trained, on text", "lucid"),
    keys.UNTRAINED: ("untrained, on text", "control"),
    keys.RANDOM: ("random keys", "softmax"),
}
MEASURES = {
    "kappa": "κ(P)",
    "value_ratio": "‖P⁻¹V‖ / ‖V‖",
    "mass": "off-diagonal mass of P, mean of rows",
}


def median_by_length(heads: Iterable[Record], name: str) -> tuple[list[int], list[float]]:
    """Lengths, and medians over layers and heads."""
    heads = list(heads)
    lengths = sorted({head["length"] for head in heads})
    return lengths, [statistics.median(head[name] for head in heads if head["length"] == n) for n in lengths]


def growth(plan: Plan, kind: str) -> tuple[float, float]:
    """The median κ(P) at the shortest and at the longest length."""
    _, values = median_by_length(plan.done[plan.key_jobs()[kind]]["heads"], "kappa")
    return values[0], values[-1]


def figures(plan: Plan) -> list[Figure]:
    """All figures."""
    found = [_keys(plan, name) for name in MEASURES]
    return [*found, *_switches(plan), _curves(plan), _positions(plan), *_needles(plan)]


def _keys(plan: Plan, name: str) -> Figure:
    curves = []
    for kind, (title, role) in KINDS.items():
        lengths, values = median_by_length(plan.done[plan.key_jobs()[kind]]["heads"], name)
        curves.append(series(title, role, lengths, values, dashed=kind != keys.TRAINED))
    note = "Medians over heads and the layers " + ", ".join(map(str, plan.key_layers())) + "."
    return lines(f"Keys of the model: {MEASURES[name]}", "tokens", MEASURES[name], curves, log="xy", note=note)


def _switches(plan: Plan) -> list[Figure]:
    texts = [plan.done[job]["records"] for job in plan.switch_jobs()]

    def curve(select: Callable[[Record], float | None]) -> tuple[list[float], list[float]]:
        found: dict[float, list[float]] = {}
        for text in texts:
            for record in text[1:]:
                at = select(record)
                if at is not None:
                    found.setdefault(at, []).append(record["change"])
        return list(found), [statistics.fmean(values) for values in found.values()]

    every = plan.shape["layers"]
    root = min(record["sharpness"] for record in texts[0])
    by_layer = curve(lambda one: one["layers"][0] if len(one["layers"]) == 1 else None)
    by_c = curve(lambda one: one["sharpness"] if len(one["layers"]) == every and one["strength"] == 1 else None)
    whole = curve(lambda one: one["strength"] if len(one["layers"]) == every and one["sharpness"] == root else None)
    label = "nats above softmax"
    alone = [series("c = √D", "lucid", *by_layer)]
    return [
        lines("LUCID in one layer, without training", "layer", label, alone, note=_dearest(*by_layer)),
        lines(
            "LUCID in all layers, without training: sharpness", "c", label, [series("s = 1", "lucid", *by_c)], log="x"
        ),
        lines("LUCID in all layers, without training: strength", "s", label, [series("c = √D", "lucid", *whole)]),
    ]


def _dearest(layers: list[float], costs: list[float]) -> str:
    """The two layers that cost most, in words: beside them the others are a flat line."""
    order = sorted(range(len(layers)), key=lambda at: -costs[at])
    first = " and ".join(f"layer {layers[at]:g} costs {costs[at]:.2f}" for at in order[:2])
    rest = statistics.median(costs[at] for at in order[2:]) if order[2:] else 0.0
    return f"{first[0].upper()}{first[1:]} nats, the median of the others is {rest:.3f}."


def _curves(plan: Plan) -> Figure:
    curves = []
    for arm in ARMS:
        for seed in plan.size.seeds:
            record = plan.done[plan.final(arm, seed)]
            curves.append(series(TITLES[arm], ROLES[arm], record["test_step"], record["test_loss"]))
    ramp = round(plan.size.ramp * plan.size.steps)
    return lines(
        "Continued training: loss on held-out text",
        "steps",
        "nats a token",
        curves,
        marks=[(ramp, "c = √D")],
        note="LUCID is tested at the sharpness that it has at that step.",
    )


def _models(plan: Plan) -> dict[str, dict[str, object] | None]:
    return plan.models(plan.size.seeds[0])


def _positions(plan: Plan) -> Figure:
    curves = []
    for name, model in _models(plan).items():
        record = plan.done[plan.loss(model)]
        means = [statistics.fmean(column) for column in zip(*record["loss"], strict=True)]
        curves.append(
            series(TITLES[name], ROLES[name], record["edges"][1:], means, dashed=name in (STOCK, SOFTMAX_TIME))
        )
    note = "Means up to each position, from the one before it."
    return lines("Loss by position on held-out texts", "position", "nats a token", curves, log="x", note=note)


def _needles(plan: Plan) -> list[Figure]:
    found = []
    for count in sorted({count for _, count, _ in plan.size.needles}):
        lengths = [length for length, needles, _ in plan.size.needles if needles == count]
        curves = []
        for name, model in _models(plan).items():
            asked = plan.asked(model)
            values = [share_right(plan.done[asked["needles", length, count]]) for length in lengths]
            curves.append(series(TITLES[name], ROLES[name], lengths, values, dashed=name in (STOCK, SOFTMAX_TIME)))
        title = f"{count} needle{'s' if count > 1 else ''} in real text"
        found.append(lines(title, "tokens", "percent found", curves, log="x", range=[0, 100]))
    return found


def tables(plan: Plan) -> list[Table]:
    """All tables."""
    return [
        _layers(plan),
        _hits(plan),
        _sets(plan),
        _sweep(plan),
        _ends(plan),
        _found(plan),
        _boxes(plan),
        _costs(plan),
    ]


def _layers(plan: Plan) -> Table:
    heads = [head for job in plan.layer_jobs() for head in plan.done[job]["heads"]]
    longest = max(head["length"] for head in heads)
    rows = []
    for layer in sorted({head["layer"] for head in heads}):
        chosen = [head for head in heads if head["layer"] == layer and head["length"] == longest]
        rows.append([layer, *(round(statistics.median(head[name] for head in chosen), 3) for name in MEASURES)])
    return table(
        f"Keys by layer, {longest} tokens of text", ["layer", *MEASURES.values()], rows, note="Medians over heads."
    )


def _hits(plan: Plan) -> Table:
    models = {name: plan.hit_jobs(model) for name, model in _models(plan).items()}
    rows = []
    for name, jobs in models.items():
        for job in jobs:
            layers = plan.done[job]["layers"]
            best = max(layers, key=lambda layer: layer["best"])
            means = [statistics.fmean(layer[key] for layer in layers) for key in ("softmax", "magnitude")]
            rows.append([TITLES[name], job.arguments["length"], *(round(mean, 4) for mean in means)])
            rows[-1] += [best["layer"], round(best["best"], 3)]
    columns = ["model", "tokens", "A on the value", "|W| on the value", "best layer", "its best head"]
    note = (
        "Four needles, the last token before the value; means over layers, heads and samples. W = A P⁻¹ where LUCID is."
    )
    return table("Hit rates", columns, rows, note=note)


def _sets(plan: Plan) -> Table:
    sets, jobs = plan.sets(), plan.together_jobs()
    means = [statistics.fmean(plan.done[job]["changes"][i] for job in jobs) for i in range(len(sets))]
    rows = [
        [len(layers), ", ".join(map(str, layers)), round(mean, 3), "chosen" if layers == plan.chosen() else ""]
        for layers, mean in zip(sets, means, strict=True)
    ]
    return table("The cheapest layers together, without training", ["layers", "which", "nats", ""], rows)


def _sweep(plan: Plan) -> Table:
    rows = [[TITLES[arm], *(plan.done[job]["test_loss"][-1] for job in plan.sweep(arm).values())] for arm in ARMS]
    for row, arm in zip(rows, ARMS, strict=True):
        row[1:] = [round(float(loss), 3) for loss in row[1:]]
        row.append(_chosen_rate(plan.rate(arm), plan.size.rates))
    note = f"Held-out loss after {plan.size.sweep_steps} steps, in which LUCID's whole ramp lies."
    return table(
        "Sweep of learning rates", ["arm", *(f"{rate:g}" for rate in plan.size.rates), "chosen"], rows, note=note
    )


def _chosen_rate(rate: float, rates: tuple[float, ...]) -> str:
    """The rate, with a word where a rate beyond the sweep may be better."""
    edge = {max(rates): ", the largest tried", min(rates): ", the smallest tried"} if len(rates) > 1 else {}
    return f"{rate:g}{edge.get(rate, '')}"


def _ends(plan: Plan) -> Table:
    rows = []
    for name, model in _models(plan).items():
        record = plan.done[plan.loss(model)]
        means = [statistics.fmean(column) for column in zip(*record["loss"], strict=True)]
        rows.append([TITLES[name], *(round(mean, 3) for mean in means)])
    edges = plan.done[plan.loss(None)]["edges"]
    columns = [f"{first} to {last}" for first, last in pairwise(edges)]
    return table("Loss by position", ["model", *columns], rows, note="Nats a token, held-out texts.")


def _found(plan: Plan) -> Table:
    rows = []
    for length, count, contexts in plan.size.needles:
        row: list[object] = [length, count, contexts, contexts * count]
        for model in _models(plan).values():
            row.append(round(share_right(plan.done[plan.asked(model)["needles", length, count]]), 1))
        rows.append(row)
    columns = ["tokens", "needles", "contexts", "questions", *(TITLES[name] for name in _models(plan))]
    return table("Needles found, percent", columns, rows)


def _boxes(plan: Plan) -> Table:
    rows = []
    for boxes, writes, contexts in plan.size.boxes:
        for name, model in _models(plan).items():
            record = plan.done[plan.asked(model)["boxes", boxes, writes]]
            stale = [one for context in record["stale"] for one in context]
            right = round(share_right(record), 1)
            rows.append([boxes, writes, contexts * boxes, TITLES[name], right, round(100 * sum(stale) / len(stale), 1)])
    columns = ["boxes", "writes of each", "questions", "model", "latest, %", "an overwritten one, %"]
    return table("Memory update in words", columns, rows)


def _costs(plan: Plan) -> Table:
    rows = []
    for (what, length, arm), job in plan.cost_jobs().items():
        record = plan.done[job]
        softmax, lucid = (statistics.median(record[name]) for name in ("softmax", "lucid"))
        ratios = [round(record[name], 3) for name in ("ratio", "low", "high")]
        rows.append([what, length, TITLES[arm], round(softmax, 3), round(lucid, 3), *ratios])
    columns = ["what", "tokens", "arm", "softmax, s", "LUCID, s", "ratio", "lowest", "highest"]
    note = "Core seconds, in turn: a forward and backward pass in bfloat16; 16 tokens after a context in float32."
    return table("What LUCID costs in this model", columns, rows, note=note)
