"""How much memory there is."""

from pathlib import Path

# Where a container's limit of memory is, in bytes or "max".
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


def machine_memory() -> int:
    """Memory that this process can have at most, in bytes: of its GPU if there is one, else of the machine."""
    import psutil
    import torch

    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[1])
    total = int(psutil.virtual_memory().total)
    try:
        return min(total, int(CONTAINER_LIMIT.read_text()))
    except (OSError, ValueError):
        return total


def gigabytes(size: int) -> str:
    """A number of bytes, for messages."""
    return f"{size / 1e9:,.1f} GB"
