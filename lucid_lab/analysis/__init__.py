"""Look inside attention: condition numbers, hit rates, Jacobians and maps, for our models and those of Transformers."""
