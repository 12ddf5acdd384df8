"""PaTH and LUCID-PaTH as one value: checked once, then passed whole to every implementation.

    O = softmax(A · scale) Y,     A_ij = k_jᵀ (∏_{s=j+1..i} H_s) q_i,     H_s = I − β_s w_s w_sᵀ

Y is V for PaTH. For LUCID-PaTH, Y = P⁻¹ V with P_ij = exp(c (k̂_jᵀ (∏ H_s) k̂_i − 1)).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import checks, packing
from ..keys import resolved_scale, resolved_sharpness
from ..precision import working_dtype

Past = tuple[Tensor, Tensor]
LucidPast = tuple[Tensor, Tensor, Tensor]
# The fields that may have gradients, in the order of the operator's inputs.
DIFFERENTIABLE = ("q", "k", "v", "w", "beta", "k_past", "y_past", "inverse_norms", "sharpness")


@dataclass(frozen=True)
class PathSystem:
    """Everything that defines a pass.

    q: [B, H·G, T, D], None for a solve alone; k, w: [B, H, T, D]; v: [B, H, T, E]; beta: [B, H, T]; of the past
    k_past: [B, H, S, D], moved to the end of the past, y_past: [B, H, S, E] and, with a solve, inverse_norms:
    [B, H, S], 1/‖k‖ of its keys; key_mask: [B, S + T]; cu_seqlens: [n + 1]; sharpness: c, a number or [B, H];
    scale: of the scores; solves: whether values are preconditioned.
    """

    q: Tensor | None
    k: Tensor
    v: Tensor
    w: Tensor
    beta: Tensor
    k_past: Tensor | None = None
    y_past: Tensor | None = None
    inverse_norms: Tensor | None = None
    key_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    sharpness: float | Tensor = 1.0
    scale: float = 1.0
    solves: bool = False

    @property
    def past_length(self) -> int:
        """S."""
        return 0 if self.k_past is None else self.k_past.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """The working precision."""
        return working_dtype(self.k)

    def widened(self) -> "PathSystem":
        """The system in working precision."""
        tensors = {name: getattr(self, name) for name in DIFFERENTIABLE if isinstance(getattr(self, name), Tensor)}
        return replace(self, **{name: x.to(self.dtype) for name, x in tensors.items()})

    def parts(self) -> Iterator[packing.Part]:
        """The sequences to compute: a masked position is absent, so only kept ones are gathered."""
        length, past = self.k.shape[2], self.past_length
        return packing.kept_positions(self.key_mask, self.cu_seqlens, length, past, self.k.device)

    def part(self, part: packing.Part) -> "PathSystem":
        """The system of one part of `parts`."""
        taken = {name: getattr(self, name) for name in ("q", "k", "v", "w")}
        taken = {name: None if x is None else part.take(x) for name, x in taken.items()}
        # Padding repeats the last position of a sequence. With β = 0 it moves no key.
        taken["beta"] = part.take_grad(self.beta)
        for name in ("k_past", "y_past", "inverse_norms"):
            x = getattr(self, name)
            taken[name] = None if x is None or part.past is None else part.past.take(x)
        if isinstance(self.sharpness, Tensor):
            taken["sharpness"] = part.per_sequence(self.sharpness)
        return replace(self, key_mask=None, cu_seqlens=None, **taken)

    def output(self, *shape: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor to be written, zero where masked positions are never written."""
        make = like.new_empty if self.key_mask is None else like.new_zeros
        return make(shape, dtype=dtype or like.dtype)

    def operator_inputs(self) -> tuple[Any, ...]:
        """The system as `INPUTS` of the operator."""
        learned = self.sharpness if isinstance(self.sharpness, Tensor) else None
        fixed = 0.0 if isinstance(self.sharpness, Tensor) else self.sharpness
        tensors = [getattr(self, name) for name in DIFFERENTIABLE[:-1]]
        return (*tensors, learned, self.key_mask, self.cu_seqlens, self.scale, fixed, self.solves)


INPUTS = (
    "Tensor? q, Tensor k, Tensor v, Tensor w, Tensor beta, Tensor? k_past, Tensor? y_past, Tensor? inverse_norms, "
    "Tensor? sharpness, Tensor? key_mask, Tensor? cu_seqlens, float scale, float fixed_sharpness, bool solves"
)


def from_operator(*inputs: Any) -> PathSystem:
    """The system from `INPUTS` of the operator."""
    q, k, v, w, beta, k_past, y_past, inverse_norms, sharpness, key_mask, cu_seqlens, scale, fixed, solves = inputs
    c = fixed if sharpness is None else sharpness
    return PathSystem(q, k, v, w, beta, k_past, y_past, inverse_norms, key_mask, cu_seqlens, c, scale, solves)


def checked_path_system(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    *,
    solves: bool,
    past: Sequence[Tensor] | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    sharpness: float | Tensor | None = None,
    scale: float | None = None,
) -> PathSystem:
    """The system of the arguments of the public functions; raises if one of them is wrong.

    past: a triple (k_past, y_past, inverse_norms) if `solves`, otherwise a pair.
    """
    checks.check_kv(k, v)
    checks.check_factors(k, w, beta)
    inverse_norms = None
    if solves and past is not None:
        if not isinstance(past, (tuple, list)) or len(past) != 3:
            raise TypeError(f"past must be a triple (k_past, y_past, inverse_norms), got {checks.described(past)}")
        *past, inverse_norms = past
    pair = checks.check_past(past, k, v)
    k_past, y_past = (None, None) if pair is None else pair
    checks.check_key_mask(key_mask, k, 0 if k_past is None else k_past.shape[2])
    checks.check_cu_seqlens(cu_seqlens, k, pair)
    checks.check_sharpness(sharpness, k)
    if k_past is None:
        inverse_norms = None
    elif solves:
        checks.check_inverse_norms(inverse_norms, k_past, "[B, H, S]")
    if q is not None:
        checks.check_q(q, k)
    checks.check_scale(scale)
    c = resolved_sharpness(sharpness, k)
    c = c.to(working_dtype(k)) if isinstance(c, Tensor) else c
    tensors = q, k, v, w, beta, k_past, y_past, inverse_norms, key_mask, cu_seqlens
    return PathSystem(*tensors, c, resolved_scale(scale, k), solves)
