"""The tables of `tools/attack.py`. {names} in command lines stand for the files that it makes."""

import random
from collections.abc import Callable
from typing import NamedTuple

VOCABULARY = tuple("apples pears matter nothing else says that the document of a number is not fruit".split())  # noqa: SIM905
TRAIN = (
    "train tiny_lm --attention lucid --data {tokens} --out {out} --set steps=6 --set batch_size=2 "
    "--set micro_batch_size=2 --set sequence_length=32 --set model.hidden_size=32 --set model.num_hidden_layers=1 "
    "--set model.num_attention_heads=2 --set model.head_dim=16 --set save_every=2 --set log_every=1"
)
# The commands that resume, in the order in which they need each other's output. It is kept under these names.
COMMANDS = {
    "tokens": "tokenize {texts} {out} --tokenizer train:300 --validation 0.1 --workers 2 --shard-tokens 100000",
    "run": TRAIN,
    "scores": "eval {model} --tasks perplexity --text {prose} --lengths 16,32 --limit 4 --out {out}",
    # None of its jobs depends on a measured time.
    "experiment": "experiment learnability --scale smoke --out {out}",
}
# Makes a checkpoint of Transformers, for `convert`.
LLAMA = """
import sys
from transformers import LlamaConfig, LlamaForCausalLM
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
LlamaForCausalLM(LlamaConfig(vocab_size=300, **sizes)).save_pretrained(sys.argv[1])
"""
# Commands that only read.
READERS = {
    "report": "report {run} {scores} {experiment} --out {out}.html",
    "analyze": "analyze {model} --what conditioning --text {prose} --length 16 --out {out}",
    "convert": "convert {llama} {out}",
    "compare": "compare {scores} {scores} --out {out}",
}


class Damage(NamedTuple):
    """command: repeated after a file of `folder` is damaged. changes: whether another result is right, as for an input.

    files: a pattern; the first match is damaged. removed: what to delete first, so that the command has work to do.
    """

    command: str
    folder: str
    files: str
    changes: bool = False
    removed: tuple[str, ...] = ()


RESUMED = ("model", "summary.json", "checkpoint-6")
DAMAGES = [
    Damage("tokens", "texts", "1.jsonl", changes=True),
    Damage("tokens", "tokens", "manifest.json"),
    Damage("tokens", "tokens", "tokenizer.json"),
    Damage("tokens", "tokens", "train-*.bin"),
    *(Damage("run", "tokens", name) for name in ("manifest.json", "tokenizer.json", "train-*.bin", "train-*.npy")),
    *(Damage("run", "run", name, removed=RESUMED) for name in ("recipe.json", "metrics.jsonl", "inputs.json")),
    *(Damage("run", "run", name) for name in ("recipe.json", "metrics.jsonl", "inputs.json", "summary.json")),
    *(
        Damage("run", "run", f"checkpoint-4/{name}", removed=RESUMED)
        for name in ("model.safetensors", "optimizer.pt", "rng_state.pth", "trainer_state.json", "complete.json")
    ),
    *(
        Damage(command, "llama" if command == "convert" else "run", place.format(name), changes=True)
        for command, place in (("scores", "model/{}"), ("analyze", "model/{}"), ("convert", "{}"))
        for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    ),
    Damage("scores", "scores", "samples/*.jsonl"),
    Damage("scores", "scores", "results.json"),
    Damage("compare", "scores", "results.json", changes=True),
    Damage("compare", "scores", "samples/*.jsonl", changes=True),
    Damage("experiment", "experiment", "jobs/*/record.json"),
    Damage("experiment", "experiment", "*/result.json"),
    Damage("report", "experiment", "*/result.json", changes=True),
    *(Damage("report", "run", name, changes=True) for name in ("recipe.json", "metrics.jsonl", "summary.json")),
    Damage("report", "scores", "results.json", changes=True),
]


def _flip(content: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(content))
    return content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :]


WAYS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "cut": lambda content, chance: content[: chance.randrange(1, len(content))],
    "empty": lambda content, chance: b"",
    "flip": _flip,
    "list": lambda content, chance: b"[]",
    "object": lambda content, chance: b"{}",
    "noise": lambda content, chance: chance.randbytes(len(content)),
    "deep": lambda content, chance: b"[" * 100_000,
}

