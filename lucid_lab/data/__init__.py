"""Where tokens come from: text, tokenizers, folders of tokens, synthetic tasks."""


class DataError(ValueError):
    """Wrong data, or a wrong folder of tokens: the message names the file, what was expected and what came."""


# The label of a token that no loss and no score counts: torch's and Transformers' default.
IGNORED = -100
