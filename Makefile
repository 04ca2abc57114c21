# make demo    an answer from a real model that three containers computed together
# make test    every test, with the real engine on lab hosts; make check: the quick part of it; make faults: every fault
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help demo test check lint unit generated images faults launchers gateway lab-up lab-down bench clean

PYTHON ?= python3
HOSTS ?= 3
ENGINE ?= 26.1
BIN := .venv/bin
READY := .venv/.ready
DCLINT := dclint@3.1.0

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: $(READY) ## Start the demo stack on this machine and ask it a question
	@$(BIN)/python -m tools.demo

check: lint unit ## Lint, types, unit tests; under a minute

test: check ## Every test: units, lab hosts, the real engine with a real model
	$(BIN)/python -m pytest tests -m "(lab or slow) and (not faults or smoke) and not launchers and not gateway" -v --durations=0 --durations-min=20

faults: check ## Every row of the fault matrix on lab hosts, the fake engine and the real one; about an hour
	@rm -f build/faults.json
	@$(BIN)/python -m pytest tests/fake tests/faults -m faults -v; code=$$?; $(BIN)/python -m tests.faults.table; exit $$code

launchers: $(READY) ## The stack started by torchrun, Slurm, Kubernetes' and SkyPilot's environments, on lab hosts with the real engine
	@rm -f build/launchers.json
	@$(BIN)/python -m pytest tests/launchers -m launchers -v; code=$$?; $(BIN)/python -m tests.launchers.table; exit $$code

gateway: check ## Two groups with the real engine behind the gateway, on four lab hosts; some ten minutes
	@rm -f build/gateway.json
	@$(BIN)/python -m pytest tests/gateway -m "gateway or slow" -v; code=$$?; $(BIN)/python -m tests.gateway.table; exit $$code

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/hadolint images/*/Dockerfile
	$(BIN)/shellcheck --exclude=SC2016 .ci/run tests/generator/golden-exports/*/*/*.sh
	@if command -v npx >/dev/null; then set -x; npx --yes $(DCLINT) --recursive compose tests/generator/golden; \
	else echo "dclint: not run, since there is no Node.js here"; fi

unit: $(READY)
	$(BIN)/python -m pytest tests -m "not lab and not slow" -n 2 -q

generated: $(READY) ## Write the reference stacks, the golden files and the documents that are generated
	$(BIN)/python -m tests.generator.regenerate
	$(BIN)/python -m tools.docs

images: $(READY) ## Build the CPU engine image and our layer on it, with the Docker that is there
	$(BIN)/python -m tools.images

lab-up: $(READY) ## Bring up HOSTS=3 lab hosts with Docker ENGINE=26.1 or 20.10
	$(BIN)/python -m tests.lab up --hosts $(HOSTS) --engine $(ENGINE)

lab-down: $(READY) ## Remove the lab hosts
	$(BIN)/python -m tests.lab down

bench: $(READY) ## Measure what the documentation states figures of
	$(BIN)/python -m tools.bench $(SECTIONS)

clean: ## Remove what make made in this folder
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist stacks
