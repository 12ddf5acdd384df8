"""vmap for operators whose tensors all start with a batch dimension: the mapped dimension is folded into the batch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def fold_vmap(op: Any, unbatched: Sequence[str] = ()) -> None:
    """Register a vmap rule for a custom operator. Arguments named in `unbatched` cannot be mapped."""
    names = [argument.name for argument in op._opoverload._schema.arguments]

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        size = info.batch_size

        def fold(name: str, x: Any, dim: int | None) -> Any:
            if not isinstance(x, Tensor):
                return x
            if name in unbatched:
                if dim is not None:
                    raise ValueError(f"{name} cannot be mapped by vmap: it describes the whole batch")
                return x
            x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
            return x.flatten(0, 1)

        # Arguments at their defaults may be left out at the end.
        given = zip(names[: len(args)], args, in_dims, strict=True)
        folded = [fold(name, x, dim) for name, x, dim in given]
        outputs = op(*folded)
        # An output that was not asked for is empty and stays so for every mapped element.
        shaped = [x.unflatten(0, (size, -1)) if x.numel() else x.new_empty(size, 0) for x in outputs]
        return tuple(shaped), tuple(0 for _ in shaped)

    torch.library.register_vmap(op, rule)
