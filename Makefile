# `make demo` and `make test` work in a fresh clone: both create .venv when there is none.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
# One thread per process: reductions then have one order, and bitwise comparisons are fair.
export OMP_NUM_THREADS := 1
# Modules are compiled once, whatever the environment says: tests start hundreds of processes that import them.
unexport PYTHONDONTWRITEBYTECODE
SOURCES := src tracer partitioner codegen executor kernels

.PHONY: demo test test-long test-all matrix lint kernels docs bench gpu clean

$(STAMP): pyproject.toml setup.py src/smpc_alias.pth constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,plot]'
	$(BIN)/python -m compileall -q $(SOURCES)
	touch $(STAMP)

# The demo needs less than the tests do.
$(VENV)/installed-demo: pyproject.toml setup.py src/smpc_alias.pth constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check --constraint constraints.txt --editable '.[hf]'
	$(BIN)/python -m compileall -q $(SOURCES)
	touch $@

demo: $(if $(wildcard $(STAMP)),$(STAMP),$(VENV)/installed-demo)
	$(BIN)/python examples/demo.py

# In the order of the folders, so that the short files of tests/unit fill all workers to the end. Of two workers' time on two cores a
# seventh is spent waiting, for timeouts and for ranks that end: a third worker uses it. A worker that a crash has ended ends the run: by
# file, xdist waits without end for the tests that such a worker had been given.
WORKERS := -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

test: $(STAMP)
	$(BIN)/pytest -m 'not slow and not long' $(WORKERS)

# What takes seconds each, mostly training on several ranks; continuous integration runs it after `make test`.
test-long: $(STAMP)
	$(BIN)/pytest -m 'long and not slow' $(WORKERS)

# Property tests draw other examples every time, by a seed that is printed: `make test-all SMPC_TEST_SEED=7` draws them again.
test-all: SMPC_TEST_SEED ?= $(shell od -An -N4 -tu4 /dev/urandom | tr -d ' ')
test-all: $(STAMP)
	SMPC_TEST_SEED=$(SMPC_TEST_SEED) $(BIN)/pytest

# A short choice of tests on every Python and torch that can be had: `make matrix PYTHONS="3.13" TORCHES="2.12 2.13"`.
matrix:
	$(PYTHON) tests/support/matrix.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p smpc
	$(BIN)/lint-imports

# Compiles every kernel for every target, without a GPU: registers, spills, shared memory.
kernels: $(STAMP)
	$(BIN)/python -P -m smpc.kernels.compile_gate

$(VENV)/installed-docs: $(STAMP)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

# The site, in build/site. A warning, a broken link, a notebook that fails or a model of the gallery without a plan fails it.
docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 PYTHONSAFEPATH=1 PATH="$(abspath $(BIN)):$$PATH" $(BIN)/mkdocs build --strict --quiet

bench: $(STAMP)
	$(BIN)/python benchmarks/pipeline.py

# All that one GPU can tell within 25 minutes, as gpu.md; exit status 2 where there is none.
gpu: $(STAMP)
	$(BIN)/python -P benchmarks/gpu.py --report gpu.md

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
