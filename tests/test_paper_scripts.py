"""paper/: a script runs at a tiny scale, the dry run sees what does not fit, and weights of the authors' code load."""

import importlib.util
import json
import math
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from lucid_attention import LucidForCausalLM

PAPER = Path(__file__).parents[1] / "paper"
SCRIPTS = sorted(path.name for path in PAPER.glob("*.sh") if path.name != "settings.sh")
# Those whose steps are not steps of another one.
OWN_STEPS = ["figure2", "figure3", "figure6", "figure7", "table1", "table4", "table6", "text_decoding", "text_hit_rate"]


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"paper_{name}", PAPER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def run_tiny(script: str, folder: Path, arms: str = "lucid") -> Path:
    """Run a script at the tiny scale. Returns the folder of its runs."""
    settings = {"SCALE": "tiny", "ATTENTIONS": arms, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    places = {"OUT": str(folder / "runs"), "DATA": str(folder / "data"), "PYTHONPATH": str(PAPER.parent)}
    words, environment = ["sh", str(PAPER / script)], os.environ | settings | places
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "authors-tiny"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all scripts, which share models."""
    return tmp_path_factory.mktemp("paper")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("script", OWN_STEPS)
def test_a_script_runs_to_its_end(script: str, shared: Path) -> None:
    runs = run_tiny(f"{script}.sh", shared, "lucid_path" if script in ("table4", "figure6") else "lucid")
    assert script == "text_decoding" or list(runs.glob("*.html"))


def test_every_number_of_the_paper_gets_one_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare = module("compare")
    decoding = {"sizes": {"model": "llama", "what": "decoding"}, "ratios": {"lucid": [1.02]}}
    record = {"median_tokens_per_second": 100.0, "records": [decoding]}
    monkeypatch.setattr(compare.Runs, "read", lambda runs, name: record)
    monkeypatch.setattr(compare.Runs, "score", lambda runs, name, task, metric="score": 0.25)
    monkeypatch.setattr(compare.Runs, "loss", lambda runs, name: 2.0)
    monkeypatch.setattr(compare.Runs, "hit_rate", lambda runs, arm, measure: 0.3)
    found = 0
    for table in compare.RULES:
        compare.main(table, compare.Runs(tmp_path, list(compare.PAPER_LENGTHS)))
        rows = json.loads((tmp_path / "compare" / table / "result.json").read_text())["tables"][0]["rows"]
        assert [row for row in rows if row[3] is None] == []
        found += len(rows)
    numbers = tomllib.loads((PAPER / "numbers.toml").read_text())
    assert found == sum(len(section["numbers"]) for section in numbers.values())


def test_a_script_runs_from_text_to_a_page_with_the_papers_numbers(tmp_path: Path) -> None:
    runs = run_tiny("table3.sh", tmp_path)
    rows = json.loads((runs / "compare" / "table3" / "result.json").read_text())["tables"][0]["rows"]
    assert [row[2] for row in rows[-3:]] == [76.6, 55.8, 43.6]
    assert [row[3] is None for row in rows] == [True] * 12 + [False] * 3
    assert "Next to the paper" in (runs / "table3.html").read_text()


@pytest.mark.parametrize("protocol", ["authors", "paper"])
def test_every_training_and_evaluation_fits_80_gb(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = module("costs")
    monkeypatch.setenv("PROTOCOL", protocol)
    plan = costs.Plan(8, 80.0)
    for script in SCRIPTS:
        for line in costs.commands(PAPER / script):
            plan.add(line)
    assert plan.misfits == []
    assert len(plan.recipes) == 58
    tuned = plan.recipes[f"runs/paper/{protocol}-full/models/64k-lucid"]
    path = plan.recipes[f"runs/paper/{protocol}-full/models/2k-path"]
    assert (tuned.learning_rate, tuned.adam_eps, tuned.rope_theta) == (
        5e-6 if protocol == "authors" else 5e-4,
        1e-12,
        64_000,
    )
    assert path.model.get("head_dim", 68) == (64 if protocol == "authors" else 68)


def test_a_training_that_does_not_fit_is_named() -> None:
    costs = module("costs")
    line = next(line for line in costs.commands(PAPER / "table1.sh") if "gemma3_4b" in line)
    assert "--parallel fsdp" in line
    plan = costs.Plan(8, 80.0)
    plan.add(line.replace("--parallel fsdp", "--parallel ddp"))
    assert "does not fit: it needs about 83 GB on each GPU, and 90% of 80 GB can be used" in plan.misfits[0]


# ---------------------------------------------------------------------------------------------------- their weights

THEIRS: dict[str, Any] = {
    "model_type": "llama", "attention_type": "lucid", "which_rmsnorm": "exp_k_norm", "vocab_size": 50,
    "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "tie_word_embeddings": False,
    "use_rope": True, "use_beta": False, "use_forget_gate": False,
}  # fmt: skip
THEIR_PATH: dict[str, Any] = {
    "model_type": "lucid_path_attn", "vocab_size": 50, "hidden_size": 24, "intermediate_size": 32,
    "num_hidden_layers": 2, "num_heads": 4, "num_kv_heads": 2, "norm_eps": 1e-5,
    "use_w_shortconv": False, "use_low_rank_w": False,
}  # fmt: skip


def their_weights(config: dict[str, Any], **more: tuple[int, int]) -> dict[str, Tensor]:
    """Random weights of a Llama with their names. more: projections of a layer besides Llama's."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q, kv = config["num_attention_heads"] * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    sizes = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q), **more}
    torch.manual_seed(0)
    weights = {"model.embed_tokens.weight": torch.randn(vocab, hidden), "lm_head.weight": torch.randn(vocab, hidden)}
    weights["model.norm.weight"] = 1 + 0.1 * torch.randn(hidden)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        weights |= {f"{name}.self_attn.{part}.weight": 0.1 * torch.randn(*size) for part, size in sizes.items()}
        for part, size in (
            ("gate_proj", (inner, hidden)),
            ("up_proj", (inner, hidden)),
            ("down_proj", (hidden, inner)),
        ):
            weights[f"{name}.mlp.{part}.weight"] = 0.3 * torch.randn(*size)
        for part in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{name}.{part}.weight"] = 1 + 0.1 * torch.randn(hidden)
    return {name: weight.double() for name, weight in weights.items()}


def their_logits(config: dict[str, Any], w: dict[str, Tensor], ids: Tensor, eps: float) -> Tensor:
    """The formulas of their code, in float64: a Llama with solved values, and eps in the key norm. ids: [T]."""
    D, T, groups = config["head_dim"], len(ids), config["num_attention_heads"] // config["num_key_value_heads"]

    def norm(x: Tensor, gain: Tensor | float, e: float) -> Tensor:
        return gain * x * (x.square().mean(-1, keepdim=True) + e).rsqrt()

    angles = torch.arange(T).double()[:, None] * config["rope_theta"] ** -(torch.arange(0, D, 2).double() / D)
    cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))

    def turn(x: Tensor) -> Tensor:
        return x * cos + torch.cat([-x[..., D // 2 :], x[..., : D // 2]], -1) * sin

    x, mask = w["model.embed_tokens.weight"][ids], torch.ones(T, T).tril().bool()
    for layer in range(config["num_hidden_layers"]):
        of = lambda part: w[f"model.layers.{layer}.{part}.weight"]  # noqa: B023, E731
        h = norm(x, of("input_layernorm"), config["rms_norm_eps"])
        q, k, v = ((h @ of(f"self_attn.{n}_proj").T).view(T, -1, D).transpose(0, 1) for n in "qkv")
        q, k = turn(q), turn(k)
        k_rn = norm(k, 1.0, eps)
        P = (k_rn @ k_rn.mT / math.sqrt(D) - math.sqrt(D)).masked_fill(~mask, -math.inf).exp()
        y = torch.linalg.solve_triangular(P, v, upper=False).repeat_interleave(groups, 0)
        scores = q @ k.repeat_interleave(groups, 0).mT / math.sqrt(D)
        o = scores.masked_fill(~mask, -math.inf).softmax(-1) @ y
        x = x + o.transpose(0, 1).reshape(T, -1) @ of("self_attn.o_proj").T
        h = norm(x, of("post_attention_layernorm"), config["rms_norm_eps"])
        inner = torch.nn.functional.silu(h @ of("mlp.gate_proj").T) * (h @ of("mlp.up_proj").T)
        x = x + inner @ of("mlp.down_proj").T
    return norm(x, w["model.norm.weight"], config["rms_norm_eps"]) @ w["lm_head.weight"].T


def test_a_checkpoint_of_their_code_has_the_same_logits_up_to_their_eps() -> None:
    authors, weights, ids = module("load_authors"), their_weights(THEIRS), torch.arange(40)
    model: LucidForCausalLM = authors.load(THEIRS, weights).double()
    model.load_state_dict(weights)
    with torch.no_grad():
        ours = model(ids[None]).logits[0]
    # Our rotary angles are float32.
    torch.testing.assert_close(ours, their_logits(THEIRS, weights, ids, 0.0), rtol=1e-5, atol=1e-5)
    theirs = their_logits(THEIRS, weights, ids, THEIRS["rms_norm_eps"])
    deviation = authors.deviation(model, ids[None], THEIRS["rms_norm_eps"])
    assert 1e-5 < (ours - theirs).abs().max() / theirs.abs().max() < 10 * deviation < 0.1


def test_their_names_and_options_have_ours() -> None:
    authors = module("load_authors")
    with_beta = authors.load(THEIRS | {"use_beta": True}, their_weights(THEIRS, beta_proj=(2, 24)))
    assert with_beta.model.layers[0].self_attn.double_beta
    nope = authors.our_config(THEIRS | {"use_rope": False, "attention_type": "llama"})
    assert (nope.attention, nope.rope_parameters) == ("softmax", None)
    path = LucidForCausalLM(authors.our_config(THEIR_PATH))
    theirs = {"embed_tokens": "embeddings", "input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm"}
    theirs |= {"self_attn": "attn", "b_proj": "bt_proj"}
    state = {}
    for name, weight in path.state_dict().items():
        state[".".join(theirs.get(part, part) for part in name.split("."))] = weight
    loaded = authors.load(THEIR_PATH, state)
    assert loaded.config.head_dim == 6
    for name, weight in path.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name
    with pytest.raises(ValueError, match="use_forget_gate=true has no counterpart here"):
        authors.our_config(THEIRS | {"use_forget_gate": True})
