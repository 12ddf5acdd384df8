"""The arguments of `lucid tokenize`. Imports nothing heavy: help and misspelt options answer at once."""

import argparse


def tokenize_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `lucid tokenize`."""
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="file, folder or glob in quotes (text; .jsonl, .json: one document per line; .parquet; also .gz, .zst), "
        "stdlib (Python's own source files: works offline), or hf:NAME[:CONFIG] (a data set of the hub, streamed)",
    )
    parser.add_argument("out", metavar="OUT", help="folder to write; an unfinished one is resumed")
    parser.add_argument(
        "--tokenizer",
        default="train:32000",
        metavar="T",
        help="train:N (byte-level BPE with N tokens, trained on the source), a folder with a tokenizer.json, or a name "
        "that Transformers knows; default train:32000",
    )
    parser.add_argument("--workers", type=int, metavar="N", help="number of processes, default one per core")
    parser.add_argument(
        "--validation", type=float, default=0.01, metavar="SHARE", help="share of documents held out, default 0.01"
    )
    parser.add_argument("--field", default="text", help="key or column of the text, default text")
    parser.add_argument("--split", default="train", help="split of a data set of the hub, default train")
    parser.add_argument(
        "--shard-tokens", type=int, default=50_000_000, metavar="N", help="largest shard, default 50_000_000"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N documents")
    parser.add_argument("--skip-bad", action="store_true", help="leave out and count documents that cannot be read")
