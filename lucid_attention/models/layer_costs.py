"""The layers to convert, chosen by what they cost the loss: from the numbers of `lucid analyze --what disturbance`."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files import UnreadableFile, read_json


@dataclass(frozen=True)
class Choice:
    """Layers, and by how many nats the loss rose when they became LUCID together, on `tokens` tokens."""

    layers: list[int]
    change: float
    tokens: int


def layers_within(analysis: str | Path, most_change: float, model_type: str) -> Choice:
    """The largest set of layers whose measured change is at most `most_change`; of several, the one that costs least.

    analysis: an analysis.json with disturbances of a model of the architecture `model_type`. Sets at strength 1 and a
    sharpness of √D count: single layers, the cheapest ones together, and all.
    """
    if not math.isfinite(most_change):
        raise ValueError(f"--most-change must be a number of nats, got {most_change}")
    path = Path(analysis)
    content = read_json(path)
    try:
        records, about, tokens = content["results"]["disturbance"], content["checkpoint"], content["input"]["tokens"]
        root = float(records[0]["sharpness"])
        sets = [
            Choice([int(layer) for layer in record["layers"]], float(record["change"]), int(tokens))
            for record in records[1:]
            if record["strength"] == 1 and record["sharpness"] == root
        ]
        measured: Any = about["model_type"]
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise UnreadableFile(
            f"{path}: expected the numbers of `lucid analyze CHECKPOINT --what disturbance`, and they are not in it"
        ) from error
    if measured != model_type:
        raise ValueError(f"{path} is about a model of the architecture {measured!r}, expected {model_type!r}")
    if not sets:
        raise ValueError(f"{path}: no layer was measured at strength 1 and a sharpness of √D = {root:g}")
    fitting = [one for one in sets if one.change <= most_change]
    if not fitting:
        least = min(sets, key=lambda one: one.change)
        names = ", ".join(map(str, least.layers))
        raise ValueError(
            f"--most-change {most_change:g}: no measured set of layers costs so little; the cheapest, {names}, "
            f"costs {least.change:.4g} nats"
        )
    return max(fitting, key=lambda one: (len(one.layers), -one.change))
