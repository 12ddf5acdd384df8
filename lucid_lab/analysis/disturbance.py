"""How much the loss of a model changes, without training, when LUCID is switched on in it.

Measured for P of raw, centred and whitened keys (`lucid_attention.models.convert.KEYS`), for one layer at a time at
c = √D, and for all layers at several sharpnesses c.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from lucid_attention.models.convert import KEYS, calibrate
from lucid_attention.models.decoder.configuration import LucidConfig
from lucid_attention.models.preconditioner import Preconditioner, head_size, lucid_layers

Record = dict[str, Any]
# In units of √D.
SHARPNESSES = (4.0, 2.0, 1.0)


def disturbances(
    model: Any,
    ids: Tensor,
    sample: Tensor | None = None,
    *,
    keys: Sequence[str] = tuple(KEYS),
    layers: Sequence[int] | None = None,
    sharpnesses: Sequence[float] | None = None,
) -> list[Record]:
    """Records {"keys", "layers", "sharpness", "loss", "change"}: the softmax model first, with a change of 0.

    model: any architecture that `enable_lucid` takes; it becomes a LUCID model, with the last of the keys.
    ids: [B, T]. sample: [B, T], other tokens, which centred and whitened keys need. keys, layers, sharpnesses: as in
    `switched`.
    """
    if isinstance(model.config, LucidConfig):
        raise ValueError("--what disturbance is about models of other architectures, got a LucidForCausalLM")
    records: list[Record] = []
    for name in keys:
        if name != "raw" and sample is None:
            raise ValueError(f"{name} keys need a sample to calibrate with, got none")
        calibrate(model, ids if sample is None else sample, name)
        found = switched(model, ids, layers=layers, sharpnesses=sharpnesses)
        records += [record | {"keys": name} for record in (found[1:] if records else found)]
    return records


@torch.no_grad()
def switched(
    model: Any,
    ids: Tensor,
    *,
    layers: Sequence[int] | None = None,
    sharpnesses: Sequence[float] | None = None,
    sharpness: float | None = None,
) -> list[Record]:
    """`disturbances` of a LUCID model with the keys that it has. Strength and sharpness of its layers are changed.

    layers: those tried one by one at c = `sharpness` (None: √D), None for all that have LUCID. sharpnesses: of all
    layers together; None for multiples of √D.
    """
    able = lucid_layers(model.config)
    tried = able if layers is None else list(layers)
    if unable := [layer for layer in tried if layer not in able]:
        raise ValueError(f"layers must be ones that can be LUCID, {able}, got {unable[0]}")
    root = math.sqrt(head_size(model.config))
    sharpnesses = [factor * root for factor in SHARPNESSES] if sharpnesses is None else sharpnesses
    cases: list[tuple[list[int], float]] = [([], root), *(([layer], sharpness or root) for layer in tried)]
    cases += [(able, c) for c in sharpnesses]
    modules = [module for module in model.modules() if isinstance(getattr(module, "lucid", None), Preconditioner)]
    records: list[Record] = []
    for chosen, c in tqdm(cases, "disturbance", leave=False, delay=5, disable=None):
        for module in modules:
            module.lucid.strength.fill_(float(module.layer_idx in chosen))
            module.lucid.sharpness.fill_(c)
        loss = mean_loss(model, ids)
        change = loss - records[0]["loss"] if records else 0.0
        records.append({"layers": list(chosen), "sharpness": c, "loss": loss, "change": change})
    return records


def mean_loss(model: Any, ids: Tensor) -> float:
    """The mean loss of the next token, in nats. ids: [B, T]."""
    with torch.no_grad():
        return float(model(ids, labels=ids, use_cache=False, return_dict=True).loss)
