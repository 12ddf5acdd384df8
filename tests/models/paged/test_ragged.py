"""The attention of many requests in one pass, against the dense equation for each request alone, in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lucid_attention import lucid_attention, precondition
from lucid_attention.models.dropin.attention import Readout
from lucid_attention.models.paged.attention import PagedLucid, _window
from lucid_attention.models.paged.engine import PagedLayer, read_requests
from lucid_attention.models.paged.ragged import attend_ragged
from lucid_attention.models.paged.requests import Plan, Request, Rows

H, G, D = 2, 2, 4
# New tokens and past of each request: prompts, parts of prompts, single tokens after pasts of different lengths.
STEPS = [(5, 0), (1, 7), (4, 9), (1, 0), (1, 60), (1, 8), (1, 3)]


def rows_of(cu: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(cu).cumsum(0).tolist()])


def sequences(dtype: torch.dtype) -> list[tuple[Tensor, Tensor, Tensor]]:
    """q, k, v of every request with its past. The keys of a request share a direction."""
    made = []
    for new, past in STEPS:
        q, k, v = (torch.randn(1, heads, past + new, D, dtype=dtype) for heads in (H * G, H, H))
        made.append((q, k + 2 * torch.randn(1, H, 1, D, dtype=dtype), v))
    return made


def paged(
    whole: list[tuple[Tensor, Tensor, Tensor]], options: dict[str, Any]
) -> tuple[PagedLayer, list[Tensor], list[Tensor]]:
    """A cache with the pasts in a random order of rows, and NaN in all others; q, k, v of the new tokens.

    And the rows of every request.
    """
    totals = [past + new for new, past in STEPS]
    places = torch.randperm(3 * sum(totals))[: sum(totals)]
    keys, values = (torch.full((3 * sum(totals), H, D), torch.nan, dtype=whole[0][0].dtype) for _ in range(2))
    write: list[int] = []
    for (_, past), (_, k, v), rows in zip(STEPS, whole, places.split(totals), strict=True):
        if past:
            keys[rows[:past]] = k[0, :, :past].transpose(0, 1)
            values[rows[:past]] = precondition(k[:, :, :past], v[:, :, :past], **options)[0].transpose(0, 1)
        write += rows[past:].tolist()
    requests = read_requests(rows_of([new for new, _ in STEPS]), rows_of(totals))
    new = [torch.cat([x[i][:, :, -new:] for x, (new, _) in zip(whole, STEPS, strict=True)], 2) for i in range(3)]
    layer = PagedLayer(keys, values, torch.tensor(write), Plan(requests, places.device, places))
    return layer, new, list(places.split(totals))


def readout(**others: Any) -> Readout:
    return Readout(torch.nn.Module(), None, 0.0, others)


@pytest.mark.parametrize("strength", [1.0, 0.4, 0.0])
def test_every_request_sees_its_own_past(strength: float) -> None:
    options = {"strength": strength, "sharpness": 3.0}
    whole = sequences(torch.float64)
    layer, (q, k, v), rows = paged(whole, options)
    o = attend_ragged(layer, q, k, v, PagedLucid(readout(), options))
    done = 0
    for (new, _), (q, k, v), own in zip(STEPS, whole, rows, strict=True):
        expected = lucid_attention(q, k, v, impl="reference", **options)[:, :, -new:]
        torch.testing.assert_close(o[:, :, done : done + new], expected)
        torch.testing.assert_close(Rows(own[None]).gather(layer.keys), k)
        stored = Rows(own[None]).gather(layer.values)
        torch.testing.assert_close(stored, precondition(k, v, impl="reference", **options))
        done += new
    assert int(layer.values[:, 0, 0].isnan().sum()) == layer.values.shape[0] - sum(map(len, rows))


def test_all_tokens_of_a_pass_belong_to_a_request() -> None:
    options = {"strength": 1.0, "sharpness": None}
    layer, (q, k, v), _ = paged(sequences(torch.float64), options)
    with pytest.raises(ValueError, match="new tokens of all requests must be the 15 of the pass, without padding"):
        attend_ragged(layer, *(torch.cat([x, x[:, :, :1]], 2) for x in (q, k, v)), PagedLucid(readout(), options))


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that is made."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self.size = max(self.size, leaf.numel())
        return made


def test_no_tensor_has_the_size_of_all_new_tokens_times_all_keys() -> None:
    """40 single tokens and a part of a prompt, after pasts of 200 to 239 tokens: work and memory are those of each."""
    totals, news = [*range(200, 240), 264], [1] * 40 + [64]
    requests, read = read_requests(rows_of(news), rows_of(totals)), torch.arange(sum(totals))
    write = torch.cat([read[one.end - one.new : one.end] for one in requests])
    keys, values = (torch.randn(sum(totals), H, D) for _ in range(2))
    layer = PagedLayer(keys, values, write, Plan(requests, read.device, read))
    q, k, v = (torch.randn(1, heads, sum(news), D) for heads in (H * G, H, H))
    with torch.no_grad(), LargestTensor() as largest:
        attend_ragged(layer, q, k, v, PagedLucid(readout(), {"strength": 1.0, "sharpness": None}))
    whole = sum(news) * sum(totals)
    gathered = 40 * 240 * H * D
    assert largest.size <= gathered < whole / 8


def test_tokens_with_pasts_of_similar_lengths_are_read_together() -> None:
    requests = read_requests(rows_of([1] * 6 + [3]), rows_of([11, 40, 43, 900, 1000, 1400, 30]))
    plan = Plan(requests, torch.device("cpu"))
    assert [one.request.new for one in plan.alone] == [3]
    assert [group.rows.rows.shape for group in plan.groups] == [(3, 43), (2, 1000), (1, 1400)]
    group = plan.groups[1]
    assert group.tokens.tolist() == [3, 4]
    assert group.mask is not None
    assert group.mask.sum(1).tolist() == [900, 1000]
    assert group.rows.rows[:, -1].tolist() == [requests[3].end - 1, requests[4].end - 1]
    assert int(group.rows.rows[0].min()) == requests[3].first
    assert plan.groups[2].mask is None


@pytest.mark.parametrize(("past", "new"), [(0, 700), (4, 600), (2, 3)])
def test_parts_of_a_window_are_the_window(past: int, new: int) -> None:
    request, W = Request(10, 10 + new, 100, 100 + past + new), 5
    seen = torch.zeros(new, past + new, dtype=torch.bool)
    for start in range(0, new, 512):
        tokens, keys, mask = _window(request, start, W, torch.device("cpu"))
        seen[tokens.start - 10 : tokens.stop - 10, keys.start - 100 : keys.stop - 100] = mask[0, 0]
        assert mask.shape[-1] <= mask.shape[-2] + W - 1
    distance = torch.arange(past, past + new)[:, None] - torch.arange(past + new)
    assert torch.equal(seen, (distance >= 0) & (distance < W))
