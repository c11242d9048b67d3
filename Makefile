# setup, demo and test: each works in a fresh clone with python3, its venv module and a package index.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Without bytecode: most files of these packages are never imported, and the others are compiled when they are.
PIP    := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt

.PHONY: setup demo quick test browser docs dist oldest newest fuzz torture lint clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "installing torch (pinned in constraints.txt), then lieattn with its extras"
	$(PIP) torch
	$(PIP) -e ".[dev]"
	@touch $@

# torch-scatter has no wheels: it is built where a C++ compiler is found, two of its five extensions at a time; without
# a compiler the tests that need it skip and say so. Debug symbols, which Python's own flags may ask for, would take a
# third of the time.
$(VENV)/.scatter: $(VENV)/.installed
	@if command -v c++ >/dev/null 2>&1 || command -v g++ >/dev/null 2>&1; then \
	  echo "building torch-scatter (some minutes, once)"; \
	  printf '[build_ext]\nparallel = 2\n' > $(VENV)/extensions.cfg; \
	  $(PIP) setuptools wheel && \
	  CXXFLAGS="-DNDEBUG $$CXXFLAGS -g0" DIST_EXTRA_CONFIG=$(abspath $(VENV))/extensions.cfg \
	  $(PIP) --no-build-isolation torch-scatter \
	    || echo "torch-scatter did not build: its tests will be skipped"; \
	else echo "no C++ compiler: the tests of torch-scatter will be skipped"; fi
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/python examples/rotated_digits.py

# If the environment forbids bytecode beside the sources, it is kept in build/, also that of pytest itself.
TESTS := $(if $(PYTHONDONTWRITEBYTECODE),PYTHONDONTWRITEBYTECODE= PYTHONPYCACHEPREFIX=$(abspath build/bytecode)) \
         OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal
test: $(VENV)/.installed $(VENV)/.scatter
	$(TESTS)

# What a visitor wants to see first: the groups, the operator beside its definition, the goldens of the papers, and the
# equivariance, batches and orders of all networks.
QUICK = tests/test_groups.py tests/test_ops.py tests/test_heads.py tests/parity/test_parity.py tests/test_networks.py
quick: $(VENV)/.installed
	$(TESTS) -q $(QUICK) \
	  -k "not trained and not (every_property and not (equivariance or batches or order))"

# The interactive pages in a headless Chromium, which has to be installed: its package is called chromium in Debian.
browser: $(VENV)/.installed
	$(PIP) playwright
	$(BIN)/python -m pytest -q -rs tests/test_browser.py

# The documentation, with strict links, in build/site.
docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Wheel and source distribution, checked, and the wheel used from a folder of its own.
dist: $(VENV)/.installed
	rm -rf dist build/wheel
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/twine check --strict dist/*
	$(PIP) --no-deps --target build/wheel dist/*.whl
	cd build/wheel && $(abspath $(BIN))/python -c "import lieattn, lieattn_datasets; \
	  assert 'wheel' in lieattn.__file__ and 'wheel' in lieattn_datasets.__file__; \
	  print(lieattn.load('digits-c8').guarantee)"

# The oldest versions that pyproject.toml allows, and the newest there are: the documentation and a fast part of the tests.
# uv resolves them (pip cannot); torch comes with its CUDA packages, several gigabytes each.
VERSIONS = tests/test_docs.py tests/test_groups.py tests/test_geometry.py tests/test_compile.py tests/test_saved.py \
           tests/test_triton.py tests/test_data_shapes.py tests/test_cli.py tests/test_train.py tests/test_viz.py
oldest newest: $(VENV)/.installed
	$(PIP) uv
	$(BIN)/uv venv --quiet --clear --seed --python $(PYTHON) $(VENV)-$@
	VIRTUAL_ENV=$(VENV)-$@ $(BIN)/uv pip install --quiet $(if $(filter oldest,$@),--resolution lowest-direct "setuptools>=70") \
	  -e ".[all]" "pytest>=8" "pytest-xdist>=3.5" "hypothesis>=6.100" "mpmath>=1.3"
	OMP_NUM_THREADS=1 $(VENV)-$@/bin/python -m pytest -n 2 --dist worksteal $(VERSIONS)

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
