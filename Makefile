# Everything a fresh clone needs: `make demo`, `make test`. The environment is made on first use.

PYTHON ?= $(shell for python in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
# Installed before the package, whose own range leaves torch's build to the machine.
TORCH ?= 2.13.0
NEWEST_TORCH ?= 2.14.1
VENV ?= .venv
# Of soak-simulation.
MINUTES ?= 10

BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
READY := $(VENV)/.ready

.PHONY: demo test test-unit test-parallelism soak-simulation test-newest lint types case-study bench bench-faults \
	bench-kernels venv clean

demo: $(READY)
	$(BIN)/monarch-titan demo

test: $(READY)
	$(PYTEST) tests

test-unit: $(READY)
	$(PYTEST) tests/unit

test-parallelism: $(READY)
	MONARCH_TITAN_ALL_PARALLELISM=1 $(PYTEST) tests/integration/test_parallelism.py

soak-simulation: $(READY)
	$(BIN)/python -m tests.simulation --minutes $(MINUTES)

test-newest:
	$(MAKE) VENV=.venv-newest TORCH=$(NEWEST_TORCH) test

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/codespell

types: $(READY)
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

case-study: $(READY)
	$(BIN)/python -m tests.bench.case_study

bench: $(READY)
	$(BIN)/python -m tests.bench.compare

bench-faults: $(READY)
	$(BIN)/python -m tests.bench.faults

bench-kernels: $(READY)
	$(BIN)/python -m tests.bench.kernels

venv: $(READY)

# Installing builds the CPU library from the kernels.
$(READY): pyproject.toml setup.py $(wildcard kernels/*.* kernels/*/*.*)
	@$(or $(PYTHON),false) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "monarch_titan needs Python 3.11 or newer: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "torch==$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[dev,test]"
	@touch $@

clean:
	rm -rf .venv .venv-newest build dist outputs .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
