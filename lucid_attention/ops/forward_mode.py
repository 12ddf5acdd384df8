"""Forward-mode differentiation, which torch drops at custom operators without a word: refused instead."""

from typing import Any

from torch import Tensor
from torch.autograd import forward_ad


def refuse_forward_mode(*arguments: Any) -> None:
    """Raise if any argument carries a tangent."""
    if forward_ad._current_level < 0:
        return
    if any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in arguments):
        raise RuntimeError(
            "lucid_attention: impl='blockwise' has no forward-mode derivative (torch.func.jvp, jacfwd, hessian). "
            "Use impl='reference', or reverse mode"
        )
