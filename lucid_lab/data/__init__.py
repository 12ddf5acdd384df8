"""Where tokens come from: corpora, tokenizers, token shards, synthetic tasks. Imports no other room but `base`."""

from .readers import DataError as DataError
