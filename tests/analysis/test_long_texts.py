"""Long texts: κ and hit rates in blocks are those of dense matrices; devices; progress."""

import json
from pathlib import Path

import pytest
import torch

from lucid_attention.models.decoder.configuration import LucidConfig
from lucid_attention.models.decoder.modeling import LucidForCausalLM
from lucid_lab.analysis import command, layer, matrix
from lucid_lab.analysis.conditioning import condition_number, key_condition_numbers
from lucid_lab.analysis.hit_rate import MEASURES, Query, head_hit_rates
from lucid_lab.analysis.layer import Layer
from lucid_lab.analysis.matrix import KeyMatrix, LikeKeys, may_keep
from lucid_lab.cli import main
from lucid_lab.devices import find_device


def correlated(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64) + 1.5


@pytest.mark.parametrize("options", [{}, {"sharpness": 3.0, "strength": 0.5}, {"norm": "row_max"}])
@pytest.mark.parametrize("kept", [0, 8192])
def test_kappa_in_blocks_is_that_of_the_dense_matrix(
    options: dict[str, object], kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix, "KEPT", kept)
    monkeypatch.setattr(matrix, "BLOCK", 96)
    torch.manual_seed(0)
    k = correlated(500, 8)
    (record,) = key_condition_numbers(k, [430], exact_up_to=0, **options)  # type: ignore[arg-type]
    norm, sharpness = options.get("norm", "key"), options.get("sharpness")
    P = KeyMatrix(LikeKeys(k, norm, sharpness), 500, options.get("strength", 1.0)).dense(430)  # type: ignore[arg-type]
    sizes = torch.linalg.svdvals(P)
    assert record["kappa"] == pytest.approx(condition_number(P), rel=3e-3)
    assert record["largest"] == pytest.approx(sizes[0].item(), rel=2e-3)
    assert record["inverse_norm"] == pytest.approx(1 / sizes[-1].item(), rel=2e-3)
    assert not record["exact"]


def test_hit_rates_in_blocks_are_those_of_dense_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "BLOCK", 32)
    torch.manual_seed(0)
    N, D = 150, 8
    q, k, v = (correlated(1, heads, N, D) for heads in (4, 2, 2))
    queries = [Query(position, ((position // 2, position // 2 + 3),)) for position in range(20, N, 7)]
    A = (q[0] @ k[0].repeat_interleave(2, 0).mT / D**0.5).masked_fill(torch.ones(N, N).triu(1).bool(), -torch.inf)
    A = A.softmax(-1)
    P = torch.stack([KeyMatrix(LikeKeys(k[0, head]), N).dense() for head in range(2)]).repeat_interleave(2, 0)
    W = torch.linalg.solve(P.mT, A.mT).mT
    for numbers in (1 << 24, 5 * 2 * N):
        monkeypatch.setattr(layer, "NUMBERS", numbers)
        records = [
            record
            for head in Layer(0, "lucid", q, k, v, preconditioned=True).heads()
            for record in head_hit_rates(head, queries)
        ]
        assert len(records) == 4 * len(queries)
        for record in records:
            query = next(query for query in queries if query.position == record["query"])
            inside = torch.zeros(N).double()
            inside[slice(*query.spans[0])] = 1
            a, w = A[record["head"], query.position], W[record["head"], query.position]
            total = w.abs().sum()
            expected = [
                (a * inside).sum(),
                (w * inside).sum(),
                (w.abs() * inside).sum() / total,
                -w.clamp(max=0).sum() / total,
            ]
            assert [record[name] for name in MEASURES] == pytest.approx([x.item() for x in expected], abs=1e-12)


def test_blocks_stay_in_the_memory_of_a_gpu_that_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    class Rows:
        device = torch.device("cuda")

        def element_size(self) -> int:
            return 8

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * 10**9, 80 * 10**9))
    assert may_keep(65_536, Rows())  # type: ignore[arg-type]
    assert not may_keep(131_072, Rows())  # type: ignore[arg-type]
    assert not may_keep(65_536, torch.zeros(1, dtype=torch.float64))


def test_a_device_is_found_by_its_name() -> None:
    assert find_device("cpu") == torch.device("cpu")
    assert find_device("auto").type in ("cpu", "cuda", "xpu", "mps")
    for wrong in ("warp", "cuda:99", "meta"):
        with pytest.raises(ValueError, match=f"--device must be auto, cpu, or an accelerator .* got {wrong!r}"):
            find_device(wrong)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    config = LucidConfig(
        vocab_size=200, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16,
    )  # fmt: skip
    LucidForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_long_work_says_what_it_does(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "LONG", 1)
    monkeypatch.setattr(command, "EVERY", 0.0)
    words = ["analyze", str(tiny), "--task", "memory_update", "--length", "1300", "--what", "conditioning,hit_rate"]
    assert main([*words, "--lengths", "1300", "--device", "cpu", "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().err
    assert "running the model over 1300 tokens on cpu" in said
    assert "conditioning: layer 0, key/value head 0, 1300 tokens, ‖P‖, step 1 of at most 200, row 512 of 1300" in said
    assert "hit_rate: layer 0, key/value head 0" in said
    content = json.loads((tmp_path / "out" / "analysis.json").read_text())
    assert "--device cpu" in content["command"]
    assert main([*words, "--device", "warp", "--out", str(tmp_path / "out")]) == 1
    assert "--device must be auto, cpu" in capsys.readouterr().err
