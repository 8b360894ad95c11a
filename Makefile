# Everything sets itself up in .venv: Python 3.11+ and make are all that is assumed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
LOCK := pip compile --quiet pyproject.toml --constraint constraints.txt --universal --python-version 3.11 --generate-hashes --no-annotate --no-header
PROTOC = $(BIN)/python -m grpc_tools.protoc -Iproto
FAST := not gpu and not slow and not ci and not root and not k8s and not compose and not observe and not frameworks

.DEFAULT_GOAL := help
.PHONY: help demo chaos bench-backups bench-growth bench-kills bench-links bench-regions bench-islands bench-wan quality test test-slow test-newest test-oldest test-integrations test-examples test-newest-grpc test-gpu test-root test-k8s test-compose test-observe dashboards pictures docs lint format proto simulate simulate-defects fuzz soak bench locked wheel reference clean

help: ## show this list
	@grep -hE '^[a-z0-9 -]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or newer is needed, this is " + sys.version.split()[0] + ": give another with PYTHON=...")'
	@$(BIN)/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@echo "installing torch (the CPU build, if pip finds it) ..."
	@$(PIP) torch==2.13.0
	@echo "installing atoll and its development tools ..."
	@$(PIP) --editable '.[dev]'
	@touch $@

demo: $(READY) ## run a core and three learners, and kill one of each: ARGS="--json out.json" passes options
	@$(BIN)/atoll demo $(ARGS)

test: $(READY) ## run the fast tests on three workers; each file's tests share a worker and its fixtures
	@$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "$(FAST)" $(ARGS)

test-slow: $(READY) ## run the slow tests, which make test leaves out: ARGS="-m ci" for those that CI runs
	@$(BIN)/python -m pytest -m "slow or ci" $(ARGS)

test-newest: $(READY) ## run learner and end-to-end tests with the newest versions, on each installed Python: ARGS="--only 3.12"
	@$(BIN)/python -m tests.versions newest $(ARGS)

test-oldest: $(READY) ## run the same tests with the oldest versions that pyproject.toml allows
	@$(BIN)/python -m tests.versions oldest $(ARGS)

test-integrations: $(READY) ## test the integrations with the newest and the oldest supported trainers (ten minutes)
	@$(BIN)/python -m tests.versions integrations $(ARGS)

test-examples: $(READY) ## run each example at its smallest setting, with the newest trainers (five minutes)
	@$(BIN)/python -m tests.versions examples $(ARGS)

test-newest-grpc: $(READY) ## test gRPC calls with the newest grpcio and protobuf (a minute)
	@$(BIN)/python -m tests.versions grpc $(ARGS)

test-gpu: $(READY) ## run the tests that use a GPU (needs one that torch can use; a minute)
	@$(BIN)/python -m pytest -m "gpu or not slow and not ci" -k "cuda or gpu" tests/gpu tests/learner tests/end_to_end/test_device.py $(ARGS)

test-root: $(READY) ## run tests that need root: they make file systems and network namespaces
	@$(BIN)/python -m pytest -m root $(ARGS)

test-observe: $(READY) ## test alerts, the page and systemd units (needs Debian's prometheus, prometheus-alertmanager, chromium, systemd)
	@$(BIN)/python -m pytest -m observe tests/observing tests/dashboard tests/documents $(ARGS)

pictures: $(READY) ## take pictures of the dashboard for README and docs (needs Debian's chromium)
	@$(BIN)/python -m tests.dashboard.pictures

dashboards: $(READY) ## write the Grafana dashboards
	@$(BIN)/python docker/grafana/make.py

reference: $(READY) ## write the generated parts of docs/reference: commands, run settings, HTTP, metrics
	@$(BIN)/python docs/hooks.py
	@$(BIN)/python -m tests.observing.table

test-k8s: $(READY) ## test the chart with Helm's own engine, and the overlays
	@$(BIN)/python -m pytest -m k8s tests/k8s $(ARGS)

test-compose: $(READY) ## test docker/compose.yaml on the engine that DOCKER_HOST names
	@$(BIN)/python -m pytest -m compose tests/compose tests/documents $(ARGS)

docs: $(READY) ## build the documentation site in build/site, without external resources
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

