"""LUCID over the paged cache of an engine: whatever the steps, every request reads what it reads alone."""

import torch
from torch import Tensor

from lucid_attention.vllm.paged import Batch, attend
from tests.ops import oracles

H, G, D, BLOCK = 2, 3, 8, 4
OPTIONS = {"strength": 0.8, "sharpness": 2.0}
SCALE = 0.7


class Requests:
    """Requests with similar keys in one cache, whose blocks lie in no order."""

    def __init__(self, lengths: list[int]) -> None:
        self.q = [torch.randn(n, H * G, D, dtype=torch.float64) for n in lengths]
        self.k = [torch.randn(n, H, D, dtype=torch.float64) + 1 for n in lengths]
        self.v = [torch.randn(n, H, D, dtype=torch.float64) for n in lengths]
        self.o = [torch.full_like(q, torch.nan) for q in self.q]
        self.done = [0] * len(lengths)
        width = -(-max(lengths) // BLOCK)
        blocks = torch.randperm(len(lengths) * width)
        self.blocks = blocks.view(len(lengths), width)
        self.cache = torch.full((len(blocks), H, BLOCK, 2 * D), torch.nan, dtype=torch.float64)

    def step(self, **new: int) -> None:
        """Read new["r0"] tokens of request 0, and so on, in one batch."""
        parts = [(int(name[1:]), count) for name, count in new.items()]
        pieces = [(r, slice(self.done[r], self.done[r] + count)) for r, count in parts]
        starts = [0]
        for _, count in parts:
            starts.append(starts[-1] + count)
        slots = [
            self.blocks[r, place // BLOCK] * BLOCK + place % BLOCK
            for r, span in pieces
            for place in range(span.start, span.stop)
        ]
        rows = [r for r, _ in parts]
        batch = Batch(starts, [span.stop for _, span in pieces], self.blocks[rows], torch.stack(slots))
        q, k, v = (torch.cat([x[r][span] for r, span in pieces]) for x in (self.q, self.k, self.v))
        o = torch.full_like(q, torch.nan)
        attend(q, k, v, self.cache, batch, o, scale=SCALE, **OPTIONS)
        for (r, span), start, end in zip(pieces, starts, starts[1:], strict=False):
            self.o[r][span] = o[start:end]
            self.done[r] = span.stop

    def alone(self, r: int) -> Tensor:
        """The oracle: request r by itself, at once."""
        q, k, v = (x[r].transpose(0, 1)[None] for x in (self.q, self.k, self.v))
        return oracles.lucid_attention(q, k, v, scale=SCALE, **OPTIONS)[0].transpose(0, 1)


def test_requests_read_what_they_read_alone() -> None:
    requests = Requests([11, 2, 14, 1, 24])
    requests.step(r0=7, r1=1, r4=20)
    # Single tokens of several lengths beside a first token, a whole prompt and a chunk with a past.
    requests.step(r2=12, r0=1, r1=1, r3=1, r4=1)
    # Lengths 9, 13 and 22: the first two are one step, in which the shorter one is padded.
    requests.step(r0=1, r2=1, r4=1)
    requests.step(r2=1)
    requests.step(r4=2, r0=2)
    for r in range(5):
        torch.testing.assert_close(requests.o[r], requests.alone(r), rtol=1e-9, atol=1e-9)


def test_a_request_reads_the_blocks_of_another_with_the_same_beginning() -> None:
    requests = Requests([10, 12])
    shared = 2 * BLOCK
    for x in (requests.q, requests.k, requests.v):
        x[1][:shared] = x[0][:shared]
    requests.step(r0=10)
    requests.blocks[1, :2] = requests.blocks[0, :2]
    requests.done[1] = shared
    requests.step(r1=3)
    requests.step(r1=1)
    torch.testing.assert_close(requests.o[1][shared:], requests.alone(1)[shared:], rtol=1e-9, atol=1e-9)


def test_tokens_that_were_taken_back_leave_no_trace() -> None:
    requests = Requests([12])
    kept = requests.k[0][6:9].clone()
    requests.step(r0=6)
    requests.k[0][6:9] += 1
    requests.step(r0=3)
    requests.k[0][6:9], requests.done[0] = kept, 6
    requests.step(r0=1)
    requests.step(r0=5)
    torch.testing.assert_close(requests.o[0], requests.alone(0), rtol=1e-9, atol=1e-9)
