# Every target sets up what it needs: a virtual environment in .venv, with the exact versions of constraints.txt.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup demo test lint docs bench

BASE_PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Test processes at a time. Tests start ranks of their own, so more of them than cores gains nothing.
JOBS ?= 2
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt

help: ## what can be made
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-6s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## the virtual environment

# The constraints hold for torch too: an open range would fetch another build of it. Building without isolation uses
# the setuptools that the constraints name.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(BASE_PYTHON) -m venv $(VENV); }
	@echo "installing into $(VENV)"
	@$(PIP) setuptools
	@$(PIP) --no-build-isolation --editable '.[frameworks,docs,dev]'
	@touch $@

demo: $(STAMP) ## measure this machine, plan, train with plain FSDP2 and with the plan, compare (4 minutes)
	@$(BIN)/python -m examples.demo

test: $(STAMP) ## all tests
	@$(BIN)/python -m pytest -q -n $(JOBS)

lint: $(STAMP) ## lint, format and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyrefly check --summary=none

docs: $(STAMP) ## the documentation as a site, in build/docs
	@$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs
	@echo "build/docs/index.html"

bench: $(STAMP) ## every benchmark, one after the other; those of the network need root
	@$(PIP) --no-build-isolation --editable '.[bench]'
	@shopt -s nullglob; for file in benchmarks/bench_*.py; do echo "== $$file"; $(BIN)/python "$$file"; done
	@echo "== benchmarks/fidelity"; $(BIN)/python -m benchmarks.fidelity --plots build/fidelity
