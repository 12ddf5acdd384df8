"""Cache layers that keep y = P⁻¹v where others keep v.

Transformers calls `Cache.update` before the attention function, and without the mask, which padded batches need to be
preconditioned. So new values enter the cache in two steps. `update` appends the keys, and attaches a `PendingValues` to
the tensor that it returns. The attention function, which gets the mask, computes y and calls `PendingValues.commit`.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, StaticLayer

from ...ops.lucid.decode import inverse_key_norms
from .settings import uses_lucid

# Name of our layers in Transformers' tables of cache layers. Transformers prints it where a cache cannot hold them.
LAYER_TYPE = "lucid_attention: its values are preconditioned, which this cache cannot keep"
# Attribute of the tensor that `update` returns.
ATTRIBUTE = "lucid_pending"


class GrowingTensor:
    """Appends to [B, H, S, *] in place, in a buffer that has room behind the rows in use.

    Only the newest view is extended in place. A caller with another view (of a cropped, reordered or shallowly copied
    cache) gets a new buffer, so that rows of other views are never overwritten.
    """

    def __init__(self) -> None:
        self.buffer: Tensor | None = None
        self.newest: Tensor | None = None

    def append(self, x: Tensor | None, new: Tensor) -> Tensor:
        """x: [B, H, S, *] or None; new: [B, H, T, *] -> [B, H, S + T, *]."""
        if torch.is_grad_enabled():
            # A backward pass may need views of the buffer, even if x and new need no gradients themselves.
            return new if x is None else torch.cat([x, new], 2)
        S, T = 0 if x is None else x.shape[2], new.shape[2]
        if not self._has_room(x, S + T):
            # With a quarter of room a copy is made every S/4 tokens, and at most a quarter of the memory is unused.
            capacity = S + T + max(64, (S + T) // 4)
            self.buffer = new.new_empty(*new.shape[:2], capacity, *new.shape[3:])
            if x is not None:
                self.buffer[:, :, :S] = x
        assert self.buffer is not None
        self.buffer[:, :, S : S + T] = new
        self.newest = self.buffer[:, :, : S + T]
        return self.newest

    def _has_room(self, x: Tensor | None, rows: int) -> bool:
        return (
            x is not None
            and x is self.newest
            and self.buffer is not None
            and rows <= self.buffer.shape[2]
            # A tensor made in inference mode cannot be written outside of it.
            and (torch.is_inference_mode_enabled() or not self.buffer.is_inference())
        )


class PendingValues:
    """New values whose y is not computed yet, with the keys and y of the past that the computation needs.

    Of a growing cache:
        k: [B, H, S + T, D], all keys; v: [B, H, T, E], the new values; y_past: [B, H, S, E], None without a past;
        inverse_norms: [B, H, S + T], 1/‖k‖; y_all: [B, H, S + T, E], y_past and the place where y is written.
    Of a static cache:
        k, y_past and inverse_norms are whole buffers [B, H, M, *]; position: [] int64, where the new keys begin. y_past
        is zero from there on. first: whether that is at 0, as far as it is known without waiting for the device.
    """

    def __init__(
        self,
        layer: "LucidDynamicLayer | LucidStaticLayer",
        k: Tensor,
        v: Tensor,
        y_past: Tensor | None,
        inverse_norms: Tensor,
        position: Tensor | None = None,
        y_all: Tensor | None = None,
        first: bool = False,
    ) -> None:
        self.layer, self.k, self.v, self.y_past, self.inverse_norms = layer, k, v, y_past, inverse_norms
        self.position, self.y_all, self.first = position, y_all, first

    def check(self, options: dict[str, Any]) -> None:
        """Refuse a strength or sharpness that differs from that of the tokens before."""
        self.layer.check_options(options)

    def commit(self, y: Tensor) -> Tensor:
        """Store y: [B, H, T, E] of the new tokens, and return that of all: [B, H, S + T, E] or [B, H, M, E]."""
        return self.layer.commit(self, y)


def pending_values(values: Tensor) -> PendingValues | None:
    """The `PendingValues` of the tensor that `update` returned; None if another cache layer returned it."""
    return getattr(values, ATTRIBUTE, None)


class _ConfigReference:
    """The configuration that a cache was made for. Copies of the cache share it."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def __deepcopy__(self, memo: Any) -> "_ConfigReference":
        return self


