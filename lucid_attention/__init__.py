"""LUCID attention: softmax attention that reads decorrelated values, o = softmax(q kᵀ/√d) P⁻¹ v."""

from .ops.lucid.api import lucid_attention, precondition, preconditioner

__all__ = ["lucid_attention", "precondition", "preconditioner"]
__version__ = "0.1.0"
