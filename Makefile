# `make test` and `make bench` need Python 3.11+ and make; everything else goes into .venv.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --disable-pip-version-check --quiet
export PYTHONSAFEPATH := 1

.PHONY: bench gpu-check test lint types wheel clean

bench: .venv/installed
	$(BIN)/python -m fusedrnn.bench main $(ARGS)

gpu-check: .venv/installed
	$(BIN)/python -m fusedrnn.bench gpu-check $(ARGS)

test: .venv/installed
	$(BIN)/python -m pytest $(ARGS)

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy does not follow an editable install that maps folders, so it is shown them as they are installed.
types: .venv/installed
	rm -rf build/types && mkdir -p build/types/fusedrnn
	ln -s $(CURDIR)/fusedrnn/* $(CURDIR)/kernels $(CURDIR)/bench build/types/fusedrnn/
	cd build/types && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p fusedrnn

# Builds the wheel and imports it, alone, from another folder.
wheel: .venv/installed
	rm -rf build/wheel
	$(BIN)/python -m build --wheel --no-isolation --outdir build/wheel . >/dev/null
	$(PIP) --no-deps --target build/wheel/site build/wheel/*.whl
	cd build/wheel && PYTHONPATH=site ../../$(BIN)/python -c "import fusedrnn, fusedrnn.kernels, fusedrnn.bench, torch; \
	assert 'wheel/site' in fusedrnn.bench.__file__, fusedrnn.bench.__file__; \
	fusedrnn.LSTM(3, 4)(torch.randn(5, 2, 3))[0].sum().backward(); print('wheel', fusedrnn.__version__, 'imports')"

# torch comes first and alone, so that no other package chooses its build.
.venv/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -c "import torch" 2>/dev/null || $(PIP) torch==2.13.0
	$(PIP) setuptools==84.2.1
	$(PIP) --no-build-isolation -e ".[dev]"
	touch $@

clean:
	rm -rf .venv build dist *.egg-info
