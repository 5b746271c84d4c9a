# Needs python3 (3.11 or later, with venv) and make; everything else goes into $(VENV).
PYTHON ?= python3
VENV ?= .venv

LOCK := requirements/lock.txt
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
TORCH_VENV = $(VENV)-torch-$(VERSION)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all test-torch gpu format check

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1 - \2/p' Makefile

demo: $(VENV)/.stamp ## run the main job, examples/gpt_text.py
	OMP_NUM_THREADS=1 $(VENV)/bin/torchrun --standalone --nproc-per-node 2 examples/gpt_text.py

test: check ## ruff, format check, import-linter, mypy, pytest: what CI runs
	$(VENV)/bin/python -m pytest

test-all: check ## as test, with the tests marked slow
	$(VENV)/bin/python -m pytest -m "not gpu"

test-torch: ## pytest on another torch, in a venv of its own: make test-torch VERSION=2.11.0
	@test -n "$(VERSION)" || { echo "which torch? make test-torch VERSION=2.11.0" >&2; exit 2; }
	@$(MAKE) --no-print-directory $(TORCH_VENV)/.stamp
	$(TORCH_VENV)/bin/python -m pytest

gpu: $(VENV)/.stamp ## the tests that need a CUDA device (they skip without one)
	$(VENV)/bin/python -m pytest -m gpu tests/gpu

format: $(VENV)/.stamp ## format the code and apply ruff's safe fixes
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

check: $(VENV)/.stamp
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/mypy

$(VENV)/.stamp: $(LOCK) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "zplan needs Python 3.11 or later: make PYTHON=...")'
	@echo "installing $(LOCK) into $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python $(PIP_INSTALL) -r $(LOCK)
	@$(VENV)/bin/python $(PIP_INSTALL) --no-deps --no-build-isolation -e .
	@touch $@

# The same versions but for torch, which comes with its own dependencies.
$(VENV)-torch-%/.stamp: $(LOCK) pyproject.toml
	@echo "installing $(LOCK) with torch $* into $(@D)"
	@$(PYTHON) -m venv $(@D)
	@grep -v '^torch==' $(LOCK) > $(@D)/lock.txt
	@$(@D)/bin/python $(PIP_INSTALL) -r $(@D)/lock.txt torch==$*
	@$(@D)/bin/python $(PIP_INSTALL) --no-deps --no-build-isolation -e .
	@touch $@
