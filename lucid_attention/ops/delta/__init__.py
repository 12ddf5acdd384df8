"""The delta rule with and without decay (DeltaNet, Gated DeltaNet): operator, recurrence, chunk-wise form."""
