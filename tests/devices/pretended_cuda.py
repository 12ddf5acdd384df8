"""Tensors that pretend to be on a GPU: they show mistakes with devices, and operations that wait for the device.

A `Pretended` tensor says that it is on cuda:0 and holds its data on the CPU. To torch's dispatcher it is a meta tensor:
no kernel can reach its data behind our back, and autograd needs no CUDA. Every operation comes to `__torch_dispatch__`,
which refuses what CUDA refuses (tensors on two devices), counts what makes the host wait, and computes on the CPU. The
bodies of this package's operators really run, on pretended tensors again.

    with pretending() as waits:
        o = lucid_attention(*(pretended(x) for x in (q, k, v)))
    assert waits == []
"""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._library.custom_ops import OPDEFS
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

import lucid_attention

CUDA = torch.device("cuda:0")
aten = torch.ops.aten

# Operations of which the host needs a value, or the shape of the result: on CUDA they wait for the device.
WAITING = {
    aten._local_scalar_dense,
    aten.equal,
    aten.nonzero,
    aten.masked_select,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
    aten.bincount,
    aten._linalg_check_errors,
}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
COPYING = {aten.copy_, aten._to_copy}
PACKAGE = Path(lucid_attention.__file__).parent
_waits: list[list[str]] = []


class WrongDevice(RuntimeError):
    """An operation on tensors of two devices, which CUDA refuses."""