# Command lines that must be refused.
BAD_INPUTS = r"""
nonsense
trian tiny_lm
--verbose
tokenize
tokenize {texts}
tokenize {none} {out}
tokenize {empty} {out}
tokenize {texts} {out} --tokenizer train:0
tokenize {texts} {out} --tokenizer train:-5
tokenize {texts} {out} --tokenizer train:many
tokenize {texts} {out} --tokenizer train:
tokenize {texts} {out} --tokenizer train:99999999999999999
tokenize {texts} {out} --tokenizer {none}
tokenize {texts} {out} --tokenizer {empty}
tokenize {texts} {out} --workers 0
tokenize {texts} {out} --workers x
tokenize {texts} {out} --validation 2
tokenize {texts} {out} --validation -0.1
tokenize {texts} {out} --validation nan
tokenize {texts} {out} --field nofield --tokenizer train:300
tokenize {texts} {out} --shard-tokens 0
tokenize {texts} {out} --shard-tokens -1
tokenize {texts} {out} --limit 0
tokenize {texts} {out} --limit x
tokenize {texts} {out} --unknown
tokenize {texts} {file} --tokenizer train:300
tokenize {texts} {long} --tokenizer train:300
tokenize {texts} {notes} --tokenizer train:300
tokenize {bad_lines} {out} --tokenizer train:300
tokenize {bad_parquet} {out} --tokenizer train:300
tokenize {bad_gzip} {out} --tokenizer train:300
tokenize {blank} {out} --tokenizer train:300
tokenize {latin} {out} --tokenizer train:300
tokenize hf:no/such/data {out} --tokenizer train:300
train
train no_such_recipe
train tiny_ml
train tiny_lm --attention lucidd --out {out}
train tiny_lm --attention "" --out {out}
train tiny_lm --data {none} --out {out}
train tiny_lm --data {empty} --out {out}
train tiny_lm --data {file} --out {out}
train tiny_lm --data {bad_lines} --out {out}
train tiny_lm --data no_such_task --out {out}
train tiny_lm --data {tokens} --out {file}
train tiny_lm --data {tokens} --out {long}
train tiny_lm --data {tokens} --out {notes}
train tiny_lm --data {tokens} --out {out} --seed x
train tiny_lm --data {tokens} --out {out} --seed -1
train tiny_lm --data {tokens} --out {out} --set
train tiny_lm --data {tokens} --out {out} --set steps
train tiny_lm --data {tokens} --out {out} --set steps=
train tiny_lm --data {tokens} --out {out} --set steps=0
train tiny_lm --data {tokens} --out {out} --set steps=-3
train tiny_lm --data {tokens} --out {out} --set steps=1.5
train tiny_lm --data {tokens} --out {out} --set stepps=3
train tiny_lm --data {tokens} --out {out} --set learning_rate=fast
train tiny_lm --data {tokens} --out {out} --set learning_rate=nan
train tiny_lm --data {tokens} --out {out} --set learning_rate=-1
train tiny_lm --data {tokens} --out {out} --set batch_size=0
train tiny_lm --data {tokens} --out {out} --set batch_size=1e12
train tiny_lm --data {tokens} --out {out} --set batch_size=7 --set micro_batch_size=2
train tiny_lm --data {tokens} --out {out} --set sequence_length=0
train tiny_lm --data {tokens} --out {out} --set sequence_length=100000000
train tiny_lm --data {tokens} --out {out} --set model.hidden_size=1e9
train tiny_lm --data {tokens} --out {out} --set model.hidden_size=0
train tiny_lm --data {tokens} --out {out} --set model.hidden_size=abc
train tiny_lm --data {tokens} --out {out} --set model.no_such_field=3
train tiny_lm --data {tokens} --out {out} --set model.initializer_range=nan
train tiny_lm --data {tokens} --out {out} --set model.vocab_size=5
train tiny_lm --data {tokens} --out {out} --set model.num_hidden_layers=0
train tiny_lm --data {tokens} --out {out} --set model.num_attention_heads=3 --set model.num_key_value_heads=2
train tiny_lm --data {tokens} --out {out} --set model=3
train tiny_lm --data {tokens} --out {out} --parallel both
train tiny_lm --data {tokens} --out {out} --from {none}
train tiny_lm --data {tokens} --out {out} --from {empty}
train tiny_lm --data {tokens} --out {out} --from {file}
eval
eval {none} --tasks perplexity --text {prose}
eval {empty} --tasks perplexity --text {prose}
eval {file} --tasks perplexity --text {prose}
eval {model}
eval {model} --tasks no_such_task --out {out}
eval {model} --tasks perplexity --out {out}
eval {model} --tasks perplexity --text {none} --lengths 32 --out {out}
eval {model} --tasks perplexity --text {blank} --lengths 32 --out {out}
eval {model} --tasks perplexity --text {prose} --lengths 0 --out {out}
eval {model} --tasks perplexity --text {prose} --lengths x --out {out}
eval {model} --tasks perplexity --text {prose} --lengths 99999999999 --out {out}
eval {model} --tasks perplexity --text {prose} --lengths 32 --out {file}
eval {model} --tasks perplexity --text {prose} --lengths 32 --out {long}
eval {model} --tasks perplexity --text {prose} --lengths 32 --batch-size 0 --out {out}
eval {model} --tasks perplexity --text {prose} --lengths 32 --limit 0 --out {out}
eval {model} --tasks perplexity --text {prose} --lengths 32 --dtype int8 --out {out}
eval {model} --tasks mniah --needles 0 --lengths 512 --samples 2 --out {out}
eval {model} --tasks mniah --needles x --lengths 512 --samples 2 --out {out}
eval {model} --tasks mniah --needles 2 --lengths 512 --samples 0 --out {out}
eval {model} --tasks mniah --needles 2 --lengths 512 --samples -4 --out {out}
eval {model} --tasks mniah --needles 2 --lengths 4 --samples 2 --out {out}
eval {model} --tasks mniah --needles 2 --lengths 512 --samples 2 --keys colours --out {out}
eval {model} --tasks mniah --needles 2 --lengths 512 --samples 2 --haystack {none} --out {out}
eval {model} --tasks mniah --needles 2 --lengths 512 --samples 2 --haystack / --out {out}
eval {model} --tasks mniah --needles 2 --lengths 512 --samples 2 --tokenizer {none} --out {out}
eval {model} --tasks babilong --qa qa99 --lengths 512 --samples 2 --out {out}
eval {model} --tasks longbench --data-dir {none} --out {out}
eval {model} --tasks memory_update --samples 2 --out {out}
eval {model} --tasks mniah --needles 2 --lengths 512 --samples 2 --haystack "" --out {out}
eval {model} --tasks mniah --needles 2 --lengths 512 --samples 2 --seed -1 --out {out}
eval {model} --tasks longbench --questions -1 --out {out}
compare
compare {model} {none} --tasks perplexity --text {prose} --lengths 32 --out {out}
compare {none} {none} --tasks perplexity --text {prose} --lengths 32 --out {out}
compare {model} {model} --out {out}
make-data
make-data no_such_kind {out}.jsonl
make-data needles {out}.jsonl --tokenizer {none} --lengths 64 --samples 2
make-data needles {out}.jsonl --tokenizer {model} --lengths x --samples 2
make-data needles {out}.jsonl --tokenizer {model} --lengths 512 --samples 0
make-data needles {out}.jsonl --tokenizer {model} --lengths 512 --samples 2 --seed -1000003
make-data needles {file}/sub.jsonl --tokenizer {model} --lengths 512 --samples 2
make-data longbench {out}.jsonl --data-dir {none}
experiment
experiment memory_updat
experiment memory_update no_such
experiment hit_rate --scale huge
experiment hit_rate --scale smoke --processes 0
experiment hit_rate --scale smoke --processes x
experiment hit_rate --scale smoke --out {file}
experiment hit_rate --scale smoke --out {long}
experiment hit_rate --scale paper --restart
demo --out {file}
demo --quikc
analyze
analyze {none} --what conditioning
analyze {empty} --what conditioning
analyze {file} --what conditioning
analyze {model} --what nonsense --out {out}
analyze {model} --what conditioning --text {none}.txt --out {out}
analyze {model} --what conditioning --text {prose} --length 0 --out {out}
analyze {model} --what conditioning --text {prose} --length 99999999999 --out {out}
analyze {model} --what conditioning --text {prose} --layers 99 --out {out}
analyze {model} --what conditioning --text {prose} --layers x --out {out}
analyze {model} --what conditioning --text {prose} --heads 99 --out {out}
analyze {model} --what conditioning --text {prose} --length 16 --out {file}
analyze {model} --what conditioning --task no_such_task --out {out}
analyze {model} --what conditioning --samples {none} --out {out}
report
report {none}
report {empty} --out {out}.html
report {file} --out {out}.html
report {experiment} --out {file}/sub.html
report {experiment} --out {texts}
report {experiment} --out ""
report {scores} --out {scores}/results.html
report {run} --out {run}/summary.html
report {experiment} --out {out}.html --markdown {out}.json
convert
convert {none} {out}
convert {empty} {out}
convert {file} {out}
convert {model} {out} --strength x
convert {model} {out} --layers 0-1000000000000
convert {model} {notes}
bench no_such_benchmark
bench solve --threads 0
bench solve --threads x
recipes extra
""".strip().splitlines()
