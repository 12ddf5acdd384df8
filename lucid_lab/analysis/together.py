"""How much the loss changes when several cheap layers become LUCID together.

Costs of single layers do not add up: each layer reads what the others have changed. `lucid convert --layers-from`
chooses among the sets that were measured.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lucid_attention import enable_lucid
from lucid_attention.models.decoder.configuration import LucidConfig
from lucid_attention.models.preconditioner import full_layers, layer_kinds

from .disturbance import Record, mean_loss
from .progress import Progress, silent

# Sizes of the sets, as shares of the layers that were tried one by one.
SHARES = (1 / 8, 1 / 4, 1 / 2, 3 / 4)


def disturbances_together(
    model: Any, ids: Tensor, records: Sequence[Record], *, progress: Progress = silent
) -> list[Record]:
    """Records of sets of the cheapest layers at strength 1 and the sharpness of the first record, √D.

    model: the one of `disturbances`; its settings are left as in the last record. A `LucidForCausalLM` gives no
    records: `lucid convert` does not choose its layers. ids: [1, T]. records: of `disturbances`.
    """
    if isinstance(model.config, LucidConfig):
        return []
    base, every = records[0], len(full_layers(layer_kinds(model.config.get_text_config(decoder=True))))
    alone = {
        record["layers"][0]: record["change"]
        for record in records
        if len(record["layers"]) == 1 and record["strength"] == 1 and record["sharpness"] == base["sharpness"]
    }
    order = sorted(alone, key=lambda layer: (alone[layer], layer))
    counts = sorted({round(share * len(order)) for share in SHARES})
    found = []
    for count in (count for count in counts if 1 < count < every):
        progress(f"the {count} cheapest layers")
        layers, sharpness = sorted(order[:count]), base["sharpness"]
        enable_lucid(model, layers=layers, strength=1.0, sharpness=sharpness)
        loss = mean_loss(model, ids)
        values = {"strength": 1.0, "sharpness": sharpness, "loss": loss, "change": loss - base["loss"]}
        found.append({"layers": layers, **values})
    return found
