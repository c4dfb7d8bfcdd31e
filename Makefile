# One way to do each thing; CI calls the same targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PROJECTS_VENV := .venv-projects

# `make test-torch` has an environment of its own for each version.
TORCH ?=
TORCH_VENV := .venv-torch-$(TORCH)

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint types layers tests test-all test-torch test-projects bench bench-planning bench-save-load bench-async bench-references bench-fingerprints bench-mmap bench-codecs bench-export bench-dcp bench-object bench-sharing bench-before-after clean

help:  ## Explain every target
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

setup: $(STAMP)  ## Build .venv from pyproject.toml and constraints.txt (does nothing when up to date)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $(STAMP)

demo: setup  ## Train on 4 ranks, save, load on 2 in another layout; who writes what; speed beside DCP's
	@$(BIN)/python examples/plan_picture.py
	@$(BIN)/python -W ignore examples/demo.py

test: lint types layers tests  ## Everything that CI checks

lint: setup  ## ruff: style and formatting
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: setup  ## mypy --strict on src
	@$(BIN)/mypy

layers: setup  ## import-linter: imports go down the layers in pyproject.toml
	@$(BIN)/lint-imports --no-cache

tests: setup  ## pytest on both cores
	@$(BIN)/python -m pytest --numprocesses 2 --dist loadgroup

test-all: setup  ## pytest with the slow tests as well
	@$(BIN)/python -m pytest --numprocesses 2 --dist loadgroup -m ""

test-torch:  ## pytest with another torch, in an environment beside .venv: TORCH=2.15.0 (5 GB), TESTS=<paths>
	@test -n "$(TORCH)" || { echo "say which torch to test with: make test-torch TORCH=2.15.0"; exit 2; }
	@$(MAKE) --no-print-directory $(TORCH_VENV)/.installed
	@$(TORCH_VENV)/bin/python -c 'import torch; print("torch", torch.__version__)'
	@$(TORCH_VENV)/bin/python -m pytest --numprocesses 2 --dist loadgroup $(TESTS)

# As `setup`, but for the version of torch. Without a cache: a download of this size is used once.
$(TORCH_VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(TORCH_VENV)
	@sed '/^torch==/d' constraints.txt > $(TORCH_VENV)/constraints.txt
	@echo 'torch==$(TORCH)' >> $(TORCH_VENV)/constraints.txt
	$(TORCH_VENV)/bin/python -m pip install --quiet --no-cache-dir --constraint $(TORCH_VENV)/constraints.txt torch
	$(TORCH_VENV)/bin/python -m pip install --quiet --constraint $(TORCH_VENV)/constraints.txt --editable '.[dev]'
	@touch $@

test-projects: $(PROJECTS_VENV)/.installed  ## tests/recipes with torchtitan, Lightning, transformers and others, in an environment beside .venv
	@$(PROJECTS_VENV)/bin/python -m pytest --numprocesses 2 --dist loadgroup -m "" tests/recipes

$(PROJECTS_VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(PROJECTS_VENV)
	$(PROJECTS_VENV)/bin/python -m pip install --quiet --constraint constraints.txt torch
	$(PROJECTS_VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[test,projects]'
	@touch $@

bench: bench-planning bench-save-load bench-async bench-references bench-fingerprints bench-mmap bench-codecs bench-export bench-dcp bench-object bench-sharing  ## All benchmarks, beside DCP: tables, JSON and plots under docs/benchmarks/

bench-planning: setup  ## Planning at 1024 ranks beside DCP: a table, and JSON under docs/benchmarks/
	@$(BIN)/python -W ignore benchmarks/planning.py

bench-save-load: setup  ## Saves and loads on two ranks, beside DCP, safetensors and the raw system calls
	@$(BIN)/python -W ignore benchmarks/save_load.py

bench-async: setup  ## What asynchronous saves cost the training, beside a plain copy and DCP
	@$(BIN)/python -W ignore benchmarks/async_save.py

bench-references: setup  ## Saves that refer to a base: LoRA and full training, beside saves that write everything
	@$(BIN)/python -W ignore benchmarks/references.py

bench-fingerprints: setup  ## Fingerprints beside checksums; verified loads beside unverified ones
	@$(BIN)/python -W ignore benchmarks/fingerprints.py

bench-mmap: setup  ## How long until 3 GB can be used, mapped, beside safetensors and torch.load
	@$(BIN)/python -W ignore benchmarks/mapped_reading.py

bench-codecs: setup  ## What compress="zstd" saves and costs, on a model that is trained for it
	@$(BIN)/python -W ignore benchmarks/codecs.py

bench-export: setup  ## Exporting a checkpoint to safetensors files, beside copying its files
	@$(BIN)/python -W ignore benchmarks/export.py

bench-object: setup  ## Saves to and loads from an object store, beside plain obstore and DCP over others' storages
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench-object]'
	@$(BIN)/python -W ignore benchmarks/object_store.py

bench-dcp: setup  ## Reading what torch.distributed.checkpoint wrote, beside it doing the same
	@$(BIN)/python -W ignore benchmarks/reading_dcp.py

bench-sharing: setup  ## Four replicas that load from a slow store: each for itself, and each byte once
	@$(BIN)/python -W ignore benchmarks/sharing.py

bench-before-after: setup  ## This tree beside an earlier one, in turns: BASE=<commit>
	@$(BIN)/python -W ignore benchmarks/before_after.py --base $(or $(BASE),HEAD~1)

clean:  ## Remove what the other targets made
	rm -rf $(VENV) $(PROJECTS_VENV) .venv-torch-* .mypy_cache .pytest_cache .ruff_cache .hypothesis
