"""The triangular system of LUCID as one value: checked at the door, then passed whole to every implementation.

    Y = (I + s · diag(β) L)⁻¹ diag(β) V,     L = stril exp(c (cos θ_ij − 1))

With blocks of tokens that see each other, P has I + s/2 · (G − I) on the diagonal blocks (`../blocks.py`).

A new option is a field of `Options` and of `System`, an argument of `lucid_attention`, an input of the operator
(`INPUTS`, `operator_inputs`, `from_operator`) and, for kernels, a field of `PaddedSystem`; for decoding, of `Token`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor

from .. import blocks, checks, packing
from ..keys import KeyMap, map_keys, resolved_sharpness
from ..precision import working_dtype

Past = tuple[Tensor, Tensor]


class Options(TypedDict, total=False):
    """Keyword arguments that all functions of LUCID share; `lucid_attention` explains them."""

    past: Past | None
    key_mask: Tensor | None
    cu_seqlens: Tensor | None
    beta: Tensor | None
    norm: str
    sharpness: float | Tensor | None
    strength: float
    key_map: KeyMap | None
    block: blocks.Block
    is_causal: bool | None
    tolerance: float | None


@dataclass(frozen=True)
class System:
    """Everything that defines the system but the right-hand side V.

    k: [B, H, T, D], mapped if there is a key_map; of the past k_past: [B, H, S, D], mapped as well, and
    y_past: [B, H, S, E]; key_mask: [B, S + T]; cu_seqlens: [n + 1]; beta: [B, H, T]; norm: "key", "qk" or "row_max";
    sharpness: c, a number or [B, H]; strength: s; block: 1 if causal, or the blocks of tokens that see each
    other; tolerance: of conjugate gradients, None for the default of the dtype.
    """

    k: Tensor
    k_past: Tensor | None = None
    y_past: Tensor | None = None
    key_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    beta: Tensor | None = None
    norm: str = "key"
    sharpness: float | Tensor = 1.0
    strength: float = 1.0
    block: blocks.Block = 1
    tolerance: float | None = None

    @property
    def past_length(self) -> int:
        """S."""
        return 0 if self.k_past is None else self.k_past.shape[2]

    @property
    def row_max(self) -> bool:
        """Whether L is made of raw keys, with the causal row maximum subtracted."""
        return self.norm == "row_max"

    @property
    def dtype(self) -> torch.dtype:
        """The working precision."""
        return working_dtype(self.k)

    def widened(self) -> "System":
        """The system in working precision."""
        names = ("k", "k_past", "y_past", "beta", "sharpness")
        tensors = {name: getattr(self, name) for name in names if isinstance(getattr(self, name), Tensor)}
        return replace(self, **{name: x.to(self.dtype) for name, x in tensors.items()})

    def parts(self) -> Iterator[packing.Part]:
        """The packed documents, or everything."""
        return packing.documents(self.cu_seqlens, self.k.shape[2], self.k.device)

    def part(self, part: packing.Part) -> "System":
        """The system of one part of `parts`."""
        key_mask = blocks.with_padding_masked(self.key_mask, self.block, self.cu_seqlens, self.k)
        beta, key_mask = (None if x is None else part.take(x) for x in (self.beta, key_mask))
        sharpness = self.sharpness
        if isinstance(sharpness, Tensor):
            sharpness = part.per_sequence(sharpness)
        return replace(self, k=part.take(self.k), cu_seqlens=None, beta=beta, key_mask=key_mask, sharpness=sharpness)

    def zero_masked(self, x: Tensor) -> Tensor:
        """x: [B, H, T] or [B, H, T, *], with zeros at masked keys."""
        if self.key_mask is None:
            return x
        hidden = ~self.key_mask[:, None, self.past_length :]
        return x.masked_fill(hidden if x.ndim == 3 else hidden[..., None], 0)

    def operator_inputs(self) -> tuple[Any, ...]:
        """The system as `INPUTS` of the operator."""
        learned = self.sharpness if isinstance(self.sharpness, Tensor) else None
        fixed = 0.0 if isinstance(self.sharpness, Tensor) else self.sharpness
        # Multiply, so that torch.compile does not specialise on the value.
        s = None if self.strength == 1 else torch.ones((), dtype=torch.float64, device="cpu") * self.strength
        past = self.k_past, self.y_past
        where = *blocks.as_inputs(self.block), self.tolerance
        return (self.k, *past, self.beta, learned, self.key_mask, self.cu_seqlens, s, fixed, *where, self.norm)


INPUTS = (
    "Tensor k, Tensor? k_past, Tensor? y_past, Tensor? beta, Tensor? sharpness, Tensor? key_mask, "
    "Tensor? cu_seqlens, Tensor? strength, float fixed_sharpness, "
    "Tensor? borders, int block, float? tolerance, str norm"
)


def from_operator(*inputs: Any) -> System:
    """The system from `INPUTS` of the operator."""
    k, k_past, y_past, beta, sharpness, key_mask, cu_seqlens, strength, fixed_sharpness, *where = inputs
    c = fixed_sharpness if sharpness is None else sharpness
    s = 1.0 if strength is None else strength.item()
    *block, tolerance, norm = where
    return System(k, k_past, y_past, key_mask, cu_seqlens, beta, norm, c, s, blocks.from_inputs(*block), tolerance)


class Gradients(NamedTuple):
    """Buffers for the gradients, shaped like the inputs; None where a gradient is not needed."""

    dv: Tensor
    dk: Tensor | None
    dk_past: Tensor | None
    dy_past: Tensor | None
    dbeta: Tensor | None
    dsharpness: Tensor | None


def checked_system(k: Tensor, v: Tensor, **options: Unpack[Options]) -> System:
    """The system of the arguments of a public function; raises where one of them is wrong."""
    fields: dict[str, Any] = {**options}
    past, sharpness, key_map = (fields.pop(name, None) for name in ("past", "sharpness", "key_map"))
    fields["block"] = blocks.resolved(fields.get("block", 1), fields.pop("is_causal", None))
    checks.check_kv(k, v)
    k_past, y_past = checks.check_past(past, k, v) or (None, None)
    checks.check_sharpness(sharpness, k)
    system = System(k, k_past, y_past, sharpness=resolved_sharpness(sharpness, k), **fields)
    checks.check_key_mask(system.key_mask, k, system.past_length)
    checks.check_cu_seqlens(system.cu_seqlens, k, k_past)
    checks.check_beta(system.beta, k)
    checks.check_norm(system.norm)
    checks.check_strength(system.strength)
    checks.check_positive("tolerance", system.tolerance, optional=True)
    checks.check_block(system.block, k, system.past_length, system.cu_seqlens, system.beta, system.norm)
    checks.check_key_map(key_map, k)
    if key_map is None:
        return system
    old, new = (None, None) if system.key_mask is None else system.key_mask.tensor_split((system.past_length,), 1)
    k_past = None if k_past is None else map_keys(k_past, key_map, old)
    return replace(system, k=map_keys(k, key_map, new), k_past=k_past)
