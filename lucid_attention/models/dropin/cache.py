"""Cache layers that keep y = P⁻¹v where others keep v.

By the time an attention function runs, `Cache.update` has happened, and `update` sees no mask, without which padded
batches cannot be preconditioned. So it is done in two steps: `update` appends the keys and hands a `Pending` on with
the tensor it returns; the attention function, which sees the mask, computes y and calls `Pending.commit`.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, StaticLayer

from ...ops.lucid.decode import inverse_key_norms
from .growing import GrowingTensor
from .settings import uses_lucid

# Stands in Transformers' tables of cache layers, and in its error message where a cache cannot hold them.
LAYER_TYPE = "lucid_attention: its values are preconditioned, which this cache cannot keep"
HANDLE = "lucid_pending"


class Pending:
    """What an attention function needs of the cache: keys and y of the past, and where y of the new tokens goes.

    k: [B, H, S + T, D], all keys; v: [B, H, T, E], the new values; y_past: [B, H, S, E]; scalars: [B, H, S + T],
    `inverse_key_norms` of k. Of a static cache k, y_past and scalars are whole buffers [B, H, M, *] with the new keys at
    `position`: [] int64, and y_past is zero there. Of a growing one, room: [B, H, S + T, E] holds y_past, and y comes
    behind it.
    """

    def __init__(
        self,
        layer: "LucidDynamicLayer | LucidStaticLayer",
        k: Tensor,
        v: Tensor,
        y_past: Tensor | None,
        scalars: Tensor,
        position: Tensor | None = None,
        room: Tensor | None = None,
    ) -> None:
        self.layer, self.k, self.v, self.y_past, self.scalars = layer, k, v, y_past, scalars
        self.position, self.room = position, room

    def check(self, options: dict[str, Any]) -> None:
        """Refuse a strength and sharpness that are not those of the tokens before."""
        self.layer.check_options(options)

    def commit(self, y: Tensor) -> Tensor:
        """Store y: [B, H, T, E] of the new tokens, and return that of all: [B, H, S + T, E] or [B, H, M, E]."""
        return self.layer.commit(self, y)


def pending_of(values: Tensor) -> Pending | None:
    """The `Pending` that came with what `update` returned, if it was a layer of ours."""
    return getattr(values, HANDLE, None)


class _Owner:
    """The configuration that a cache was made for. A copy of the cache has the same one."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def __deepcopy__(self, memo: Any) -> "_Owner":
        return self


