"""Trees and shared prefixes: tokens that see some of the tokens before them. Every path is the text of that path."""

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from tests.models.architectures.cases import (
    assert_same_gradients,
    gradients,
    left_padded,
    lucid_model,
    relative_error,
    softmax_model,
    tokens,
)

# The parent of every token, -1 for the root: a stem, then branches of branches, written in no order of depth.
PARENTS = [-1, 0, 1, 1, 2, 3, 2, 4, 0, 8, 5, 9, 7, 3]
LENGTH = len(PARENTS)


def path_to(node: int) -> list[int]:
    return [] if node < 0 else [*path_to(PARENTS[node]), node]


PATHS = [path_to(node) for node in range(LENGTH)]
LEAVES = [node for node in range(LENGTH) if node not in PARENTS]
DEPTH = torch.tensor([len(path) - 1 for path in PATHS])


def tree_mask() -> Tensor:
    """[1, 1, T, T]: every token sees its ancestors and itself."""
    mask = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    for node, path in enumerate(PATHS):
        mask[node, path] = True
    return mask[None, None]


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("form", ["bool", "additive"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_neox"])
@torch.no_grad()
@pytest.mark.shows("tree masks", model="drop-in")
def test_each_path_of_a_tree_is_the_path_run_alone(name, form, use_cache):
    model, ids, mask = lucid_model(name).double(), tokens(2, LENGTH), tree_mask()
    if form == "additive":
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill_(~mask, float("-inf"))
    options = {"attention_mask": mask, "position_ids": DEPTH[None], "use_cache": use_cache}
    found = model(ids, **options).logits
    for leaf in LEAVES:
        assert relative_error(found[:, PATHS[leaf]], model(ids[:, PATHS[leaf]]).logits) < 1e-12
    # What P would be with all tokens before, and softmax attention, are something else.
    assert relative_error(softmax_model(name).double()(ids, **options).logits, found) > 0.01


@torch.no_grad()
def test_strength_and_sharpness_hold_in_a_tree():
    model, ids = lucid_model("llama", strength=0.6, sharpness=2.0, layers=[1]).double(), tokens(1, LENGTH)
    found = model(ids, attention_mask=tree_mask(), position_ids=DEPTH[None]).logits
    for leaf in LEAVES:
        assert relative_error(found[:, PATHS[leaf]], model(ids[:, PATHS[leaf]]).logits) < 1e-12


def behind(past: Tensor, mask: Tensor) -> Tensor:
    """A tree whose tokens all see the past: [B, S] and [1, 1, T, T] -> [B, 1, T, S + T]."""
    B, T = past.shape[0], mask.shape[2]
    return torch.cat([past.bool()[:, None, None].expand(B, 1, T, -1), mask.expand(B, 1, T, T)], -1)


@torch.no_grad()
def test_a_tree_behind_a_padded_past_and_the_token_after_its_best_path():
    model = lucid_model("llama").double()
    prompt, keep = left_padded(tokens(2, 6), [4, 6])
    tree, after = tokens(2, LENGTH, seed=5), tokens(2, 1, seed=6)
    cache = DynamicCache(config=model.config)
    lengths = keep.sum(1, keepdim=True)
    model(prompt, attention_mask=keep, position_ids=(keep.cumsum(1) - 1).clamp(min=0), past_key_values=cache)
    mask = behind(keep, tree_mask())
    found = model(tree, attention_mask=mask, position_ids=lengths + DEPTH, past_key_values=cache).logits
    for leaf in LEAVES:
        path = PATHS[leaf]
        for row in range(2):
            alone = torch.cat([prompt[row, keep[row].bool()], tree[row, path]])[None]
            assert relative_error(found[row, path], model(alone).logits[0, -len(path) :]) < 1e-12
    # The next token sees the path that was accepted; the other branches stay in the cache, unseen.
    best = PATHS[LEAVES[-2]]
    seen = torch.cat([keep.bool(), torch.zeros(2, LENGTH + 1, dtype=torch.bool)], 1)
    seen[:, [6 + node for node in best] + [6 + LENGTH]] = True
    options = {"attention_mask": seen[:, None, None], "position_ids": lengths + len(best), "past_key_values": cache}
    found = model(after, **options).logits
    for row in range(2):
        alone = torch.cat([prompt[row, keep[row].bool()], tree[row, best], after[row]])[None]
        assert relative_error(found[row, 0], model(alone).logits[0, -1]) < 1e-12


@torch.no_grad()
@pytest.mark.shows("shared-prefix masks", model="drop-in")
def test_continuations_share_a_prefix():
    model, ids = lucid_model("llama").double(), tokens(1, 12)
    document = torch.tensor([0] * 5 + [1] * 4 + [2] * 3)
    mask = torch.ones(12, 12, dtype=torch.bool).tril() & ((document == document[:, None]) | (document == 0))
    positions = torch.tensor([*range(5), *range(5, 9), *range(5, 8)])[None]
    found = model(ids, attention_mask=mask[None, None], position_ids=positions).logits
    for which in (1, 2):
        kept = (document == 0) | (document == which)
        assert relative_error(found[:, kept], model(ids[:, kept]).logits) < 1e-12
    cache = DynamicCache(config=model.config)
    model(ids[:, :5], past_key_values=cache)
    options = {"attention_mask": mask[None, None, 5:], "position_ids": positions[:, 5:], "past_key_values": cache}
    assert relative_error(model(ids[:, 5:], **options).logits, found[:, 5:]) < 1e-12


def test_gradients_of_a_path_are_those_of_the_path_run_alone():
    model, ids, path = lucid_model("llama").double(), tokens(1, LENGTH), PATHS[LEAVES[0]]
    weights = torch.zeros(1, LENGTH).index_fill_(1, torch.tensor(path), 1.0)
    tree = {"input_ids": ids, "attention_mask": tree_mask(), "position_ids": DEPTH[None], "use_cache": False}
    _, found = gradients(model, weights, tree)
    _, expected = gradients(model, torch.ones(1, len(path)), {"input_ids": ids[:, path], "use_cache": False})
    assert_same_gradients(found, expected, 1e-10)


@torch.no_grad()
def test_padding_behind_a_tree_may_hold_anything():
    model, ids = lucid_model("llama").double(), tokens(1, LENGTH + 2)
    mask = torch.nn.functional.pad(tree_mask(), (0, 2, 0, 2))
    positions = torch.nn.functional.pad(DEPTH, (0, 2))[None]
    found = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    expected = model(ids[:, :LENGTH], attention_mask=tree_mask(), position_ids=DEPTH[None]).logits
    assert found.isfinite().all()
    assert relative_error(found[:, :LENGTH], expected) < 1e-12


def blind():
    mask = tree_mask().clone()
    mask[0, 0, 5, 5] = False
    return mask


def open_relation():
    mask = tree_mask().clone()
    # 7 sees 4, which sees 2, which 7 no longer sees.
    mask[0, 0, 7, 2] = False
    return mask


@pytest.mark.parametrize(
    ("mask", "reason"), [(blind, "does not see itself"), (open_relation, "expected that who sees")]
)
def test_other_relations_are_refused_in_words(mask, reason):
    with pytest.raises(ValueError, match=reason):
        lucid_model("llama")(tokens(1, LENGTH), attention_mask=mask(), position_ids=DEPTH[None])


@torch.no_grad()
def test_a_tree_whose_branches_hang_at_different_places_of_the_cache_is_refused():
    model, ids = lucid_model("llama"), tokens(1, 7)
    cache = DynamicCache(config=model.config)
    model(ids[:, :5], past_key_values=cache)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0, 1]]).bool()[None, None]
    with pytest.raises(ValueError, match="give the whole tree in one pass"):
        model(ids[:, 5:], attention_mask=mask, position_ids=torch.tensor([[5, 3]]), past_key_values=cache)
