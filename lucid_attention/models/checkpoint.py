"""A checkpoint on disk: is it one?"""

from pathlib import Path

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def check_checkpoint(folder: Path) -> None:
    """Refuse what is no local folder with config.json and weights."""
    if not folder.is_dir():
        raise ValueError(
            f"CHECKPOINT must be a local folder, got {str(folder)!r}, which is not one. A model of the hub can be "
            f"fetched with: hf download {folder} --local-dir FOLDER"
        )
    if not (folder / "config.json").is_file():
        inside = folder / "model"
        hint = f". Did you mean {str(inside)!r}?" if (inside / "config.json").is_file() else ""
        raise ValueError(f"CHECKPOINT must hold a config.json, which {str(folder)!r} does not{hint}")
    if not weight_files(folder):
        raise ValueError(f"CHECKPOINT must hold weights ({', '.join(WEIGHTS)}), which {str(folder)!r} does not")


def weight_files(folder: Path) -> list[Path]:
    """The files of the weights, sorted."""
    return sorted(path for pattern in WEIGHTS for path in folder.glob(pattern))
