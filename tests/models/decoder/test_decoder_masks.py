"""Padding and packed documents in the own decoder: the other contents of a batch do not change a row."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DataCollatorWithFlattening

from lucid_attention import ATTENTIONS
from lucid_attention.models.decoder.modeling import LucidForCausalLM
from lucid_attention.models.masks import document_borders

from .cases import decoder, padded, prompts

CASES: dict[str, str | list[str]] = {name: name for name in ATTENTIONS} | {"hybrid": ["gla", "lucid"]}
every_case = pytest.mark.parametrize("case", CASES)


@pytest.fixture(scope="module")
def models() -> dict[str, LucidForCausalLM]:
    return {case: decoder(attention).double() for case, attention in CASES.items()}


def logits(model: LucidForCausalLM, **inputs: Any) -> Tensor:
    with torch.no_grad():
        return model(**inputs, use_cache=False).logits


def separately(model: LucidForCausalLM, rows: list[Tensor]) -> Tensor:
    """[all tokens, vocabulary]"""
    return torch.cat([logits(model, input_ids=row[None])[0] for row in rows])


@every_case
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_row_equals_its_own_run(case: str, side: str, models: dict[str, LucidForCausalLM]) -> None:
    rows = prompts(11, 1, 7)
    inputs = padded(rows, side)
    found = logits(models[case], **inputs)[inputs["attention_mask"].bool()]
    torch.testing.assert_close(found, separately(models[case], rows))


def test_padding_may_stand_between_tokens(models: dict[str, LucidForCausalLM]) -> None:
    row = prompts(9)[0]
    mask = torch.tensor([[0, 1, 1, 0, 0, 1, 1, 1, 0]])
    found = logits(models["lucid"], input_ids=row[None], attention_mask=mask)[mask.bool()]
    torch.testing.assert_close(found, separately(models["lucid"], [row[mask[0].bool()]]))


def pack(rows: list[list[Tensor]]) -> dict[str, Tensor]:
    positions = [torch.cat([torch.arange(len(text)) for text in row]) for row in rows]
    return {"input_ids": torch.stack([torch.cat(row) for row in rows]), "position_ids": torch.stack(positions)}


@every_case
@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "mask of ones"])
def test_packed_documents_equal_their_own_runs(case: str, masked: bool, models: dict[str, LucidForCausalLM]) -> None:
    texts = prompts(5, 1, 6, 8, 4)
    inputs = pack([texts[:3], texts[3:]])
    if masked:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    found = logits(models[case], **inputs).flatten(0, 1)
    torch.testing.assert_close(found, separately(models[case], texts))
    # Without the borders the logits are others.
    together = logits(models[case], input_ids=inputs["input_ids"]).flatten(0, 1)
    assert (together - found).abs().max() > 1e-2


def test_under_padding_positions_that_go_back_are_no_documents(models: dict[str, LucidForCausalLM]) -> None:
    """generate() without a cache gives such positions behind padding on the right."""
    text, model = prompts(9)[0][None], models["lucid"]
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 1, 1]])
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 0, 1, 2]])
    found = logits(model, input_ids=text, attention_mask=mask, position_ids=positions)[0, -1]
    kept = mask[0].bool()
    # The same tokens and positions behind padding on the left.
    left = {"input_ids": text[:, kept], "attention_mask": mask[:, kept], "position_ids": positions[:, kept]}
    alone = logits(model, **{name: torch.nn.functional.pad(x, (1, 0)) for name, x in left.items()})
    torch.testing.assert_close(found, alone[0, -1])
    documents = logits(model, input_ids=text[:, kept], position_ids=positions[:, kept])
    assert (documents[0, -1] - found).abs().max() > 1e-3


def test_without_documents_the_cache_is_made_and_with_them_it_is_not(models: dict[str, LucidForCausalLM]) -> None:
    text = prompts(6)[0][None]
    assert models["lucid"](text, position_ids=torch.arange(6)[None]).past_key_values.get_seq_length() == 6
    assert models["lucid"](text, position_ids=torch.arange(6)[None] % 4).past_key_values is None


@pytest.mark.parametrize(
    ("positions", "borders"),
    {
        "one document": ([[0, 1, 2, 3]], None),
        "a document may skip positions": ([[0, 1, 7, 9]], None),
        "documents of one token": ([[0, 0, 0, 1]], [0, 1, 2, 4]),
        "every row begins anew": ([[0, 1, 0, 1], [0, 1, 2, 3]], [0, 2, 4, 8]),
        "the first may have begun earlier": ([[5, 6, 0, 1]], [0, 2, 4]),
    }.values(),
)
def test_a_document_begins_where_positions_do_not_go_up(positions: list[list[int]], borders: list[int] | None) -> None:
    found = document_borders(torch.tensor(positions))
    assert (None if found is None else found.tolist()) == borders


FLATTENED: dict[str, list[str]] = {
    "all": ["position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"],
    "borders alone": ["cu_seq_lens_q"],
}


@pytest.mark.parametrize("names", FLATTENED.values(), ids=FLATTENED)
@pytest.mark.parametrize("case", ["lucid", "gla"])
def test_flattening_collators_say_where_documents_begin(
    case: str, names: list[str], models: dict[str, LucidForCausalLM]
) -> None:
    texts = prompts(5, 1, 6)
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    collated = collate([{"input_ids": text.tolist()} for text in texts])
    assert set(FLATTENED["all"]) < set(collated)
    found = logits(models[case], input_ids=collated["input_ids"], **{name: collated[name] for name in names})
    torch.testing.assert_close(found[0], separately(models[case], texts))


def test_positions_reach_the_rotary_embedding(models: dict[str, LucidForCausalLM]) -> None:
    text = prompts(6)[0][None]
    as_counted = logits(models["lucid"], input_ids=text)
    # Rotations are relative: the same distances give the same logits, other distances do not.
    torch.testing.assert_close(
        logits(models["lucid"], input_ids=text, position_ids=torch.arange(6)[None] + 5), as_counted
    )
    assert not torch.allclose(
        logits(models["lucid"], input_ids=text, position_ids=torch.arange(6)[None] * 3), as_counted
    )


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a dense mask": ({"attention_mask": torch.ones(1, 1, 6, 6).tril()}, r"0 at padding, got \[1, 1, 6, 6\]"),
    "a short mask": ({"attention_mask": torch.ones(1, 5)}, r"got \[1, 5\]"),
    "masks by kind of layer": ({"attention_mask": {"full_attention": None}}, "got dict"),
    "positions of another length": ({"position_ids": torch.arange(5)[None]}, "position_ids must be"),
    "attention weights": ({"output_attentions": True}, "no attention weights are computed"),
    "borders of another length": ({"cu_seq_lens_q": torch.tensor([0, 3, 5])}, "cu_seqlens"),
    "indices alone": ({"seq_idx": torch.zeros(1, 6)}, "seq_idx needs position_ids or cu_seq_lens_q"),
    "no tokens": ({"input_ids": None}, "input_ids or inputs_embeds"),
}


@pytest.mark.parametrize(("inputs", "complaint"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_understood_is_refused(
    inputs: dict[str, Any], complaint: str, models: dict[str, LucidForCausalLM]
) -> None:
    with pytest.raises(ValueError, match=complaint):
        logits(models["lucid"], **({"input_ids": prompts(6)[0][None]} | inputs))


@pytest.mark.parametrize("with_mask", [False, True], ids=["no mask", "mask"])
@pytest.mark.shows("compiled training", model="decoder")
@pytest.mark.slow
def test_the_training_path_compiles_to_one_graph(with_mask: bool, models: dict[str, LucidForCausalLM]) -> None:
    model, inputs = models["lucid"], padded(prompts(9, 6), "right")
    if not with_mask:
        inputs.pop("attention_mask")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found, expected = (run(**inputs, labels=inputs["input_ids"], use_cache=False).loss for run in (compiled, model))
    torch.testing.assert_close(found, expected)
    weights = [model.model.embed_tokens.weight, model.model.layers[0].self_attn.k_proj.weight]
    for one, other in zip(*(torch.autograd.grad(loss, weights) for loss in (found, expected)), strict=True):
        torch.testing.assert_close(one, other)
