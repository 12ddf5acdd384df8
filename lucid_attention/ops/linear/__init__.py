"""Members with a state of fixed size: delta rule, gated linear attention, gated slot attention."""
