"""The arguments of `lucid serve`. Imports nothing heavy."""

import argparse

DESCRIPTION = """\
Serve a checkpoint with LUCID, a converted one or one of `lucid train`, to programs that speak OpenAI's API.
This is `transformers serve` with continuous batching, with LUCID, and with errors that say what is wrong."""
EPILOG = """\
All further words go to `transformers serve`. Among them:
  --port 8000  --host localhost    where the server listens
  --cb-num-blocks 64               bound the cache: blocks of 256 tokens. By default it takes 60 % of a CPU's memory
  --cb-max-batch-tokens 512        new tokens in one pass; longer prompts are split
  --no-continuous-batching         one request after the other, with generate()

examples:
  lucid serve ./model --port 8000 --cb-num-blocks 64
  curl localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "Once", "max_tokens": 16}'"""


def serve_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `lucid serve`."""
    parser.usage = "lucid serve CHECKPOINT [ARGUMENTS of transformers serve ...]"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder with config.json, weights and a tokenizer")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="see below")
