# `make demo` and `make test` work in a fresh clone: both create .venv when there is none.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
# One thread per process: reductions then have one order, and bitwise comparisons are fair.
export OMP_NUM_THREADS := 1

.PHONY: demo test test-all lint kernels bench clean

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,plot]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/python examples/demo.py

test: $(STAMP)
	$(BIN)/pytest -m 'not slow' -n 2 --dist loadfile

test-all: $(STAMP)
	$(BIN)/pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p smpc
	$(BIN)/lint-imports

# Compiles every kernel for every target, without a GPU: registers, spills, shared memory.
kernels: $(STAMP)
	$(BIN)/python -P -m smpc.kernels.compile_gate

bench: $(STAMP)
	$(BIN)/python benchmarks/pipeline.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
