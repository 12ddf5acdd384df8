"""Evaluation: tasks for lm-evaluation-harness, and one runner for all of them."""
