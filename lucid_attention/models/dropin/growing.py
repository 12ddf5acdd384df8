"""A tensor that grows along its third dimension without being copied for every token."""

import torch
from torch import Tensor


class GrowingTensor:
    """Appends to [B, H, S, *] in place, in a buffer with room behind the rows in use.

    Only the newest view is extended in place. Whoever holds another one (a cropped, reordered or shallowly copied
    cache) gets a new buffer, so that nobody's rows are ever overwritten.
    """

    def __init__(self) -> None:
        self.buffer: Tensor | None = None
        self.newest: Tensor | None = None

    def extend(self, x: Tensor | None, rows: int, like: Tensor) -> Tensor:
        """x: [B, H, S, *] or None, with `rows` further rows behind it that are still to be written."""
        S = 0 if x is None else x.shape[2]
        if not self._has_room(x, S + rows):
            # A quarter of room: a copy every S/4 tokens, at most a quarter of memory unused.
            capacity = S + rows + max(64, (S + rows) // 4)
            self.buffer = like.new_empty(*like.shape[:2], capacity, *like.shape[3:])
            if x is not None:
                self.buffer[:, :, :S] = x
        assert self.buffer is not None
        self.newest = self.buffer[:, :, : S + rows]
        return self.newest

    def append(self, x: Tensor | None, new: Tensor) -> Tensor:
        """x: [B, H, S, *] or None, new: [B, H, T, *] -> [B, H, S + T, *]."""
        if torch.is_grad_enabled():
            # Views of the buffer may be kept for a backward pass, even where x and new need no gradients themselves.
            return new if x is None else torch.cat([x, new], 2)
        extended = self.extend(x, new.shape[2], new)
        extended[:, :, extended.shape[2] - new.shape[2] :] = new
        return extended

    def _has_room(self, x: Tensor | None, rows: int) -> bool:
        return (
            x is not None
            and x is self.newest
            and self.buffer is not None
            and rows <= self.buffer.shape[2]
            # A tensor made in inference mode cannot be written outside of it.
            and (torch.is_inference_mode_enabled() or not self.buffer.is_inference())
        )
