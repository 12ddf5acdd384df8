"""Small language models of words: their texts, their training and evaluation, softmax beside LUCID."""
