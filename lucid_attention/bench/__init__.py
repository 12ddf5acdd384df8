"""Speed and memory beside peers, as ratios within one run."""
