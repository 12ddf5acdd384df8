"""One file per claim of the paper: what to run, what came out, whether it holds."""
