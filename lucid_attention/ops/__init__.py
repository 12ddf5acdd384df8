"""Functions on tensors. Needs torch and nothing else."""
