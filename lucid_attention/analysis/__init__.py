"""What attention does inside a model: condition numbers, hit rates, Jacobians, maps. For ours and for drop-ins."""
