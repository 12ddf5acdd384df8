"""Evaluation of checkpoints: the runner, its three commands, and the benchmarks below it."""
