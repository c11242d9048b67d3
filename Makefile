# setup, demo and test: each works in a fresh clone with python3, its venv module and a package index.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: setup demo test fuzz torture lint clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "installing torch (pinned in constraints.txt), then lieattn with its extras"
	$(PIP) torch
	$(PIP) -e ".[dev]"
	@touch $@

# torch-scatter has no wheels: it is built where a C++ compiler is found; without it the tests that
# need it skip and say so.
$(VENV)/.scatter: $(VENV)/.installed
	@if command -v c++ >/dev/null 2>&1 || command -v g++ >/dev/null 2>&1; then \
	  echo "building torch-scatter (about five minutes, once)"; \
	  $(PIP) setuptools wheel && $(PIP) --no-build-isolation torch-scatter \
	    || echo "torch-scatter did not build: its tests will be skipped"; \
	else echo "no C++ compiler: the tests of torch-scatter will be skipped"; fi
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/python examples/rotated_digits.py

test: $(VENV)/.installed $(VENV)/.scatter
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# Hours: random inputs against every entrance of the library, see docs/trust.md.
fuzz: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz

# Half an hour: kills, interrupts and full disks at random moments, then 10,000 steps of training; docs/trust.md too.
torture: $(VENV)/.installed
	$(BIN)/python -m tests.torture
	$(BIN)/python -m tests.torture soak

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
