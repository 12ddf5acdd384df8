"""LUCID attention: the operator, its dense definition, its block-wise form and its decoding step."""
