"""Speed and memory side by side with peers, as ratios within one run: `python -m benchmarks --help`."""