class Pretended(Tensor):
    """A tensor of the CPU that says that it is on cuda:0."""

    data_on_cpu: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, data: Tensor) -> "Pretended":
        wrapper = Tensor._make_wrapper_subclass(
            cls,
            data.shape,
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            device="meta",
            requires_grad=data.requires_grad,
        )
        wrapper.data_on_cpu = data.detach()
        return wrapper

    @property
    def device(self) -> torch.device:
        return CUDA

    is_cuda = property(lambda self: True)
    is_meta = property(lambda self: False)

    def get_device(self) -> int:
        return 0

    def data_ptr(self) -> int:
        return self.data_on_cpu.data_ptr()

    def tolist(self) -> Any:
        _wait("tolist")
        return self.data_on_cpu.tolist()

    def numpy(self, **options: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def __repr__(self) -> str:
        # Torch would print values, for which it waits.
        return f"Pretended({list(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "Pretended":
        memo[id(self)] = copy = Pretended(self.data_on_cpu.clone())
        return copy

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "lucid_attention":
            # As on CUDA: its body runs below autograd, and makes tensors of its own.
            with _factories():
                return OPDEFS[func._schema.name]._init_fn(*args, **kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            # Below autograd such a function comes whole. What it is made of may wait.
            parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        packet = func.overloadpacket
        _refuse_two_devices(func, args, kwargs)
        _count(func, packet, args, kwargs)
        target = kwargs.get("device")
        kept = target is None or torch.device(target).type in (CUDA.type, "meta")
        out = func(*_unwrapped(args), **_unwrapped({**kwargs, **({} if target is None else {"device": "cpu"})}))
        if packet is aten._to_copy and kept and target is not None:
            # On the CPU this may have been no copy.
            out = out.clone() if out is _unwrapped(args[0]) else out
        if not kept:
            return out
        out = tree_map(lambda x: Pretended(x) if isinstance(x, Tensor) else x, out)
        return return_and_correct_aliasing(func, args, kwargs, out)


def _unwrapped(tree: Any) -> Any:
    return tree_map(lambda x: x.data_on_cpu if isinstance(x, Pretended) else x, tree)


def _refuse_two_devices(func: Any, args: Any, kwargs: Any) -> None:
    """CUDA takes numbers that are tensors on the CPU, and copies between devices; nothing else."""
    if func.overloadpacket in COPYING | INDEXING:
        return
    elsewhere = [x for x in tree_leaves((args, kwargs)) if type(x) in (Tensor, nn.Parameter) and x.ndim > 0]
    if elsewhere:
        raise WrongDevice(f"{func}: expected all tensors on {CUDA}, got one of shape {list(elsewhere[0].shape)} on cpu")


def _count(func: Any, packet: Any, args: Any, kwargs: Any) -> None:
    if packet in WAITING or (packet is aten.repeat_interleave and kwargs.get("output_size") is None):
        _wait(str(packet))
    if packet is aten._to_copy and kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu":
        _wait("copy to the host")
    if packet is aten.copy_ and len({isinstance(x, Pretended) for x in args[:2]}) == 2 and args[1].ndim > 0:
        _wait("copy between host and device")
    if packet in INDEXING:
        indices = [x for x in args[1] if isinstance(x, Tensor)]
        if any(x.dtype in (torch.bool, torch.uint8) for x in indices):
            _wait("boolean index")
        if any(not isinstance(x, Pretended) for x in indices):
            _wait("index from the host")


def _wait(what: str) -> None:
    """Write down what waits, and the line of the package that asked for it."""
    if not _waits:
        return
    frames = [frame for frame in traceback.extract_stack() if not _is_machinery(Path(frame.filename))]
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(PACKAGE)]
    frame = (ours or frames)[-1]
    _waits[-1].append(f"{what}: {Path(frame.filename).name}, {frame.name}: {frame.line}")


def _is_machinery(file: Path) -> bool:
    return file == Path(__file__) or file.is_relative_to(Path(torch.__file__).parent)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The formula. Torch's own would make its causal mask on the device of the dispatcher, meta."""
    assert not dropout_p
    groups = q.shape[1] // k.shape[1]
    assert groups == 1 or enable_gqa
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones_like(scores, dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        scores = scores + attn_mask
    elif attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    return scores.softmax(-1) @ v


class _PretendedFactories(TorchFunctionMode):
    """Tensors that are made on cuda, or moved there, are pretended ones."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.pin_memory:
            return args[0]
        if func is Tensor.__setitem__ and isinstance(args[0], Pretended) and not isinstance(args[2], Tensor):
            # Torch would make a tensor of the number on the device of the dispatcher, meta.
            args = *args[:2], Pretended(torch.tensor(args[2], dtype=args[0].dtype))
        if func is Tensor.to:
            return self._to(*args, **kwargs)
        if func is F.scaled_dot_product_attention and isinstance(args[0], Pretended):
            return _attention(*args, **kwargs)
        if not _is_cuda(kwargs.get("device")):
            return func(*args, **kwargs)
        kwargs["device"] = "cpu"
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Pretended)]
        if tensors:
            # `x.new_empty(..., device=x.device)`, `torch.zeros_like(x, device=x.device)`
            del kwargs["device"]
            return func(*args, **kwargs)
        if func in (torch.tensor, torch.as_tensor, torch.from_numpy):
            _wait(f"copy to the device, {resolve_name(func)}")
        return Pretended(func(*args, **kwargs))

    def _to(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        device = kwargs.get("device", args[0] if args and isinstance(args[0], (str, torch.device)) else None)
        if not _is_cuda(device):
            return Tensor.to(x, *args, **kwargs)
        kwargs.pop("device", None)
        rest = args[1:] if args and isinstance(args[0], (str, torch.device)) else args
        if not isinstance(x, Pretended):
            if not kwargs.get("non_blocking"):
                _wait("copy to the device")
            x = Pretended(x)
        kwargs.pop("non_blocking", None)
        return Tensor.to(x, *rest, **kwargs) if rest or kwargs else x


class _NoMeta(TorchDispatchMode):
    """Tensors that torch itself makes for a pretended one, such as zeros for a gradient, are pretended ones."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made_here = not any(isinstance(x, Tensor) for x in tree_leaves((args, kwargs)))
        if made_here and kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta":
            return Pretended(func(*args, **{**kwargs, "device": "cpu"}))
        return func(*args, **kwargs)


@contextmanager
def _factories() -> Iterator[None]:
    with _PretendedFactories(), _NoMeta():
        yield


def _is_cuda(device: Any) -> bool:
    return isinstance(device, (str, torch.device)) and torch.device(device).type == CUDA.type


def pretended(x: Tensor) -> Tensor:
    """A copy of x on the pretended GPU."""
    return Pretended(x.detach().clone()).requires_grad_(x.requires_grad)


def real(x: Tensor) -> Tensor:
    """The data of a pretended tensor."""
    assert isinstance(x, Pretended), f"expected a tensor on {CUDA}, got one on {x.device}"
    return x.data_on_cpu


def moved(module: nn.Module) -> nn.Module:
    """The module with its weights and buffers on the pretended GPU, changed in place."""
    new: dict[int, Tensor] = {}
    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is not None:
                new.setdefault(id(weight), nn.Parameter(Pretended(weight.detach()), requires_grad=weight.requires_grad))
                part._parameters[name] = new[id(weight)]
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = Pretended(buffer.detach())
    return module


@contextmanager
def pretending() -> Iterator[list[str]]:
    """Tensors can be made on cuda:0. Gives a list that gets a line for every wait for the device."""
    _waits.append([])
    run = torch.autograd._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        # Torch leaves a function mode for the time of a function. Checkpointed layers run inside of this one.
        with _factories():
            return run(*args, **kwargs)

    try:
        with _factories(), patch("torch.autograd._engine_run_backward", run_backward):
            yield _waits[-1]
    finally:
        _waits.pop()
