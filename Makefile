# `make demo` runs the main job, `make test` all tests, `make quick` a part of them; all set up what they need in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RUN ?= runs/demo
JOBS ?= 2

.PHONY: demo test coverage quick setup lint docs bench clean

setup: $(VENV)/.done

$(VENV)/.done: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

demo: setup
	$(BIN)/python examples/demo.py --out $(RUN)

test: setup
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

coverage: setup # the same tests, in half as much time again
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --cov=src/holdfast --cov-report=term:skip-covered --cov-fail-under=90

quick: setup
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow"

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

docs: $(VENV)/.docs
	$(BIN)/python docs/build.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs --quiet build --strict

$(VENV)/.docs: $(VENV)/.done
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $@

bench: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt torchattacks foolbox eagerpy
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt requests gitpython
	$(BIN)/python benchmarks/attacks_speed.py

clean:
	rm -rf $(VENV) runs site .pytest_cache .mypy_cache .ruff_cache .coverage*
