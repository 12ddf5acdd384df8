"""Gated linear attention: the operator, its recurrence and its chunk-wise form."""
