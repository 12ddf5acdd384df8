"""LUCID and PaTH inside torch: opcheck, compile, export, vmap, layouts, modes, meta device, memory, derivatives."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from lucid_attention import lucid_attention
from lucid_attention.ops.path.api import lucid_path_attention, path_attention, path_op
from lucid_attention.ops.path.decode import keys_at_end

from . import cases
from .path_cases import NEW, OLD, OPERATORS, PathCase, evaluate
from .path_cases import call as path_call
from .test_layouts import transposed
from .test_memory import largest_allocation

B, H, S = 2, 2, 5
MASK = torch.arange(7) >= torch.tensor([[0], [2]])
BORDERS = torch.tensor([0, 2, 7], dtype=torch.int32)


def options(kind: str, length: int = 7) -> dict[str, Any]:
    mask = {"key_mask": torch.arange(length) >= torch.tensor([[0], [length // 3]])}
    return {
        "plain": {},
        "mask": mask,
        "past": {},
        "packed": {"cu_seqlens": torch.tensor([0, length // 3, length], dtype=torch.int32)},
        "qk": {"norm": "qk"},
        "row_max": {"norm": "row_max", **mask},
    }[kind]


KINDS = ("plain", "mask", "past", "packed")
NORMS = [("lucid", "qk"), ("lucid", "row_max")]
ALL = [*OPERATORS, "lucid"]
every_operator = pytest.mark.parametrize("operator", ALL)
every_case = pytest.mark.parametrize(("operator", "kind"), [*product(ALL, KINDS), *NORMS])
mapped = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")


def call(operator: str, tensors: dict[str, Tensor], **options: Any) -> Tensor:
    """`lucid_attention` with step sizes, or an operator of PaTH."""
    if operator != "lucid":
        return path_call(operator, tensors, **options)
    return cases.call(lucid_attention, {n: x for n, x in tensors.items() if n not in ("w", "inverse_norms")}, **options)


def problem(operator: str, kind: str, length: int = 7, sharpness: bool = True, E: int = 3) -> dict[str, Tensor]:
    case = PathCase(T=length, B=1 if kind == "packed" else B, G=2, S=S if kind == "past" else 0, D=4, E=E)
    tensors = case.tensors("lucid_path" if operator == "lucid" else operator, sharpness=sharpness)
    unused = ("w", "inverse_norms") if operator == "lucid" else ()
    return {name: x.requires_grad_() for name, x in tensors.items() if name not in unused}


def gradients(output: Tensor, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
    weight = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
    return torch.autograd.grad(output, list(inputs.values()), weight)


def op_arguments(name: str, operator: str) -> tuple[Any, ...]:
    """q, k, v, w, beta, past, sharpness, key_mask, cu_seqlens, scale, sharpness as a number, whether it solves."""
    tensors = PathCase(T=7, B=1 if name == "packed" else B, G=2, S=S, D=4).tensors("lucid_path")
    q, k, v, w, beta, *old = (tensors[n] for n in (*NEW, *OLD))
    if name == "bfloat16":
        q, k, v = (x.bfloat16() for x in (q, k, v))
        w, beta = w.float(), beta.float()
    past = old if "past" in name else (None, None, None)
    if operator == "path":
        past = (*past[:2], None)
    mask = {"packed": MASK[1:], "past and mask": torch.cat([MASK[:, :5], MASK], 1)}.get(name)
    borders = BORDERS if name == "packed" else None
    learned = operator != "path" and name in ("packed", "past and mask")
    sharpness = torch.tensor([[1.0, 3.0], [2.0, 4.0]]).double()[: len(k)] if learned else None
    rest = mask, borders, 0.5, 0.0 if learned else 2.0, operator != "path"
    return (None if operator == "precondition" else q, k, v, w, beta, *past, sharpness, *rest)


def differentiable(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        x.clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments
    )


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("name", ["plain", "past and mask", "packed", "bfloat16"])
def test_the_operator_and_its_backward_pass_opcheck(name: str, operator: str) -> None:
    arguments = op_arguments(name, operator)
    if operator != "lucid_path" or name == "past and mask":
        torch.library.opcheck(path_op.forward, differentiable(arguments))
    o, lse, y = path_op.forward(*arguments)
    do, dy = (torch.ones_like(x) if x.numel() else None for x in (o, y))
    needed = [isinstance(x, Tensor) for x in arguments[:9]]
    torch.library.opcheck(path_op.backward, (do, None, dy, o, lse, y, *arguments, needed))


@pytest.mark.parametrize(("operator", "kind"), [*product(("lucid", "lucid_path"), KINDS), *NORMS])
def test_a_compiled_call_equals_the_plain_one_and_new_lengths_do_not_recompile(
    operator: str, kind: str, dynamo: Any
) -> None:
    counter = CompileCounterWithBackend("aot_eager")

    def function(tensors: dict[str, Tensor], **options: Any) -> Tensor:
        return call(operator, tensors, **options)

    compiled = torch.compile(function, backend=counter, fullgraph=True)
    for length in (7, 9, 20, 70):
        inputs, extra = problem(operator, kind, length), options(kind, length)
        expected, output = function(inputs, **extra), compiled(inputs, **extra)
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(gradients(output, inputs), gradients(expected, inputs))
    # One graph for the first length, one for any other.
    assert counter.frame_count <= 2


def test_moving_compiles_with_gradients(dynamo: Any) -> None:
    inputs = problem("path", "past", 7)
    arguments = [inputs[name] for name in ("k", "w", "beta")]
    compiled = torch.compile(keys_at_end, backend="aot_eager", fullgraph=True)
    output, expected = (fn(*arguments, past=inputs["k_past"]) for fn in (compiled, keys_at_end))
    torch.testing.assert_close(output, expected)
    leaves = {name: inputs[name] for name in ("k", "w", "beta", "k_past")}
    torch.testing.assert_close(gradients(output, leaves), gradients(expected, leaves))


class Attention(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        options: dict[str, Any] = {"key_mask": mask, "sharpness": 4.0}
        lucid = lucid_attention(q, k, v), lucid_attention(q, k, v, **options)
        return path_attention(q, k, v, w, beta), lucid_path_attention(q, k, v, w, beta, **options), *lucid


def test_an_exported_program_runs_at_other_lengths() -> None:
    def arguments(length: int) -> tuple[Tensor, ...]:
        tensors = problem("path", "plain", length)
        return (*(x.detach() for x in tensors.values()), options("mask", length)["key_mask"])

    T = torch.export.Dim("T", min=2, max=4096)
    program = torch.export.export(Attention(), arguments(7), dynamic_shapes=(*[{2: T}] * 5, {1: T}))
    for length in (23, 100):
        given = arguments(length)
        torch.testing.assert_close(program.module()(*given), Attention()(*given))


def loop_and_map(function: Any, inputs: dict[str, Tensor]) -> None:
    """Both outputs and all gradients, mapped over the first dimension of every tensor."""
    stacks = {name: torch.stack([x, 0.8 * x, 0.5 * x]).detach().requires_grad_() for name, x in inputs.items()}

    def positional(*values: Tensor) -> Tensor:
        return function(dict(zip(stacks, values, strict=True)))

    output = torch.vmap(positional)(*stacks.values())
    expected = torch.stack([positional(*one) for one in zip(*stacks.values(), strict=True)])
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(gradients(output, stacks), gradients(expected, stacks))


@mapped
@every_case
def test_vmap_equals_a_loop_with_its_gradients(operator: str, kind: str) -> None:
    loop_and_map(lambda tensors: call(operator, tensors, **options(kind)), problem(operator, kind))


@mapped
@every_operator
def test_vmap_over_one_of_the_inputs_equals_a_loop(operator: str) -> None:
    inputs = problem(operator, "past")
    for name, x in inputs.items():
        stack = torch.stack([x, 0.8 * x], -1).detach().requires_grad_()

        def function(each: Tensor, name: str = name) -> Tensor:
            return call(operator, inputs | {name: each})

        output, expected = torch.vmap(function, -1)(stack), torch.stack([function(each) for each in stack.unbind(-1)])
        torch.testing.assert_close(output, expected)
        leaves = inputs | {name: stack}
        torch.testing.assert_close(gradients(output, leaves), gradients(expected, leaves))


@every_operator
def test_vmap_over_packed_borders_is_refused(operator: str) -> None:
    tensors, borders = problem(operator, "packed"), torch.tensor([[0, 2, 7], [0, 3, 7]])
    with pytest.raises(ValueError, match="cu_seqlens cannot be mapped by vmap"):
        torch.vmap(lambda each: call(operator, tensors, cu_seqlens=each))(borders)


def reversed_storage(x: Tensor) -> Tensor:
    """Strides in the reverse order."""
    return x.permute(*reversed(range(x.ndim))).contiguous().permute(*reversed(range(x.ndim)))


def expanded(x: Tensor) -> Tensor:
    """One head for all: stride zero."""
    return x[:, :1].expand(x.shape)


def spaced(x: Tensor) -> Tensor:
    """Neighbouring features are not neighbours in memory."""
    return torch.stack([x, torch.full_like(x, float("nan"))], -1)[..., 0]


@pytest.mark.parametrize("layout", [transposed, reversed_storage, expanded, spaced])
@pytest.mark.parametrize("kind", ["plain", "past", "mask"])
@every_operator
def test_the_layout_of_the_inputs_does_not_matter(operator: str, kind: str, layout: Any) -> None:
    """Whole leaves and E = D: nothing is filled up, so nothing is copied on the way to torch's kernels."""
    length = 128
    inputs = {name: x.detach() for name, x in problem(operator, kind, length, sharpness=False, E=4).items()}
    strange = {name: layout(x) for name, x in inputs.items()}
    dense = {name: x.contiguous() for name, x in strange.items()}
    weight = layout(torch.randn(B, H if operator == "precondition" else 2 * H, length, 4).double())

    def run(tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
        leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
        out = call(operator, leaves, **options(kind, length))
        return out, *torch.autograd.grad(out, list(leaves.values()), weight)

    torch.testing.assert_close(run(strange), run(dense))


@every_case
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_output_is_the_same(mode: Any, operator: str, kind: str) -> None:
    inputs = problem(operator, kind)
    expected = call(operator, inputs, **options(kind))
    assert expected.requires_grad
    with mode():
        output = call(operator, inputs, **options(kind))
    assert not output.requires_grad
    assert output.is_inference() == (mode is torch.inference_mode)
    torch.testing.assert_close(output.clone(), expected.detach(), rtol=0, atol=0)


@every_case
def test_on_the_meta_device_only_shapes_are_computed(operator: str, kind: str) -> None:
    inputs = problem(operator, kind)
    expected = call(operator, inputs, **options(kind))
    extra = {name: x.to("meta") if isinstance(x, Tensor) else x for name, x in options(kind).items()}
    output = call(operator, {name: x.detach().to("meta") for name, x in inputs.items()}, **extra)
    assert (output.shape, output.dtype) == (expected.shape, expected.dtype)


@every_case
def test_the_reference_has_second_derivatives_and_other_implementations_refuse_them(operator: str, kind: str) -> None:
    inputs, extra = problem(operator, kind, 4), options(kind, 4)

    def reference(*values: Tensor) -> Tensor:
        return call(operator, dict(zip(inputs, values, strict=True)), **extra, impl="reference")

    assert torch.autograd.gradgradcheck(reference, list(inputs.values()), atol=1e-4, fast_mode=True)
    for x in inputs.values():
        (dx,) = torch.autograd.grad(call(operator, inputs, **extra).square().sum(), x, create_graph=True)
        # A plain read-out of LUCID is torch's own, which refuses in its own words.
        torchs = "|derivative.*not implemented" if operator == "lucid" else ""
        with pytest.raises(RuntimeError, match=r"no second derivative.*impl='reference'" + torchs):
            dx.sum().backward()


@every_case
def test_a_gradient_asked_for_alone_or_expanded_is_the_one_asked_for_with_the_others(operator: str, kind: str) -> None:
    inputs, extra = problem(operator, kind, 20), options(kind, 20)
    o = call(operator, inputs, **extra)
    together = torch.autograd.grad(o, list(inputs.values()), torch.ones_like(o))
    for name, expected in zip(inputs, together, strict=True):
        only = {other: x.detach().requires_grad_(other == name) for other, x in inputs.items()}
        o = call(operator, only, **extra)
        o.backward(o.new_ones(1).expand(o.shape))
        torch.testing.assert_close(only[name].grad, expected, rtol=1e-11, atol=1e-11)
        assert all(x.grad is None for other, x in only.items() if other != name)


@every_operator
def test_forward_mode_is_right_in_the_reference_and_refused_elsewhere(operator: str) -> None:
    """Torch drops tangents at custom operators without a word."""
    tensors = {name: x.detach() for name, x in problem(operator, "mask").items()}
    for name, x in tensors.items():
        tangent = torch.randn_like(x)

        def of(x: Tensor, impl: str, name: str = name) -> Tensor:
            return call(operator, tensors | {name: x}, impl=impl, **options("mask"))

        _, forward = torch.func.jvp(lambda x, of=of: of(x, "reference"), (x,), (tangent,))
        difference = (of(x + 1e-6 * tangent, "blockwise") - of(x - 1e-6 * tangent, "blockwise")) / 2e-6
        assert cases.error(forward, difference) < 1e-6, name
        with pytest.raises(RuntimeError, match=r"no forward-mode derivative.*impl='reference'"):
            torch.func.jvp(lambda x, of=of: of(x, "blockwise"), (x,), (tangent,))


T = 2800
LONG: dict[str, tuple[PathCase, dict[str, Any]]] = {
    "plain": (PathCase(T=T, H=1, G=2, D=4, E=3), {}),
    "masked": (PathCase(T=T, H=1, D=4, E=4), {"key_mask": torch.arange(T)[None] >= 500}),
    "past": (PathCase(T=2000, S=2000, H=1, D=4, E=4), {}),
    "packed": (PathCase(T=T, H=1, D=4, E=4), {"cu_seqlens": torch.tensor([0, 2300, 2301, T])}),
}


@pytest.mark.parametrize("kind", LONG)
def test_no_square_tensor_is_made(kind: str) -> None:
    case, extra = LONG[kind]
    tensors = case.tensors("lucid_path", torch.float32)
    weight = case.weight("lucid_path")
    largest = largest_allocation(lambda: evaluate(path_call, "lucid_path", tensors, weight, **extra))
    assert largest < 4 * case.T * (case.S + case.T) / 8


@pytest.mark.parametrize("kind", LONG)
def test_what_is_kept_for_the_backward_pass_is_linear(kind: str) -> None:
    case, extra = LONG[kind]
    tensors = {name: x.requires_grad_() for name, x in case.tensors("lucid_path", torch.float32).items()}
    kept = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() / 4
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        call("lucid_path", tensors, **extra)
    per_token = sum(kept.values()) / (case.S + case.T)
    assert 4 * case.D <= per_token <= 40 * case.D
