# `make` alone prints what there is to make.
.DEFAULT_GOAL := help
SHELL := /bin/bash

PYTHON ?= python3
JOBS ?= 2
BENCH ?= bench.jsonl
VENV := .venv
BIN := $(VENV)/bin
CREATED := $(VENV)/.created
INSTALLED := $(VENV)/.installed
INSTALLED_TEST := $(VENV)/.installed-test
WANTED := pyproject.toml constraints.txt $(wildcard kernels/native/*)
PIP := $(BIN)/python -m pip --disable-pip-version-check install -c constraints.txt

.PHONY: help demo test check bench clean

help:
	@echo 'make demo    set up .venv and let the embedded model write a few lines'
	@echo 'make test    set up .venv and run all checks and tests'
	@echo 'make check   lint and types only'
	@echo 'make bench   measure this machine with the embedded model, lines into $(BENCH)'
	@echo 'make clean   remove .venv and caches'
	@echo
	@echo 'JOBS=...     test files that run at a time (now $(JOBS))'
	@echo 'PYTHON=...   the interpreter to set .venv up with (3.10 or later; now $(PYTHON))'

$(CREATED):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo 'k3offload needs Python 3.10 or later; name one: make PYTHON=/path/to/python3' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo '$(PYTHON) has no venv with pip: install it (Debian, Ubuntu: apt install python3-venv)' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# Installed again only when what is wanted has changed (the native kernels are built then); the
# Python code is used from this folder.
$(INSTALLED): $(CREATED) $(WANTED)
	$(PIP) -e .
	@touch $@

$(INSTALLED_TEST): $(CREATED) $(WANTED)
	$(PIP) -e '.[test]'
	@touch $(INSTALLED) $@

demo: $(INSTALLED)
	$(BIN)/k3offload generate nano "And Jesus said unto him," -n 60 \
	  --temperature 0.8 --top-p 0.95 --seed 1 --cache 1M

check: $(INSTALLED_TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check
	$(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

# 4 says that others used the machine meanwhile: the lines say it too.
bench: $(INSTALLED)
	@for what in read kernels decode prefill batch predictors; do \
	  $(BIN)/k3offload bench $$what -o $(BENCH) || [ $$? = 4 ] || exit 1; \
	done

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
