"""The benchmarks, and the peers that they compare with."""