lint: $(READY) ## run ruff and mypy --strict, and check that generated code matches the .proto
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/mypy --implicit-reexport --cache-dir build/mypy-simulation -p tests.simulation
	@mkdir -p build/drift
	@$(PROTOC) --python_out=build/drift --pyi_out=build/drift --grpc_python_out=build/drift proto/atoll_wire/outer.proto proto/atoll_wire/shards.proto
	@$(PROTOC) --python_out=build/drift --pyi_out=build/drift proto/atoll_wire/ranks.proto
	@for file in build/drift/atoll_wire/*_pb2*; do \
	  diff -q "$$file" "proto/atoll_wire/$${file##*/}" > /dev/null || { echo "error: $${file##*/} does not match its .proto: run make proto"; exit 1; }; done

format: $(READY) ## format and fix the code with ruff
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

proto: $(READY) ## generate code from the .proto files
	@$(PROTOC) --python_out=proto --pyi_out=proto --grpc_python_out=proto proto/atoll_wire/outer.proto proto/atoll_wire/shards.proto
	@$(PROTOC) --python_out=proto --pyi_out=proto proto/atoll_wire/ranks.proto

simulate: $(READY) ## run the deterministic simulation: SEEDS=1000 FROM=0 ARGS="--shards --data --json PATH"
	@PYTHONHASHSEED=0 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m tests.simulation.run --seeds $(or $(SEEDS),1000) --from $(or $(FROM),0) $(ARGS)

simulate-defects: $(READY) ## check that the simulation finds every deliberate defect within 5,000 seeds
	@$(BIN)/python -m tests.simulation.find_defects --from $(or $(FROM),0) $(ARGS)

chaos: $(READY) ## kill learners at random for ten minutes, and compare with a synchronous job under the same failures
	@$(BIN)/python -m benchmarks.failures.chaos $(ARGS)

bench-backups: $(READY) ## back up the core of a 25M run under learners, and restore it: ARGS="--json PATH"
	@$(BIN)/python -m benchmarks.failures.backups $(ARGS)

bench-kills: $(READY) ## kill the core 20 times under learners, compare with undisturbed runs, and time the restarts
	@$(BIN)/python -m benchmarks.failures.restart
	@$(BIN)/python -m benchmarks.failures.core_kills $(ARGS)

fuzz: $(READY) ## feed invalid bytes to all decoders of network data: INPUTS=1000000 ARGS="--json PATH"
	@$(BIN)/python -m tests.fuzz.run --inputs $(or $(INPUTS),1000000) $(ARGS)

soak: $(READY) ## cut and restart a deployment for 20 minutes, and check that it does not grow: ARGS="--minutes 5 --json PATH"
	@$(BIN)/python -m tests.soak.run $(ARGS)

bench: $(READY) ## compare the data plane with this machine's memory and with peers: ARGS="--json PATH --only kernels"
	@$(BIN)/python -m benchmarks $(ARGS)

quality: $(READY) ## train the runs that the quality report lacks (hours): ARGS="--only cost --seeds 1"
	@$(BIN)/python -m benchmarks.quality $(ARGS)

bench-islands: $(READY) ## measure memory and time in step() of learners with several ranks: ARGS="--json PATH"
	@$(BIN)/python -m benchmarks.islands $(ARGS)

bench-wan: $(READY) ## compare Atoll with data-parallel training over narrow links (an hour, as root): ARGS="--json PATH --plot PATH"
	@$(BIN)/python -m benchmarks.narrow_links $(ARGS)

bench-links: $(READY) ## compare an outer sync with torchft's over links of many rates and round trips (an hour, as root): ARGS="--json PATH"
	@$(BIN)/python -m benchmarks.links $(ARGS)

bench-growth: $(READY) ## measure how the cost of syncs grows with parameters, learners, fragments, fronts and shards: ARGS="--only learners --json PATH --plot PATH"
	@$(BIN)/python -m benchmarks.growth $(ARGS)

bench-regions: $(READY) ## compare three regions behind long links with the same run over loopback (as root)
	@$(BIN)/python -m benchmarks.data_plane.fronts
	@$(BIN)/python -m benchmarks.links.regions $(ARGS)

locked: $(READY) ## pin the images' packages with checksums (docker/locked), after a change of constraints.txt or pyproject.toml
	@$(PYTHON) -m venv build/uv-venv && build/uv-venv/bin/python -m pip install --quiet uv==0.13.9
	@build/uv-venv/bin/uv $(LOCK) --output-file docker/locked/front.txt
	@build/uv-venv/bin/uv $(LOCK) --extra server --output-file docker/locked/core.txt
	@build/uv-venv/bin/uv $(LOCK) --extra dashboard --output-file docker/locked/dashboard.txt

wheel: $(READY) ## build dist/*.whl
	@$(BIN)/python -m build --wheel --no-isolation

clean: ## remove everything that make created
	@rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find proto server learner forecast dashboard benchmarks tests -name __pycache__ -prune -exec rm -r {} +
