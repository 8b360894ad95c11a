# Everything sets itself up in .venv: Python 3.11+ and make are all that is assumed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
PROTOC = $(BIN)/python -m grpc_tools.protoc -Iproto
FAST := not slow and not root and not k8s and not compose and not observe and not frameworks

.DEFAULT_GOAL := help
.PHONY: help demo chaos bench-kills bench-regions bench-wan quality test test-slow test-newest test-oldest test-newest-grpc test-root test-k8s test-compose test-observe dashboards pictures docs lint format proto simulate simulate-defects fuzz soak bench wheel reference clean

help: ## show this
	@grep -hE '^[a-z0-9 -]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or newer is needed, this is " + sys.version.split()[0] + ": give another with PYTHON=...")'
	@$(BIN)/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@echo "installing torch (the CPU build where one is at hand) ..."
	@$(PIP) torch==2.13.0
	@echo "installing atoll and what it is developed with ..."
	@$(PIP) --editable '.[dev]'
	@touch $@

demo: $(READY) ## one core, three learners, two kills: ARGS="--json out.json" passes options
	@$(BIN)/atoll demo $(ARGS)

test: $(READY) ## the fast tests, on three workers: many of them wait. A file's tests share a worker and its fixtures
	@$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "$(FAST)" $(ARGS)

test-slow: $(READY) ## tests that take minutes
	@$(BIN)/python -m pytest -m slow $(ARGS)

test-newest: $(READY) ## learner and end-to-end tests with the newest versions, for each Python at hand: ARGS="--only 3.12"
	@$(BIN)/python -m tests.versions newest $(ARGS)

test-oldest: $(READY) ## the same with the oldest versions that pyproject.toml allows
	@$(BIN)/python -m tests.versions oldest $(ARGS)

test-newest-grpc: $(READY) ## how gRPC is used, with the newest grpcio and protobuf: a minute
	@$(BIN)/python -m tests.versions grpc $(ARGS)

test-root: $(READY) ## tests that make file systems and network namespaces: as root
	@$(BIN)/python -m pytest -m root $(ARGS)

test-observe: $(READY) ## alerts by promtool, a real Prometheus, and the page in Chromium: Debian's prometheus and chromium
	@$(BIN)/python -m pytest -m observe tests/observing tests/dashboard $(ARGS)

pictures: $(READY) ## of the dashboard over a demo, for README and docs: needs Debian's chromium
	@$(BIN)/python -m tests.dashboard.pictures

dashboards: $(READY) ## write Grafana's dashboards
	@$(BIN)/python docker/grafana/make.py

reference: $(READY) ## write the generated parts of docs/reference: commands, run settings, HTTP, metrics
	@$(BIN)/python docs/hooks.py
	@$(BIN)/python -m tests.observing.table

test-k8s: $(READY) ## the chart by Helm's own engine, and the overlays
	@$(BIN)/python -m pytest -m k8s tests/k8s $(ARGS)

test-compose: $(READY) ## docker/compose.yaml on the engine that DOCKER_HOST names
	@$(BIN)/python -m pytest -m compose tests/compose $(ARGS)

docs: $(READY) ## the documentation as a site, build/site; nothing on it comes from elsewhere
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

lint: $(READY) ## ruff, mypy --strict, and whether generated code still fits the .proto
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@mkdir -p build/drift
	@$(PROTOC) --python_out=build/drift --pyi_out=build/drift --grpc_python_out=build/drift proto/atoll_wire/outer.proto
	@for file in build/drift/atoll_wire/outer_pb2*; do \
	  diff -q "$$file" "proto/atoll_wire/$${file##*/}" > /dev/null || { echo "error: $${file##*/} is not what outer.proto gives: run make proto"; exit 1; }; done

format: $(READY) ## let ruff fix what it can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

proto: $(READY) ## generate code from outer.proto
	@$(PROTOC) --python_out=proto --pyi_out=proto --grpc_python_out=proto proto/atoll_wire/outer.proto

simulate: $(READY) ## deterministic simulation: SEEDS=1000 FROM=0 ARGS="--json PATH"
	@PYTHONHASHSEED=0 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m tests.simulation.run --seeds $(or $(SEEDS),1000) --from $(or $(FROM),0) $(ARGS)

simulate-defects: $(READY) ## every deliberate defect must be found by the simulation within 2,000 seeds
	@$(BIN)/python -m tests.simulation.defects --from $(or $(FROM),0) $(ARGS)

chaos: $(READY) ## learners killed at random for ten minutes, vs. a synchronous job under the same failures
	@$(BIN)/python -m benchmarks.failures.chaos $(ARGS)

bench-kills: $(READY) ## the core killed 20 times under learners, vs. undisturbed runs; and the time until it serves again
	@$(BIN)/python -m benchmarks.failures.restart
	@$(BIN)/python -m benchmarks.failures.core_kills $(ARGS)

fuzz: $(READY) ## invalid bytes for everything that decodes from a network: INPUTS=1000000 ARGS="--json PATH"
	@$(BIN)/python -m tests.fuzz.run --inputs $(or $(INPUTS),1000000) $(ARGS)

soak: $(READY) ## a deployment cut and restarted for 20 minutes must not grow: ARGS="--minutes 5 --json PATH"
	@$(BIN)/python -m tests.soak.run $(ARGS)

bench: $(READY) ## the data plane vs. this machine's memory and peers: ARGS="--json PATH --only kernels"
	@$(BIN)/python -m benchmarks $(ARGS)

quality: $(READY) ## train what the quality report has no record of yet, hours in all: ARGS="--only cost --seeds 1"
	@$(BIN)/python -m benchmarks.quality $(ARGS)

bench-wan: $(READY) ## Atoll vs. data-parallel over narrow links, an hour: as root, ARGS="--json PATH --plot PATH"
	@$(BIN)/python -m benchmarks.narrow_links $(ARGS)

bench-regions: $(READY) ## three regions with fronts behind long links, vs. the same over loopback: as root
	@$(BIN)/python -m benchmarks.data_plane.fronts
	@$(BIN)/python -m benchmarks.links.regions $(ARGS)

wheel: $(READY) ## build dist/*.whl
	@$(BIN)/python -m build --wheel --no-isolation

clean: ## remove everything that was made here
	@rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find proto server learner forecast dashboard benchmarks tests -name __pycache__ -prune -exec rm -r {} +
