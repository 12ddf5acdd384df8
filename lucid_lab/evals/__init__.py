"""Tasks for lm-evaluation-harness, and `lucid eval`, which runs them: needles, BABILong, LongBench, SCROLLS, losses."""
