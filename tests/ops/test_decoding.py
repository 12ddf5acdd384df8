"""The two ways from scores to weights in a decoding step: single passes, and torch's softmax where scores are many."""

import pytest
import torch
import torch.nn.functional as F

from lucid_attention.ops.lucid.decode import inverse_key_norms
from lucid_attention.ops.path.decode import identity_factors, path_decode
from lucid_attention.ops.softmax import one_token as decoding

B, H, G, S, D, E = 2, 2, 3, 17, 4, 5


def tensors() -> tuple[torch.Tensor, ...]:
    q, v, y = (torch.randn(B, n, t, d).double() for n, t, d in ((H * G, 1, D), (H, 1, E), (H, S, E)))
    return q, torch.randn(B, H, S + 1, D).double() + 1, v, y


@pytest.mark.parametrize("lucid", [False, True], ids=["path", "lucid_path"])
def test_a_path_step_is_the_same_by_torchs_softmax(lucid, monkeypatch):
    q, k, v, y = tensors()
    w, beta = F.normalize(torch.randn(B, H, 1, D).double(), dim=-1), torch.rand(B, H, 1).double()
    inverse_norms = inverse_key_norms(k) if lucid else None
    arguments = (q, k, v, w, beta, y, identity_factors(k), S - 3)
    expected = path_decode(*arguments, inverse_norms=inverse_norms)
    monkeypatch.setattr(decoding, "CACHED_SCORES", 0)
    torch.testing.assert_close(path_decode(*arguments, inverse_norms=inverse_norms), expected)
