# make help lists the targets. Everything runs in .venv, which `make env` builds from nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TYPES := build/types
# A run sets its own number of threads; this is for tests that use torch without one.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help env run test test-slow test-matrix check format docs bench learning clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

env: $(INSTALLED)  ## .venv with FDG and all it needs, in the tested versions (PYTHON=python3.12 to choose another Python)

$(INSTALLED): pyproject.toml constraints.txt runtime/_native.c
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "FDG needs Python 3.11 or newer, and $(PYTHON) is `$(PYTHON) --version 2>&1`; name another: make env PYTHON=python3.12" >&2; \
	  exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@echo "installing FDG and what it needs into $(VENV): about 6 GB, most of it the CUDA libraries that torch brings"
	$(BIN)/python -m pip install -qq --editable '.[dev]' --constraint constraints.txt
	@touch $@

run: env  ## DQN learns CartPole-v1 in this process; fails below a mean return of 475 over 100 episodes
	$(BIN)/fdg train dqn --env CartPole-v1 --dist-policy local --metrics-json runs/make-run.json
	@$(BIN)/python -c 'import json, sys; mean = json.load(open("runs/make-run.json"))["mean_reward"]; \
	  print(f"mean return over 100 evaluation episodes: {mean:.1f} (the goal is 475)"); sys.exit(mean < 475)'

test: env  ## the tests
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m 'not slow and not matrix'

test-slow: env  ## the longer studies
	$(BIN)/python -m pytest -m slow

test-matrix: env  ## one result under every policy, engine, number of workers and seed: all combinations
	$(BIN)/python -m pytest -m matrix tests/test_matrix.py

# mypy sees the files of an editable install only where the import system does, so it gets the package as a wheel has it.
check: env  ## ruff (rules and format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@rm -rf $(TYPES) && mkdir -p $(TYPES)/fdg
	@ln -s $(addprefix ../../../,$(wildcard fdg/*.py fdg/py.typed fdg/capture fdg/compiler fdg/draw) policies algorithms runtime) $(TYPES)/fdg/
	cd $(TYPES) && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache

format: env  ## apply ruff's fixes and format
	$(BIN)/ruff check --fix --exit-zero .
	$(BIN)/ruff format .

docs: env  ## write what commands print, as the pages show it, anew
	$(BIN)/python tests/test_docs.py

bench: env  ## every benchmark, then FDG beside its peers (docs/performance.md); the numbers are of this machine
	@for file in benchmarks/*.py; do test -f "$$file" || continue; echo "== $$file"; $(BIN)/python "$$file" || exit 1; done
	$(BIN)/python benchmarks/peers --again

learning: env  ## what the algorithms learn, beside Stable-Baselines3: hours; stores each run, goes on where it stopped
	$(BIN)/python benchmarks/learning

clean:  ## remove what the other targets made
	rm -rf $(VENV) build dist *.egg-info runtime/_native.*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
