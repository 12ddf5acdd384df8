"""Apple's GPUs (MPS): every operation of torch that LUCID uses exists there, and none needs float64.

No such device is at hand: the operations of a pass on a pretended one are compared with torch's own list of kernels.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torchgen
import yaml
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lucid_attention import ATTENTIONS, inverse_key_norms, lucid_attention, lucid_decode, precondition

from . import pretended_cuda
from .pretended_cuda import moved, pretended, pretending

LIST = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
# Kernels for all devices, or made of other operations.
EVERYWHERE = {"CompositeExplicitAutograd", "CompositeImplicitAutograd", "CompositeExplicitAutogradNonFunctional"}


@cache
def with_mps_kernels() -> set[str]:
    """Names such as "add.Tensor"."""
    entries, found = yaml.safe_load(LIST.read_text()), set()
    names = {entry["func"].partition("(")[0]: entry for entry in entries}
    for name, entry in names.items():
        # A structured kernel is that of its "out" form.
        entry = names[entry["structured_delegate"]] if "structured_delegate" in entry else entry
        keys = {
            key.strip() for keys in entry.get("dispatch", {"CompositeImplicitAutograd": ""}) for key in keys.split(",")
        }
        if "MPS" in keys or keys & EVERYWHERE:
            found.add(name)
    return found


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the operations on the pretended device."""
    names: set[str] = set()

    def note(func: Any, packet: Any, args: Any, kwargs: Any) -> None:
        assert not any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in tree_leaves((args, kwargs))), func
        assert kwargs.get("dtype") != torch.float64, func
        names.add(func.name().removeprefix("aten::"))

    monkeypatch.setattr(pretended_cuda, "CUDA", torch.device("mps:0"))
    monkeypatch.setattr(pretended_cuda, "_count", note)
    return names


def check(names: set[str]) -> None:
    assert len(names) > 10
    assert names <= with_mps_kernels(), sorted(names - with_mps_kernels())


def test_the_list_says_what_mps_lacks() -> None:
    assert {"mm", "mm.out", "linalg_solve_triangular.out", "exp_"} <= with_mps_kernels()
    assert not {"linalg_eig", "geqrf"} & with_mps_kernels()


@pytest.mark.parametrize("options", [{}, {"block": 8}, {"block": None}], ids=["causal", "blocks", "one block"])
def test_lucid_uses_operations_that_mps_has(used: set[str], options: dict[str, Any]) -> None:
    q, k, v = (torch.randn(1, heads, 70, 16) for heads in (4, 2, 2))
    mask = torch.ones(1, 70, dtype=torch.bool)
    mask[:, :3] = False
    with pretending():
        inputs = [pretended(x.requires_grad_()) for x in (q, k, v)]
        lucid_attention(*inputs, key_mask=pretended(mask), **options).sum().backward()
        if not options:
            with torch.no_grad():
                q, k, v = inputs
                y = precondition(k[:, :, :-1], v[:, :, :-1])
                lucid_decode(q[:, :, -1:], k, v[:, :, -1:], y, inverse_key_norms(k))
    check(used)


@pytest.mark.parametrize("name", ["lucid_path", "delta", "gla"])
def test_modules_use_operations_that_mps_has(used: set[str], name: str) -> None:
    module = ATTENTIONS[name](32, 4)
    with pretending():
        o, _ = moved(module)(pretended(torch.randn(1, 40, 32)))
        o.sum().backward()
    check(used)
