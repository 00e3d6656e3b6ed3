# Everything below runs in a virtual environment that the first call makes. `make PYTHON=python3.12 test` chooses its interpreter.
# JAX comes for the CPU; for an accelerator add `.venv/bin/pip install -e '.[cuda13]'` or `'.[tpu]'`.

PYTHON ?= python3
VENV ?= .venv
WORKDIR ?= runs/demo
WORKERS ?= 2

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALLED_TEST := $(VENV)/.installed-test

.PHONY: help demo test lint verify model
.DELETE_ON_ERROR:

help:
	@echo 'make demo     train a tiny model on this machine, from nothing to a rising reward, in minutes ($(WORKDIR))'
	@echo 'make test     lint, types and all CPU tests'
	@echo 'make lint     lint and types alone'
	@echo 'make verify   long checks that the published numbers still hold'
	@echo 'make model    fetch a small pretrained model into weights/'

demo: $(INSTALLED)
	$(BIN)/python -m sparrow_jax.train --config=configs/tiny.py --workdir=$(WORKDIR)

test: lint
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

lint: $(INSTALLED_TEST)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

verify: $(INSTALLED_TEST)
	$(BIN)/python -m pytest -m verify

model: $(INSTALLED)
	$(BIN)/python scripts/fetch_smollm2.py

# A stamp per set of packages: the second call installs nothing unless the requirements changed.
$(INSTALLED): setup.cfg pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(INSTALLED_TEST): setup.cfg pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --no-deps --target $(VENV)/libtpu \
	  "$$($(BIN)/python scripts/libtpu_requirement.py)"
	@touch $@ $(INSTALLED)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'error: $(PYTHON) is not Python 3.11 or newer; name one that is, e.g. make PYTHON=python3.12 $(MAKECMDGOALS)' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
