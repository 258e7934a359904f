# Everything a developer needs; `make demo` and `make test` set up by themselves.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
READY := .venv/.ready

.PHONY: setup demo test lint bench schemas clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python3"; exit 1; }
	@echo "Setting up .venv with $(PYTHON) (torch is large; the first time takes minutes)"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(READY)

demo: $(READY)
	$(BIN)/stoker demo

test: $(READY)
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python -m benchmarks.launch
	$(BIN)/python -m benchmarks.rebuild
	$(BIN)/python -m benchmarks.submit
	$(BIN)/python -m benchmarks.preempt
	$(BIN)/python -m benchmarks.scheduler

schemas: $(READY)
	$(BIN)/python -m stoker_proto.generate
	$(BIN)/python -m stoker_chassis.asyncapi

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis stoker-data
