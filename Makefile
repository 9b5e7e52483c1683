# Every target sets up what it needs: a virtual environment in .venv, with the exact versions of constraints.txt.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup browser demo test test-slow lint docs bench bench-smoke

BASE_PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Test processes at a time: more than the cores of a small machine, as tests of ranks often wait for each other.
JOBS ?= 4
# Ranks are many short processes: none should compile what another one has compiled, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt

help: ## what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## the virtual environment

# The constraints hold for torch too: an open range would fetch another build of it. Building without isolation uses
# the setuptools that the constraints name.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(BASE_PYTHON) -m venv $(VENV); }
	@echo "installing into $(VENV)"
	@$(PIP) setuptools
	@$(PIP) --no-build-isolation --editable '.[frameworks,docs,dev]'
	@touch $@

# The tests of the HTML report drive the distribution's Chromium. Where it is missing and cannot be installed, they are
# skipped, unless CI is set.
browser: ## Chromium for the tests of the HTML report, where it is missing and can be installed
	@if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then :; \
	elif test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
	  echo "installing chromium"; apt-get update -qq; \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium chromium-driver >/dev/null; \
	else echo "no chromium here, and no right to install it: tests that need it are skipped"; fi

demo: $(STAMP) ## measure this machine, plan, train with plain FSDP2 and with the plan, compare (4 minutes)
	@$(BIN)/python -m examples.demo

test: $(STAMP) browser ## all tests
	@$(BIN)/python -m pytest -q -n $(JOBS) --dist loadgroup --no-loadscope-reorder

test-slow: $(STAMP) ## what takes too long for make test
	@$(BIN)/python -m pytest -q -n 2 --dist loadgroup --no-loadscope-reorder -m slow

lint: $(STAMP) ## lint, format and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyrefly check --summary=none

docs: $(STAMP) ## the documentation as a site, in build/docs
	@$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs
	@echo "build/docs/index.html"

bench: $(STAMP) ## every benchmark, one after the other; those of the network need root
	@$(PIP) --no-build-isolation --editable '.[bench,rivals]'
	@shopt -s nullglob; for file in benchmarks/bench_*.py; do echo "== $$file"; $(BIN)/python "$$file"; done
	@echo "== benchmarks/fidelity"; $(BIN)/python -m benchmarks.fidelity --save build/fidelity.jsonl --plots build/fidelity
	@echo "== benchmarks/rivals"; $(BIN)/python -m benchmarks.rivals --minutes 25; $(BIN)/python -m benchmarks.rivals --page

bench-smoke: $(STAMP) ## the benchmark against rivals in a few minutes, on tiny models; needs root
	@$(BIN)/python -m benchmarks.rivals --smoke --fresh --minutes 4 --results build/rivals-smoke
