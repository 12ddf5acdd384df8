"""Speed and memory next to peers, as ratios within one run: `lucid bench`."""
