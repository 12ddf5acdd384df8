"""Where tokens come from: text, tokenizers, folders of tokens, synthetic tasks."""


class DataError(ValueError):
    """Wrong data, or a wrong folder of tokens: the message names the file, what was expected and what came."""
