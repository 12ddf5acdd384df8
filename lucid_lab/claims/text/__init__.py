"""The tokenizer of the tiny model that `pretrained` has in tests."""
