"""What the Triton kernels are compiled for: never for a length, and without faults for a GPU that is not here."""

import importlib
import re
from functools import partial
from pathlib import Path

import pytest
import torch

from lucid_attention.ops import dispatch

pytestmark = [
    pytest.mark.skipif(not dispatch.installed(), reason="Triton has wheels for Linux only"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]


@pytest.fixture
def offline():
    """tools/gpu_offline.py."""
    return importlib.import_module("tools.gpu_offline")


def test_another_length_compiles_nothing_new(offline, monkeypatch):
    found = []
    for T, S in ((1024, 300), (1777, 16), (1, 1), (70000, 4096)):
        monkeypatch.setattr(offline, "T", T)
        monkeypatch.setattr(offline, "S", S)
        operators = [partial(operator, torch.bfloat16, 128) for operator in offline.OPERATORS]
        found.append({launch for call in operators for launch in offline.recorded("sm_90", call)})
    assert len(found[0]) > 10
    # One chunk has no later rows, and so fewer kernels; it has no others.
    assert found[0] == found[1] == found[3]
    assert found[2] <= found[0]
    for launch in found[0]:
        types = dict(launch.signature)
        numbers = [p for p in launch.kernel.params if types.get(p.name) == "i32"]
        assert all(p.do_not_specialize for p in numbers), launch.name


def test_a_million_tokens_fit_into_the_grids(offline, monkeypatch):
    monkeypatch.setattr(offline, "T", 2**20)
    monkeypatch.setattr(offline.triton_pass, "BYTES", 2**60)
    for operator in offline.OPERATORS:
        for call in offline.calls("sm_90", partial(operator, torch.bfloat16, 64)):
            first, *others = call.grid
            assert first < 2**31, call.kernel.__name__
            assert max(others, default=1) <= 65535, call.kernel.__name__


def test_the_launches_do_not_depend_on_data(offline):
    """They are recorded on the meta device, which has none; twice the same."""
    for operator in offline.OPERATORS:
        once, twice = (
            [(call.kernel, call.grid) for call in offline.calls("sm_90", partial(operator, torch.float32, 64))]
            for _ in range(2)
        )
        assert once == twice


def test_a_kernel_compiles_without_faults_for_an_absent_gpu(offline):
    launches = offline.recorded("sm_90", partial(offline.plain, torch.bfloat16, 64))
    launch, *_ = (launch for launch in launches if launch.name == "update_kernel")
    result = offline.compiled(launch, "sm_90")
    assert offline.faults(result, "sm_90") == []
    assert result.instruction == "wgmma.mma_async"
    assert 100 < result.issued < 1000


def test_faults_of_a_compiled_kernel_are_found(offline):
    right = {
        "registers": 9,
        "stack": 0,
        "shared": 9,
        "tensor_columns": 9,
        "instruction": "mma.sync",
        "has_product": True,
    }
    assert offline.faults(offline.Compiled(**right), "sm_89") == []
    for wrong in (
        {"stack": 8}, {"shared": 102400}, {"tensor_columns": 1024}, {"instruction": ""}, {"two_bytes": 81},
        {"zero_products": 1}, {"late_copies": 1},
    ):  # fmt: skip
        assert len(offline.faults(offline.Compiled(**(right | wrong)), "sm_89")) == 1


SASS = """
.L_x_0:
        /*0f30*/                   DEPBAR.LE SB0, {pending} ;
.L_x_1:
        /*0f40*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*0f50*/               @P1 BRA `(.L_x_1) ;
        /*0f60*/                   LDGSTS.E.BYPASS.128 [R103], desc[UR14][R90.64] ;
        /*0f70*/              @!P1 BRA `(.L_x_0) ;
        /*0f80*/                   EXIT ;
        /*0f90*/                   BRA `(.L_x_1) ;
"""
TTIR = """
    %a = arith.extf %k : tensor<16x16xbf16> to tensor<16x16xf32>
    %b = tt.dot %a, %w, %c, inputPrecision = bf16x3 : tensor<16x16xf32>
    %d = tt.dot %w, %w, %c, inputPrecision = bf16x3 : tensor<16x16xf32>
    %e = tt.dot %k, %k, %c, inputPrecision = tf32 : tensor<16x16xbf16>
"""


def test_machine_code_is_read(offline):
    outer, inner = offline.matrix_loops(SASS.format(pending="0x3"))
    assert [len(loop) for loop in outer] == [5]
    assert [len(loop) for loop in inner] == [2]
    assert not offline.waits_for_all(outer[0])
    (late,), _ = offline.matrix_loops(SASS.format(pending="0x0"))
    assert offline.waits_for_all(late)
    assert offline.zero_products(TTIR) == 1


def test_a_decoding_step_reads_sixteen_bytes_at_a_time(offline):
    launches = offline.recorded("sm_80", partial(offline.step, torch.bfloat16, 128))
    results = [offline.compiled(launch, "sm_80") for launch in launches if launch.name == "step_split_kernel"]
    assert len(results) == 3
    assert all(offline.faults(result, "sm_80") == [] for result in results)


def test_a_kernel_that_spills_gets_all_registers_and_this_is_written_down(offline, monkeypatch, tmp_path):
    module, file = offline.triton_tiles, tmp_path / "triton_tiles.py"
    file.write_text(Path(module.__file__).read_text())
    monkeypatch.setattr(module, "__file__", str(file))
    monkeypatch.setattr(module, "SPILLING", {"sm_89": "another"})
    for name, value in (("OPERATORS", (offline.plain,)), ("DTYPES", (torch.bfloat16,)), ("SIZES", (64,))):
        monkeypatch.setattr(offline, name, value)

    def compiled(launch, architecture):
        spills = launch.name == "update_kernel" and not launch.most_registers
        return offline.Compiled(9, 8 if spills else 0, 9, 9, "mma.sync", True)

    monkeypatch.setattr(offline, "compiled", compiled)
    table, broken = offline.check(["sm_80"], "", print)
    assert broken == 0
    for kernel, entries in table.items():
        for launch, _ in entries["sm_80", "16 bit", 64]:
            assert launch.most_registers == (255 if kernel == "update_kernel" else None)
    kernels = re.search(r"SPILLING.*?^}", file.read_text(), re.DOTALL | re.MULTILINE).group()
    assert re.findall(r'"(\w+)"', kernels) == ["sm_80", "update", "sm_89", "another"]
    compile(file.read_text(), file, "exec")
