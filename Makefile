# Two commands for a new machine: `make demo` and `make test`. Both set up .venv first.
UV := $(shell command -v uv 2>/dev/null || echo $(CURDIR)/.uv/bin/uv)
PY := .venv/bin/python

# Without bytecode every process compiles the thousands of files it imports (docs/design/startup.md).
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo generate-demo test test-engines test-units lint check slow families real soak clean
help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

$(CURDIR)/.uv/bin/uv:
	python3 -m venv .uv && .uv/bin/pip install -q uv

.venv/.locked: pyproject.toml uv.lock | $(if $(findstring .uv,$(UV)),$(CURDIR)/.uv/bin/uv)
	$(UV) sync --frozen --quiet --extra dev
	@# One import of the engine writes its bytecode.
	@$(PY) -W ignore -m vlora_sgl.startup.preload >/dev/null 2>&1 || true
	@touch $@

setup: .venv/.locked ## set up .venv (reused while uv.lock is unchanged)

demo: setup ## the main job on real images, on this machine
	$(PY) examples/multi_round_vqa.py

generate-demo: setup ## adapters for six small real data sets, packed under accuracy floors; runs/demo/report.html
	$(PY) examples/generate_demo_data.py
	$(PY) -m vlora_sgl.generate examples/generate-demo.yaml

lint: setup ## ruff and mypy
	.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy

# Tests that start engines wait for them most of the time; lint and the other tests run beside them.
ENGINES := tests/e2e tests/examples tests/lang tests/export
test: setup ## lint, and everything that runs without a GPU
	@$(MAKE) --no-print-directory -j2 test-engines test-units

# One thread each: tiny matrices are no faster with two, and threads that wait for each other take the other half's core.
test-engines: setup
	OMP_NUM_THREADS=1 $(PY) -m pytest --durations=15 $(ENGINES)

test-units: lint
	OMP_NUM_THREADS=1 $(PY) -m pytest --durations=10 tests $(ENGINES:%=--ignore=%)

slow: setup ## the tests that start engines of their own, which test leaves out (minutes each)
	$(PY) -m pytest --slow -m slow tests

families: setup ## tiny models of every family, each on a server of its own (minutes)
	$(PY) -m benchmarks.families

real: setup ## a real 135M model from a package: trained, served in every mode, exported (half an hour on two cores)
	$(PY) -m benchmarks.real

soak: setup ## half an hour of wear: adapters come and go, clients hang up, requests of any content; records its figures
	$(PY) -m tests.soak
	$(PY) -m tests.soak.fuzzing

clean: ## forget the environment and caches
	rm -rf .venv .uv .pytest_cache .mypy_cache .ruff_cache
