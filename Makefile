# Everything here works on a fresh Linux machine with Python 3.11+, make, and a Python package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# No test runs twice: `make check test`, the gate, leaves the unit tests to `test`.
UNIT := $(if $(filter test,$(MAKECMDGOALS)),,unit)

.PHONY: setup demo test quick check fmt lint type unit integration faults soak sim bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/milepost demo

# The cheapest folders first: unit, simulation, integration, faults. PYTEST: options of its own.
test: setup
	$(BIN)/python -m pytest tests $(PYTEST)

# A minute: the unit tests and a small simulation.
quick: setup
	$(BIN)/python -m pytest tests/unit tests/simulation -m 'not slow'

check: setup lint type $(UNIT)

fmt: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

type: setup
	$(BIN)/mypy

unit: setup
	$(BIN)/python -m pytest tests/unit

integration: setup
	$(BIN)/python -m pytest tests/integration

# SEED draws everything, NODES too if it is not given; HOURS: seed after seed for so long.
sim: setup
	$(BIN)/python -m tests.simulation $(if $(SEED),--seed $(SEED)) $(if $(NODES),--nodes $(NODES)) \
		$(if $(HOURS),--hours $(HOURS))

# The real crashes alone.
faults: setup
	$(BIN)/python -m pytest tests/faults

# SOAK: options, such as --saves 1000 --seed 7.
soak: setup
	$(BIN)/python -m tests.faults.soak $(SOAK)

# BENCH: options, such as --quick; BENCH_EXTRAS=bench,bench-peers compares with torch_checkpointing.
BENCH_EXTRAS := bench
bench: setup
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(BENCH_EXTRAS)]'
	$(BIN)/python -m benchmarks $(BENCH)

clean:
	rm -rf $(VENV) demo-run bench-run bench-results.json bench-results.png .mypy_cache .ruff_cache .pytest_cache
