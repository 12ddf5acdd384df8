"""The arguments of `lucid convert` and `lucid run`, and one that several commands share. Imports nothing heavy."""

import argparse
import re

# Values of --dtype; "auto" is the dtype that the weights were saved in.
DTYPES = ("auto", "float32", "bfloat16", "float16")
ATTENTIONS_OF_CONVERSION = ("lucid", "softmax")

RUN_DESCRIPTION = """\
Run a tool of others, so that it opens checkpoints with LUCID, converted ones and those of `lucid train`.
Processes that the tool starts (torchrun, accelerate, trl, notebooks, workers) know LUCID as well."""
RUN_EXAMPLES = """\
examples:
  lucid run lm_eval --model hf --model_args pretrained=./model --tasks arc_easy
  lucid run transformers serve ./model
  lucid run trl sft --model_name_or_path ./model --dataset_name DATASET
  lucid run torchrun --nproc-per-node 2 train.py
  lucid run jupyter lab
  lucid run script.py
  lucid run -m my_package.my_tool"""


def convert_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `lucid convert`."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder with config.json and weights")
    parser.add_argument("out", metavar="OUT", help="folder to be written; must not exist or be empty")
    parser.add_argument(
        "--to",
        choices=ATTENTIONS_OF_CONVERSION,
        default="lucid",
        help="softmax gives the plain checkpoint back, which programs without LUCID read (default: lucid)",
    )
    parser.add_argument(
        "--auto-map",
        action="store_true",
        help="add a file through which programs open OUT with trust_remote_code=True, where lucid-attention is "
        "installed, and `auto_map` in config.json; `lucid run PROGRAM` needs neither",
    )
    parser.add_argument("--layers", type=read_layers, default=None, metavar="LIST", help="all, or as in 0,2,8-11")
    parser.add_argument(
        "--layers-from",
        metavar="FILE",
        help="choose the layers by their cost, from analysis.json of `lucid analyze CHECKPOINT --what disturbance`: "
        "the largest set that costs at most --most-change",
    )
    parser.add_argument(
        "--most-change",
        type=float,
        metavar="NATS",
        help="by how much the loss may rise when these layers become LUCID at once, such as 0.1",
    )
    parser.add_argument(
        "--strength",
        type=float,
        default=None,
        metavar="S",
        help="from 0, exactly the original model, to 1, LUCID (default)",
    )
    parser.add_argument(
        "--sharpness",
        type=float,
        default=None,
        metavar="C",
        help="c of the preconditioner (default: √D). Start at 64 and let `lucid train --set sharpness_steps=0.5`, or "
        "SharpnessRamp, lower it in training",
    )


def run_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `lucid run`. All words from the tool's name on are the tool's own, `--help` among them."""
    parser.usage = "lucid run TOOL [ARGUMENTS ...]\n       lucid run -m MODULE [ARGUMENTS ...]"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = RUN_DESCRIPTION
    parser.epilog = RUN_EXAMPLES
    parser.add_argument("-m", dest="module", action="store_true", help="TOOL is a module, as in python -m")
    parser.add_argument(
        "words", nargs=argparse.REMAINDER, metavar="TOOL", help="an installed program or a .py file, then its arguments"
    )


def read_layers(text: str) -> list[int] | str:
    """ "all", or indices and ranges: "0,2,8-11" -> [0, 2, 8, 9, 10, 11]."""
    if text == "all":
        return text
    chosen: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", part)
        # The number of digits bounds the range, whose indices are in memory.
        if not match or not int(match[1]) <= int(match[2] or match[1]):
            raise argparse.ArgumentTypeError(f"expected 'all' or indices and ranges such as 0,2,8-11, got {text!r}")
        chosen.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
    return chosen
