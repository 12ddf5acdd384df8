"""Where tokens come from: corpora, tokenizers, token shards, synthetic tasks. Needs no other room of the package."""
