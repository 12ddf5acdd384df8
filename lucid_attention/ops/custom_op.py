"""What torch.library needs of an operator with a hand-written backward: one node for autograd, compile, export, vmap.

`register` makes two operators from plain functions. The plain functions use None for an absent tensor. A registered
operator has fixed outputs, so an absent output, or a gradient that is not needed, is an empty tensor there.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .checks import refuse_sharded_sequence

MaybeTensors = Sequence[Tensor | None]


class Operator(NamedTuple):
    """An operator and its backward, as `torch.library.custom_op` returns them."""

    forward: Any
    backward: Any


def register(
    name: str,
    inputs: str,
    outputs: int,
    *,
    forward: Callable[..., MaybeTensors],
    backward: Callable[[MaybeTensors, MaybeTensors, Sequence[Any], Sequence[bool]], MaybeTensors],
    shapes: Callable[..., MaybeTensors],
    differentiable: int,
    auxiliary: Sequence[int],
    unbatched: Sequence[str] = (),
    replaced: Mapping[int, int] = MappingProxyType({}),
    about: str = "",
) -> Operator:
    """Register `lucid_attention::name` and `lucid_attention::name_backward`.

    Args:
        inputs: the arguments as a schema, such as "Tensor q, Tensor? key_mask, float scale".
        outputs: how many tensors `forward` returns.
        forward: inputs -> outputs.
        backward: (gradients of the outputs, outputs, inputs, needed) -> gradients of the first `differentiable` inputs,
            in the shapes of these inputs. Gradients that are not needed are dropped.
        shapes: inputs -> tensors shaped like the outputs, uninitialised.
        differentiable: how many inputs may have gradients; these are tensors and come first.
        auxiliary: outputs without a gradient.
        unbatched: inputs that vmap cannot map. All other tensors start with a batch dimension.
        replaced: {input: output} for inputs of which the backward reads the shape and dtype only. It gets the output in
            their place, which is saved anyway, so these inputs are not kept for it.
        about: which part of the library this is, for the refusal of a second derivative.
    """
    is_tensor = [argument.split()[0].startswith("Tensor") for argument in inputs.split(", ")]

    def run(*arguments: Any) -> tuple[Tensor, ...]:
        refuse_sharded_sequence()
        return _or_empty(forward(*arguments), arguments)

    def fake(*arguments: Any) -> tuple[Tensor, ...]:
        return _or_empty(shapes(*arguments), arguments)

    def split(arguments: Sequence[Any]) -> tuple[list[Tensor | None], list[Tensor | None], Sequence[Any], list[bool]]:
        douts, outs = (arguments[start : start + outputs] for start in (0, outputs))
        return [present(x) for x in douts], [present(x) for x in outs], arguments[2 * outputs : -1], arguments[-1]

    def run_backward(*arguments: Any) -> tuple[Tensor, ...]:
        douts, outs, values, needed = split(arguments)
        grads = backward(douts, outs, values, needed)
        return _or_empty([grad if need else None for grad, need in zip(grads, needed, strict=True)], values)

    def fake_backward(*arguments: Any) -> tuple[Tensor, ...]:
        *_, values, needed = split(arguments)
        wanted = (x if need else None for x, need in zip(values, needed, strict=False))
        return _or_empty([None if x is None else x.new_empty(x.shape) for x in wanted], values)

    def remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*(output[index] for index in auxiliary))
        ctx.scalars = [x for x, tensor in zip(inputs, is_tensor, strict=True) if not tensor]
        kept = [output[replaced[index]] if index in replaced else x for index, x in enumerate(inputs)]
        ctx.save_for_backward(*output, *(x for x, tensor in zip(kept, is_tensor, strict=True) if tensor))

    def pull_back(ctx: Any, *douts: Tensor | None) -> tuple[Tensor | None, ...]:
        # Read once: activation checkpointing frees saved tensors after the first read.
        saved = ctx.saved_tensors
        tensors, scalars = iter(saved[outputs:]), iter(ctx.scalars)
        values = [next(tensors) if tensor else next(scalars) for tensor in is_tensor]
        needed = list(ctx.needs_input_grad[:differentiable])
        # Autograd fills the gradients of auxiliary outputs with zeros. That of an empty output is empty.
        douts = tuple(None if index in auxiliary else present(x) for index, x in enumerate(douts))
        grads = backward_op(*douts, *saved[:outputs], *values, needed)
        kept = [grad if need else None for grad, need in zip(grads, needed, strict=True)]
        return (*kept, *[None] * (len(is_tensor) - differentiable))

    def refuse(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(
            f"lucid_attention: {about or name} has no second derivative (its backward is written by hand). "
            "Use impl='reference' for double backward: it is dense and made of differentiable torch operations"
        )

    saved = ", ".join([f"Tensor? dout{i}" for i in range(outputs)] + [f"Tensor out{i}" for i in range(outputs)])
    op = torch.library.custom_op(
        f"lucid_attention::{name}", run, mutates_args=(), schema=f"({inputs}) -> ({_tensors(outputs)})"
    )
    backward_op = torch.library.custom_op(
        f"lucid_attention::{name}_backward",
        run_backward,
        mutates_args=(),
        schema=f"({saved}, {inputs}, bool[] needed) -> ({_tensors(differentiable)})",
    )
    op.register_fake(fake)
    op.register_autograd(pull_back, setup_context=remember)
    backward_op.register_fake(fake_backward)
    backward_op.register_autograd(refuse, setup_context=lambda ctx, inputs, output: None)
    for registered in (op, backward_op):
        _fold_vmap(registered, unbatched)
    return Operator(op, backward_op)


def _tensors(count: int) -> str:
    return ", ".join(["Tensor"] * count)


def _or_empty(tensors: MaybeTensors, arguments: Sequence[Any]) -> tuple[Tensor, ...]:
    like = next(x for x in arguments if isinstance(x, Tensor))
    return tuple(like.new_empty(0) if x is None else x for x in tensors)


def present(x: Tensor | None) -> Tensor | None:
    """None for the empty tensor that represents an absent one."""
    return None if x is None or x.numel() == 0 else x


def _fold_vmap(op: Any, unbatched: Sequence[str]) -> None:
    """Fold the dimension that vmap maps into the batch dimension of every tensor."""
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

        outputs = op(*(fold(name, x, dim) for name, x, dim in zip(names, args, in_dims, strict=True)))
        # An absent output is empty for every mapped element.
        shaped = [x.unflatten(0, (size, -1)) if x.numel() else x.new_empty(size, 0) for x in outputs]
        return tuple(shaped), tuple(0 for _ in shaped)

    torch.library.register_vmap(op, rule)


def refuse_forward_mode(*arguments: Any) -> None:
    """Raise if an argument carries a tangent: torch drops tangents at custom operators silently."""
    if forward_ad._current_level < 0:
        return
    if any(
        isinstance(x, Tensor) and x.is_floating_point() and forward_ad.unpack_dual(x).tangent is not None
        for x in arguments
    ):
        raise RuntimeError(
            "lucid_attention: impl='blockwise' and impl='triton' have no forward-mode derivative "
            "(torch.func.jvp, jacfwd, hessian). Use impl='reference', or reverse mode"
        )
