"""What `import lucid_attention` does: it defines names, and nothing else."""

import json
import os
import subprocess
import sys

import lucid_attention

IMPORT = """
import json, os, sys, warnings

def state():
    torch = sys.modules.get("torch")
    return {
        "modules": sorted(sys.modules),
        "environment": dict(os.environ),
        "filters": [str(each) for each in warnings.filters],
        "torch": torch and {
            "dtype": str(torch.get_default_dtype()),
            "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
            "modes": [torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()],
            "random": [torch.initial_seed(), torch.get_rng_state().sum().item()],
        },
        "path": sys.path,
    }

def public():
    return [name for name in vars(lucid_attention) if not name.startswith("_")]

states = [state()]
import lucid_attention
states.append(state())
names = public()
listed = dir(lucid_attention)

import torch
torch.manual_seed(0)
states.append(state())
for name in lucid_attention._MODULES:
    if not lucid_attention._MODULES[name].startswith(".models"):
        getattr(lucid_attention, name)
states.append(state())
print(json.dumps({"states": states, "names": names, "listed": listed, "late": public()}))
"""


def test_importing_the_package_defines_names_and_does_nothing_else() -> None:
    # This process has imported the package: what that did to the environment must not be inherited.
    needed = {name: os.environ[name] for name in ("HOME", "PATH", "PYTHONPATH") if name in os.environ}
    command = [sys.executable, "-c", IMPORT]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=needed)
    assert not done.stderr
    seen = json.loads(done.stdout)
    before, after, before_use, after_use = seen["states"]
    # The package alone, then the names that need nothing but torch: tests/test_cli.py has those of Transformers.
    for first, then, allowed in ((before, after, set()), (before_use, after_use, {"torch"})):
        new = {name.partition(".")[0] for name in set(then.pop("modules")) - set(first.pop("modules"))}
        assert new <= {"lucid_attention", *allowed} | set(sys.stdlib_module_names)
        assert then == first
    assert seen["names"] == []
    assert set(lucid_attention.__all__) == set(lucid_attention._MODULES) <= set(seen["listed"])
    models = {name for name, module in lucid_attention._MODULES.items() if module.startswith(".models")}
    assert set(seen["late"]) == (set(lucid_attention.__all__) - models) | {"nn", "ops"}
