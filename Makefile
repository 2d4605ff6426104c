# Each target sets up what it needs: a fresh machine with Python 3.11+ and make is enough.
#   make demo    make test    make test-fast    make test-full    make coverage    make lint
#   make docs    make bench    make figures    make wheel-test    make release
# Another interpreter: make test PYTHON=python3.13

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PACKAGING := pyproject.toml constraints.txt
DEV_EXTRAS := attack,check,data,dev,docs,onnx,tensorboard
PROSE := $(wildcard *.md) benchmarks docs examples notebooks scripts src
CONSTRAINTS_VENV := build/constraints-venv
WHEEL_VENV := build/wheel-venv
# Each worker takes neighbouring tests, which share what a module or a cache holds.
PYTEST := $(BIN)/python -m pytest --numprocesses auto --dist worksteal --doctest-modules src/curvcert benchmarks tests

# Without bytecode every worker and every command that a test starts compiles everything again,
# and the threads of one worker slow the others down.
unexport PYTHONDONTWRITEBYTECODE
pytest test-fast test-full coverage: export OMP_NUM_THREADS := 1

.PHONY: demo test test-fast test-full coverage lint pytest docs bench bench-gpu figures wheel-test release constraints clean

demo: $(VENV)/.runtime-installed
	$(BIN)/curvcert demo

test: lint pytest

lint: $(VENV)/.dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell $(PROSE) tests
	$(BIN)/python scripts/prose.py $(PROSE)

pytest: $(VENV)/.dev-installed
	$(PYTEST) --durations 20 --durations-min 2

test-fast: $(VENV)/.dev-installed
	$(PYTEST) -m "not slow and not full"

test-full: $(VENV)/.dev-installed
	$(PYTEST) -m "" --durations 40 --durations-min 2

coverage: $(VENV)/.dev-installed
	$(PYTEST) --cov --cov-report term-missing:skip-covered --cov-report html:build/coverage

docs: $(VENV)/.dev-installed
	$(BIN)/mkdocs build --strict

bench: $(VENV)/.dev-installed
	$(BIN)/python -m benchmarks.norm_bounds
	$(BIN)/python -m benchmarks.lipschitz --network 6F
	$(BIN)/python -m benchmarks.curvature
	$(BIN)/python -m benchmarks.certification
	$(BIN)/python -m benchmarks.training_step
	$(BIN)/python -m benchmarks.shell_campaign

bench-gpu: $(VENV)/.dev-installed
	$(BIN)/python -m benchmarks.gpu_tests
	$(BIN)/python -m benchmarks.gpu_training --profile
	$(BIN)/python -m benchmarks.gpu_side_by_side
	$(BIN)/python -m benchmarks.certification --device cuda --points 10000 --networks 6F 6C2F

figures: $(VENV)/.dev-installed
	$(BIN)/python -m benchmarks.curvature_tightness --plots
	$(BIN)/python -m benchmarks.certificate_pictures
	$(BIN)/python -m benchmarks.radii_pictures
	$(BIN)/python -m benchmarks.laptop --plot
	$(BIN)/python -m benchmarks.shell --plots
	$(BIN)/python -m benchmarks.concept_pictures
	$(BIN)/python -m benchmarks figures
	$(BIN)/python -m benchmarks.report_pictures

# The wheel, as a user gets it: an empty environment, and a working directory outside the tree.
wheel-test: $(VENV)/.dev-installed
	rm -rf build/wheel $(WHEEL_VENV)
	$(BIN)/python -m build --wheel --no-isolation --outdir build/wheel .
	$(PYTHON) -m venv $(WHEEL_VENV)
	$(WHEEL_VENV)/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt build/wheel/*.whl
	cd / && "$(CURDIR)/$(WHEEL_VENV)/bin/python" -I "$(CURDIR)/scripts/check_installed.py" "$(CURDIR)"
	cd / && "$(CURDIR)/$(WHEEL_VENV)/bin/curvcert" demo --samples 20 --out "$(CURDIR)/build/demo"
	rm -rf $(WHEEL_VENV)

# The artefacts of a release in dist/: source and wheel, a lock file with hashes, a bill of materials, and digests.
# Options for pip: make release PIP_OPTIONS="--no-index --find-links wheels"
release: $(VENV)/.dev-installed
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python scripts/release.py dist $(PIP_OPTIONS)

# Pin again what the newest releases give, from an empty environment.  PIN=torch==2.13.0 holds one back.
constraints:
	rm -rf $(CONSTRAINTS_VENV)
	$(PYTHON) -m venv $(CONSTRAINTS_VENV)
	$(CONSTRAINTS_VENV)/bin/python -m pip install $(PIN) -e ".[$(DEV_EXTRAS)]"
	echo '# The exact versions that curvcert is tested with.  Written by `make constraints`.' > constraints.txt
	$(CONSTRAINTS_VENV)/bin/python -m pip freeze --exclude-editable | sed 's/+[a-z0-9.]*$$//' >> constraints.txt

clean:
	rm -rf $(VENV) build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "curvcert needs Python 3.11 or newer, this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime-installed: $(PACKAGING) | $(BIN)/python
	$(PIP) install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/.dev-installed: $(PACKAGING) | $(BIN)/python
	$(PIP) install --quiet -c constraints.txt -e ".[$(DEV_EXTRAS)]"
	touch $(VENV)/.runtime-installed $@