class _CommittedLayer:
    """Base of both cache layers: every `update` must be followed by a `commit`, with the same options each time."""

    owner: _ConfigReference
    uncommitted: bool
    options: dict[str, Any] | None

    def check_options(self, options: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            # A graph holds for one choice of options; storing them in the layer would make dynamo trace it again.
            return
        if self.options is not None and self.options != options:
            raise ValueError(
                f"This cache was begun with {self.options} and cannot continue with {options}: LUCID's settings, or "
                "its choice of layers, changed in between. Make a new cache"
            )
        self.options = options

    def begin_update(self) -> None:
        if self.owner.config is not None and not uses_lucid(self.owner.config):
            raise ValueError(
                "This cache keeps the preconditioned values of LUCID: expected attn_implementation='lucid', with which "
                f"it was made, got {self.owner.config._attn_implementation!r}. Make a new cache after this change"
            )
        if self.uncommitted:
            raise RuntimeError(
                "This cache holds tokens that LUCID attention never preconditioned: expected every update to be "
                "followed by attn_implementation='lucid', got another update. Was an earlier forward pass interrupted? "
                "Then start with a new cache. Or does this architecture change cached values before it attends (as "
                "DeepSeek's latent attention does)? Then it cannot use LUCID with a cache. Or did PEFT's prefix tuning "
                "fill it? Use PromptTuningConfig, PromptEncoderConfig or LoRA"
            )
        self.uncommitted = True

    def with_pending(self, values: Tensor, pending: PendingValues) -> Tensor:
        # A new view: an attribute of a tensor that the layer keeps would be a reference cycle.
        view = values[:]
        setattr(view, ATTRIBUTE, pending)
        return view

    def offload(self) -> None:
        raise ValueError(
            "LUCID's cache cannot be offloaded: its values are written after `update`, when Transformers has already "
            "moved the layer away. Use cache_implementation=None ('dynamic') or 'static'"
        )


class LucidDynamicLayer(_CommittedLayer, DynamicLayer):
    """Keys, y and 1/‖k‖ that grow with the sequence, in place; see `GrowingTensor`."""

    _layer_type = LAYER_TYPE

    def __init__(self, config: Any = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.owner, self.uncommitted, self.options = _ConfigReference(config), False, None
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.inverse_norms: Tensor | None = None
        self._growing = {name: GrowingTensor() for name in ("keys", "values", "inverse_norms")}

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = self.values = self.inverse_norms = None
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.begin_update()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        y_past = self.values
        keys = self._growing["keys"].append(self.keys, key_states)
        with torch.no_grad():
            self.inverse_norms = self._growing["inverse_norms"].append(
                self.inverse_norms, inverse_key_norms(key_states)
            )
        self.keys = keys
        # The new rows hold v until `commit` writes y: other code may expect one value per key.
        y_all = self._growing["values"].append(y_past, value_states)
        return keys, self.with_pending(
            y_all, PendingValues(self, keys, value_states, y_past, self.inverse_norms, None, y_all)
        )

    def commit(self, pending: PendingValues, y: Tensor) -> Tensor:
        self.uncommitted = False
        y_all = pending.y_all
        if torch.is_grad_enabled() or y_all is None:
            self.values = y if pending.y_past is None else torch.cat([pending.y_past, y], 2)
        else:
            y_all[:, :, y_all.shape[2] - y.shape[2] :] = y
            self.values = y_all
        return self.values

    def get_seq_length(self) -> int:
        return 0 if self.keys is None else self.keys.shape[2]

    def reset(self) -> None:
        self.__init__(self.owner.config)  # type: ignore[misc]

    def crop(self, tokens_to_remove: int) -> None:
        if self.keys is None:
            return
        super().crop(tokens_to_remove)
        if tokens_to_remove and self.inverse_norms is not None:
            self.inverse_norms = self.inverse_norms[:, :, : -abs(tokens_to_remove)]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        if self.inverse_norms is not None:
            self.inverse_norms = self.inverse_norms.index_select(0, beam_idx.to(self.inverse_norms.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self.inverse_norms is not None:
            self.inverse_norms = self.inverse_norms.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        if self.inverse_norms is not None:
            self.inverse_norms = self.inverse_norms[indices, ...]


class LucidStaticLayer(_CommittedLayer, StaticLayer):
    """Preallocated keys, y and 1/‖k‖ for torch.compile: no buffer changes its shape or address."""

    _layer_type = LAYER_TYPE
    inverse_norms: Tensor

    def __init__(self, max_cache_len: int, config: Any = None, **kwargs: Any) -> None:
        super().__init__(max_cache_len, **kwargs)
        self.owner, self.uncommitted, self.options = _ConfigReference(config), False, None
        # Whether no token came yet: known on the host, without waiting for `cumulative_length`.
        self.empty = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        wide = torch.promote_types(self.dtype, torch.float32)
        self.inverse_norms = torch.zeros(self.keys.shape[:3], dtype=wide, device=self.device)
        if not torch.compiler.is_compiling():
            torch._dynamo.mark_static_address(self.inverse_norms)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.begin_update()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        position = self.cumulative_length.clone()
        # Zeros until `commit` writes y: the decoding step reads the whole buffer before it knows the new y.
        super().update(key_states, torch.zeros_like(value_states))
        self._write(self.inverse_norms, position, inverse_key_norms(key_states))
        past = self.values, self.inverse_norms, position
        # A graph that read `empty` would be compiled again for the second chunk of a prompt.
        first = not torch.compiler.is_compiling() and self.empty
        pending = PendingValues(self, self.keys, value_states, *past, first=first)
        self.empty = False
        return self.keys, self.with_pending(self.values, pending)

    def commit(self, pending: PendingValues, y: Tensor) -> Tensor:
        self.uncommitted = False
        assert pending.position is not None
        y = y.to(self.values.dtype)
        self._write(self.values, pending.position, y)
        if torch.is_grad_enabled() and y.requires_grad:
            # The buffer keeps y without gradients; the returned copy has them.
            return self.values.index_copy(2, self._places(pending.position, y), y)
        return self.values

    def _write(self, buffer: Tensor, position: Tensor, new: Tensor) -> None:
        buffer.index_copy_(2, self._places(position, new), new.detach())

    def _places(self, position: Tensor, new: Tensor) -> Tensor:
        return torch.arange(new.shape[2], device=new.device) + position

    def reset(self) -> None:
        super().reset()
        self.uncommitted, self.options, self.empty = False, None, True
        if self.is_initialized:
            self.inverse_norms.zero_()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        if self.get_seq_length() > 0:
            self.inverse_norms = self.inverse_norms.index_select(0, beam_idx.to(self.inverse_norms.device))
