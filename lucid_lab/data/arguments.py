"""The arguments of `lucid tokenize`. Imports nothing heavy: help and misspelt options answer at once."""

import argparse

# The least --shard-tokens. Each shard is waited for until it is on the disk: a corpus of many shards is slow.
SMALLEST_SHARD = 100_000


def tokenize_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `lucid tokenize`."""
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="file, folder or glob in quotes (text; .jsonl, .json: one document per line; .parquet; also .gz, .zst), "
        "the address of a file (https://...), @LIST (a list of files and addresses, one a line), "
        "stdlib (Python's own source files: works offline), or hf:NAME[:CONFIG] (a data set of the hub, streamed). "
        "Example: lucid tokenize corpus/ tokens/ --tokenizer train:8000",
    )
    parser.add_argument("out", metavar="OUT", help="folder to write, such as tokens/; an unfinished one is resumed")
    parser.add_argument(
        "--tokenizer",
        default="train:32000",
        metavar="T",
        help="train:N (byte-level BPE with N tokens, trained on the source), a folder with a tokenizer.json, or a name "
        "that Transformers knows, such as gpt2; default train:32000",
    )
    parser.add_argument("--workers", type=int, metavar="N", help="number of processes, such as 4; default one per core")
    parser.add_argument(
        "--validation",
        type=float,
        default=0.01,
        metavar="SHARE",
        help="share of the documents that are held out for validation, from 0 to below 1, but at least one document "
        "unless 0; such as 0.1 for every tenth; default 0.01",
    )
    parser.add_argument(
        "--field", default="text", metavar="NAME", help="key or column of the text, such as content; default text"
    )
    parser.add_argument(
        "--split", default="train", metavar="NAME", help="split of a data set of the hub, such as test; default train"
    )
    parser.add_argument(
        "--config",
        "--subset",
        metavar="NAME",
        help="configuration of a data set of the hub; default that of hf:NAME:...",
    )
    parser.add_argument(
        "--shard-tokens",
        type=int,
        default=50_000_000,
        metavar="N",
        help=f"largest file of tokens, in tokens of 2 or 4 bytes, at least {SMALLEST_SHARD:_}; default 50_000_000",
    )
    parser.add_argument(
        "--limit", type=int, metavar="N", help="only the first N documents of SOURCE, such as 1000; default all"
    )
    parser.add_argument(
        "--limit-tokens",
        type=int,
        metavar="N",
        help="only the first documents of SOURCE that together have N tokens, such as 6_500_000_000; default all",
    )
    parser.add_argument(
        "--min-document-tokens",
        type=int,
        default=0,
        metavar="N",
        help="leave out documents with fewer tokens, such as 16384 to train on long contexts; default 0",
    )
    parser.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="take files and documents in a random order, such as 0; default the order of SOURCE",
    )
    parser.add_argument(
        "--skip-bad",
        action="store_true",
        help="leave out and count documents and files that cannot be read, instead of stopping at the first",
    )
