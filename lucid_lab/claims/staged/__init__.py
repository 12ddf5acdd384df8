"""Small models that learn from text in stages, word by word; layers may differ."""
