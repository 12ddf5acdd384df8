"""The chunked loss and its gradients are those of all logits at once."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig

from lucid_attention import LucidConfig, LucidForCausalLM
from lucid_lab.training.loss import summed_cross_entropy, use_chunked_loss

SIZES: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("cap", [None, 2.0], ids=["no cap", "cap"])
@pytest.mark.parametrize("rows", [1, 4, 5, 100])
def test_value_and_gradients_are_those_of_all_logits(rows: int, cap: float | None, bias: bool) -> None:
    h, W, b = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((11, 6), (9, 6), (9,)))
    labels = torch.randint(0, 9, (11,))
    labels[[0, 7]] = -100
    inputs = [h, W, b] if bias else [h, W]
    logits = F.linear(h, W, b if bias else None)
    truth = F.cross_entropy(logits if cap is None else cap * torch.tanh(logits / cap), labels, reduction="sum")
    ours = summed_cross_entropy(h, W, b if bias else None, labels, rows=rows, cap=cap)
    torch.testing.assert_close(ours.double(), truth, rtol=1e-6, atol=0)
    for mine, theirs in zip(torch.autograd.grad(3 * ours, inputs), torch.autograd.grad(3 * truth, inputs), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_in_bfloat16_the_chunked_loss_is_as_exact_as_the_plain_one() -> None:
    h, W = torch.randn(64, 16), torch.randn(50, 16)
    labels = torch.randint(0, 50, (64,))
    truth = torch.autograd.grad(F.cross_entropy(F.linear(h.requires_grad_(), W.requires_grad_()), labels), [h, W])
    low = [x.detach().bfloat16().requires_grad_() for x in (h, W)]
    whole = torch.autograd.grad(F.cross_entropy(F.linear(*low).float(), labels), low)
    ours = torch.autograd.grad(summed_cross_entropy(*low, None, labels, rows=7) / 64, low)
    for mine, theirs, true in zip(ours, whole, truth, strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine.float() - true).norm() <= 1.5 * (theirs.float() - true).norm()


MODELS: dict[str, Any] = {
    "llama": lambda: AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)),
    "tied and capped": lambda: AutoModelForCausalLM.from_config(
        Gemma2Config(**SIZES, final_logit_softcapping=3.0), attn_implementation="eager"
    ),
    "ours": lambda: LucidForCausalLM(LucidConfig(**SIZES)),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("count", [None, 30])
def test_a_model_has_the_same_loss_and_gradients_with_a_chunked_loss(make: Any, count: int | None) -> None:
    model = make()
    ids = torch.randint(0, 37, (2, 12))
    labels = ids.clone()
    labels[0, :3] = -100
    kwargs = {} if count is None else {"num_items_in_batch": count}
    gradients = []
    for _ in range(2):
        model.zero_grad()
        loss = model(input_ids=ids, labels=labels, **kwargs).loss
        loss.backward()
        gradients.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
        use_chunked_loss(model, rows=5)
    for ours, whole in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-4, atol=1e-6)
    assert model(input_ids=ids).logits.shape == (2, 12, 37)
    assert model.generate(ids[:, :3], max_new_tokens=2, do_sample=False).shape[1] >= 4


def test_no_tensor_holds_all_logits() -> None:
    sizes: list[int] = []

    class RecordSizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in (out if isinstance(out, (tuple, list)) else [out]) if hasattr(x, "numel"))
            return out

    h, W = torch.randn(256, 4, requires_grad=True), torch.randn(300, 4, requires_grad=True)
    with RecordSizes():
        summed_cross_entropy(h, W, None, torch.randint(0, 300, (256,)), rows=16).backward()
    assert max(sizes) <= 16 * 300


def test_a_model_without_a_head_is_refused() -> None:
    model = MODELS["llama"]()
    with pytest.raises(ValueError, match="needs a decoder and a head"):
        use_chunked_loss(model.model)
