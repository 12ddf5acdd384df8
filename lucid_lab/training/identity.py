"""What a run was trained on: hashes of its data and of the checkpoint that it started from.

A recipe names both by their paths. Other content at the same path makes another run, which must not be resumed.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from lucid_attention.files import UnreadableFile, read_json
from lucid_attention.models.checkpoint import weight_files

from ..data import DataError
from ..data.shards import file_hash, read_manifest
from .inputs import token_folder_path
from .recipe import Recipe

INPUTS = "inputs.json"


def input_hashes(recipe: Recipe) -> dict[str, str]:
    """Hashes of "data" and "start", each only if it is in files that are there."""
    hashes = {"data": _data_hash(recipe), "start": _start_hash(recipe)}
    return {name: digest for name, digest in hashes.items() if digest}


def changed_inputs(recorded: Path, hashes: dict[str, str]) -> list[str]:
    """The names in `hashes` whose hash differs from that in the file `recorded`. All pass if there is no such file."""
    try:
        before = read_json(recorded)
    except FileNotFoundError:
        return []
    return [name for name, digest in hashes.items() if before.get(name) != digest]


def _data_hash(recipe: Recipe) -> str:
    if recipe.data.endswith(".jsonl"):
        file = Path(recipe.data)
        return file_hash(file) if file.is_file() else ""
    folder = token_folder_path(recipe)
    if folder is None:
        return ""
    try:
        manifest = read_manifest(folder)
    except DataError:
        return ""
    # Opening the folder compares the shards with these hashes.
    shards = [[shard[key] for key in ("split", "sha256", "ends_sha256")] for shard in manifest["shards"]]
    return _hash([manifest["tokenizer"]["sha256"], shards])


def _start_hash(recipe: Recipe) -> str:
    if recipe.start is None or not (Path(recipe.start) / "config.json").is_file():
        return ""
    try:
        config = read_json(Path(recipe.start) / "config.json")
    except UnreadableFile:
        return ""
    # The same model may be written again by another version of Transformers.
    config.pop("transformers_version", None)
    return _hash([config, *(file_hash(path) for path in weight_files(Path(recipe.start)))])


def _hash(content: list[Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
