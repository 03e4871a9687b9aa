# make table      the benchmark table and report, on the embedded data unless params.yaml says otherwise
# make test       every check that a change must pass; make test-full adds the long ones
# make lint       style and types
# VENV=DIR        use or make the environment there; TORCH=cpu: a torch without CUDA, where your package index has one
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := table

VENV ?= .venv
TORCH ?= default
CORES ?= all
PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3.11)
BIN := $(abspath $(VENV))/bin
LOCK := requirements.lock
READY := $(VENV)/.ready-$(shell cat $(LOCK) pyproject.toml | cksum | cut -d' ' -f1)-$(TORCH)

# This clone's source, also where several clones share one environment.
export PYTHONPATH := $(CURDIR)/src
export PATH := $(BIN):$(PATH)
export MLFLOW_DISABLE_TELEMETRY := true
export DVC_NO_ANALYTICS := true

.PHONY: table test test-full lint lock setup
table: setup
	snakemake --cores $(CORES) --quiet host
	@echo "Table: results/table.md   page: results/report.html"

test test-full: setup
	pytest $(FULL) --numprocesses 2 --dist loadfile tests/unit tests/contract tests/reference
	pytest $(FULL) tests/workflow

test-full: FULL := --full

lint: setup
	ruff check .
	ruff format --check .
	snakefmt --check Snakefile workflow
	mypy

setup: $(READY)

$(READY):
	@$(PYTHON) -c 'import sys; v = sys.version_info; v[:2] == (3, 11) or sys.exit(f"Python 3.11 is needed, found {v[0]}.{v[1]} ({sys.executable}); run make PYTHON=/path/to/python3.11")'
	@echo "Installing the locked environment into $(VENV): some 7 GB and a few minutes, once."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifeq ($(TORCH),cpu)
	@sed -nE 's/^(torch|torchvision)==([^ +]+).*/\1==\2+cpu/p' $(LOCK) | $(BIN)/python -m pip install -r /dev/stdin \
	  || { echo "No CPU build of this torch was found: name an index that has one in PIP_EXTRA_INDEX_URL, or leave TORCH=cpu out." >&2; exit 1; }
	@grep -vE '^(torch|torchvision|triton|nvidia-[a-z0-9-]+|cuda-[a-z-]+)==' $(LOCK) | $(BIN)/python -m pip install -r /dev/stdin
else
	@$(BIN)/python -m pip install -r $(LOCK)
endif
	@test "$(VENV)" != .venv -a -x $(BIN)/anomed || $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@rm -f $(VENV)/.ready-*
	@touch $@

# Needs uv. Resolves for every platform: CUDA packages carry a marker and are installed on Linux alone.
lock:
	echo "# Exact versions of everything, for every platform. Made by \`make lock\`; do not edit." > $(LOCK).new
	uv pip compile pyproject.toml --universal --python-version 3.11 --all-extras --no-annotate --no-header --no-emit-index-url \
	  | grep -v "python_full_version >= '3.12'" \
	  | sed -E "s/ ; python_full_version < '3\.[0-9]+'$$//; s/python_full_version < '3\.[0-9]+' and //" >> $(LOCK).new
	mv $(LOCK).new $(LOCK)