class _TwoSteps:
    """The order of `update` and `commit`."""

    owner: _Owner
    waiting: bool
    options: dict[str, Any] | None

    def check_options(self, options: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return  # a graph is made for one setting, and remembering it here would make another
        if self.options is not None and self.options != options:
            raise ValueError(
                f"This cache was begun with {self.options} and cannot go on with {options}: LUCID's settings, or its "
                "choice of layers, changed in between. Make a new cache"
            )
        self.options = options

    def begin(self) -> None:
        if self.owner.config is not None and not uses_lucid(self.owner.config):
            raise ValueError(
                "This cache keeps the preconditioned values of LUCID: expected attn_implementation='lucid', with which "
                f"it was made, got {self.owner.config._attn_implementation!r}. Make a new cache after a change of it"
            )
        if self.waiting:
            raise RuntimeError(
                "This cache holds tokens that LUCID attention never preconditioned: expected every update to be "
                "followed by attn_implementation='lucid', got another update. Was an earlier forward pass interrupted? "
                "Then start with a new cache. Or does this architecture change cached values before it attends (as "
                "DeepSeek's latent attention does)? Then it cannot use LUCID with a cache."
            )
        self.waiting = True

    def hand_on(self, values: Tensor, pending: Pending) -> Tensor:
        # A new view each time: an attribute of a tensor that the layer keeps would be a reference in a circle.
        handed = values[:]
        setattr(handed, HANDLE, pending)
        return handed

    def offload(self) -> None:
        raise ValueError(
            "LUCID's cache cannot be offloaded: its values are written after `update`, when Transformers has already "
            "moved the layer away. Use cache_implementation=None ('dynamic') or 'static'"
        )


class LucidDynamicLayer(_TwoSteps, DynamicLayer):
    """Grows with the sequence. Keys, y and key lengths grow in place; see `GrowingTensor`."""

    _layer_type = LAYER_TYPE

    def __init__(self, config: Any = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.owner, self.waiting, self.options = _Owner(config), False, None
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.scalars: Tensor | None = None
        self._growing = {name: GrowingTensor() for name in ("keys", "values", "scalars")}

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = self.values = self.scalars = None
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.begin()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        y_past = self.values
        keys = self._growing["keys"].append(self.keys, key_states)
        with torch.no_grad():
            self.scalars = self._growing["scalars"].append(self.scalars, inverse_key_norms(key_states))
        self.keys = keys
        # As long as the keys, whoever may read it.
        room = self._growing["values"].append(y_past, value_states)
        return keys, self.hand_on(room, Pending(self, keys, value_states, y_past, self.scalars, room=room))

    def commit(self, pending: Pending, y: Tensor) -> Tensor:
        self.waiting = False
        room = pending.room
        if torch.is_grad_enabled() or room is None:
            self.values = y if pending.y_past is None else torch.cat([pending.y_past, y], 2)
        else:
            room[:, :, room.shape[2] - y.shape[2] :] = y
            self.values = room
        return self.values

    def get_seq_length(self) -> int:
        return 0 if self.keys is None else self.keys.shape[2]

    def reset(self) -> None:
        self.__init__(self.owner.config)  # type: ignore[misc]

    def crop(self, tokens_to_remove: int) -> None:
        if self.keys is None:
            return
        super().crop(tokens_to_remove)
        if tokens_to_remove and self.scalars is not None:
            self.scalars = self.scalars[:, :, : -abs(tokens_to_remove)]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        if self.scalars is not None:
            self.scalars = self.scalars.index_select(0, beam_idx.to(self.scalars.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self.scalars is not None:
            self.scalars = self.scalars.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        if self.scalars is not None:
            self.scalars = self.scalars[indices, ...]


class LucidStaticLayer(_TwoSteps, StaticLayer):
    """Preallocated, for torch.compile: nothing here changes its shape or address."""

    _layer_type = LAYER_TYPE
    scalars: Tensor

    def __init__(self, max_cache_len: int, config: Any = None, **kwargs: Any) -> None:
        super().__init__(max_cache_len, **kwargs)
        self.owner, self.waiting, self.options = _Owner(config), False, None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        wide = torch.promote_types(self.dtype, torch.float32)
        self.scalars = torch.zeros(self.keys.shape[:3], dtype=wide, device=self.device)
        if not torch.compiler.is_compiling():
            torch._dynamo.mark_static_address(self.scalars)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.begin()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        position = self.cumulative_length.clone()
        # Zeros where y is to come: the decoding step reads the whole buffer while its own y is not known yet.
        super().update(key_states, torch.zeros_like(value_states))
        self._write(self.scalars, position, inverse_key_norms(key_states))
        pending = Pending(self, self.keys, value_states, self.values, self.scalars, position)
        return self.keys, self.hand_on(self.values, pending)

    def commit(self, pending: Pending, y: Tensor) -> Tensor:
        self.waiting = False
        assert pending.position is not None
        y = y.to(self.values.dtype)
        self._write(self.values, pending.position, y)
        if torch.is_grad_enabled() and y.requires_grad:
            # What is kept has no gradients; what is read now does.
            return self.values.index_copy(2, self._where(pending.position, y), y)
        return self.values

    def _write(self, buffer: Tensor, position: Tensor, new: Tensor) -> None:
        buffer.index_copy_(2, self._where(position, new), new.detach())

    def _where(self, position: Tensor, new: Tensor) -> Tensor:
        return torch.arange(new.shape[2], device=new.device) + position

    def reset(self) -> None:
        super().reset()
        self.waiting, self.options = False, None
        if self.is_initialized:
            self.scalars.zero_()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        if self.get_seq_length() > 0:
            self.scalars = self.scalars.index_select(0, beam_idx.to(self.scalars.device))
