# `make test` and `make bench` need Python 3.11+ and make; everything else goes into .venv.
PYTHON ?= python3
BIN := .venv/bin
export PYTHONSAFEPATH := 1

.PHONY: test bench check clean

# torch comes first and alone, so that no other package chooses its build.
.venv/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip install --disable-pip-version-check -q torch==2.13.0
	$(BIN)/pip install --disable-pip-version-check -q setuptools==84.2.1
	$(BIN)/pip install --disable-pip-version-check -q --no-build-isolation -e ".[dev]"
	touch $@

test: .venv/installed
	$(BIN)/python -m pytest $(ARGS)

bench: .venv/installed
	$(BIN)/python -m fusedrnn.bench main

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/types && mkdir -p build/types/fusedrnn
	ln -s $(CURDIR)/fusedrnn/* $(CURDIR)/kernels $(CURDIR)/bench build/types/fusedrnn/
	cd build/types && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p fusedrnn

clean:
	rm -rf .venv build dist *.egg-info
