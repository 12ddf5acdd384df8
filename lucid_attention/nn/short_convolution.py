"""The short convolution before the recurrence of linear attention, and on the w of PaTH."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.checks import check_float, check_shape, check_size, check_tensor
from ..ops.packing import document_numbers


class ShortConvolution(nn.Module):
    """Causal depthwise convolution over tokens: y_t = silu(Σ_j w_j x_{t − j}), j < size.

    Masked tokens are skipped: the tokens around them are neighbours. Packed documents do not see each other.

    Args:
        channels: C.
        size: tokens that the convolution sees, the current one included.
        activation: whether silu follows.
    """

    def __init__(self, channels: int, size: int = 4, activation: bool = True) -> None:
        super().__init__()
        check_size("channels", channels)
        check_size("size", size)
        self.channels, self.size, self.activation = channels, size, activation
        # Initialised as torch.nn.Conv1d; the last column is the weight of the current token.
        self.weight = nn.Parameter(torch.empty(channels, size).uniform_(-1, 1) / math.sqrt(size))

    def forward(
        self, x: Tensor, tail: Tensor | None = None, key_mask: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the output, and the `tail` for the next call.

        Args:
            x: [B, T, C].
            tail: [B, size − 1, C], returned by the call for the tokens before.
            key_mask: [B, T] bool, False at padding.
            cu_seqlens: int [n + 1], borders of packed documents.

        Returns:
            [B, T, C], zero at padding, and the tail: the last size − 1 tokens (of the last document) without padding.
        """
        B, T, _ = x.shape
        padding = None if key_mask is None else ~key_mask[..., None]
        tokens = torch.arange(T, device=x.device)
        document = None if cu_seqlens is None else document_numbers(cu_seqlens, tokens).expand(B, T)
        ends = None if document is None else document[:, -1:]
        before, order = self._tail(x, tail), None
        if padding is not None:
            # Move real tokens to the front, so that neighbours among them are neighbours in memory; undone below.
            order = padding[..., 0].to(torch.uint8).argsort(dim=1, stable=True)
            x = _take(x.masked_fill(padding, 0), order)
            document = None if document is None else document.gather(1, order)
        padded = torch.cat([before, x], 1)
        y = self._convolve(padded, T, document)
        if order is not None and padding is not None:
            y = _take(y, order.argsort(dim=1)).masked_fill(padding, 0)
        return y, self._last(padded, key_mask, document, ends)

    def _tail(self, x: Tensor, tail: Tensor | None) -> Tensor:
        expected = (x.shape[0], self.size - 1, self.channels)
        if tail is None:
            return x.new_zeros(expected)
        check_tensor("tail", tail)
        check_float("tail", tail)
        check_shape("tail", tail, expected, "[B, size − 1, C]")
        return tail.to(x.dtype)

    def _convolve(self, padded: Tensor, T: int, document: Tensor | None) -> Tensor:
        """padded: [B, size − 1 + T, C] -> [B, T, C]."""
        weight, past_size = self.weight.to(padded.dtype), self.size - 1
        y = padded[:, past_size:] * weight[:, past_size]
        for lag in range(1, self.size):
            earlier = padded[:, past_size - lag : past_size - lag + T]
            if document is not None:
                other_document = F.pad(document, (lag, 0), value=-1)[:, :T] != document
                earlier = earlier.masked_fill(other_document[..., None], 0)
            y = y + earlier * weight[:, past_size - lag]
        return F.silu(y) if self.activation else y

    def _last(self, padded: Tensor, key_mask: Tensor | None, document: Tensor | None, ends: Tensor | None) -> Tensor:
        """The last size − 1 tokens without padding, of the last of packed documents: [B, size − 1, C]."""
        B, length, _ = padded.shape
        tail_size = self.size - 1
        first = length - tail_size if key_mask is None else key_mask.sum(1, keepdim=True)
        index = (first + torch.arange(tail_size, device=padded.device)).expand(B, tail_size)
        # Gather, not slice: a view would keep the whole sequence in memory as long as the past lives.
        tail = _take(padded, index)
        if document is not None and ends is not None:
            tail_document = F.pad(document, (tail_size, 0), value=-1).gather(1, index)
            tail = tail.masked_fill((tail_document != ends)[..., None], 0)
        return tail

    def extra_repr(self) -> str:
        return f"{self.channels}, size={self.size}, activation={self.activation}"


def _take(x: Tensor, index: Tensor) -> Tensor:
    """x: [B, T, C], index: [B, N] -> [B, N, C]."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))
