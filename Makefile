# One command each: `make demo` shows what ddtree does, `make test` passes the tests. Both set themselves up.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin

SGLANG_VENV := .venv-sglang

.PHONY: help demo test test-sglang check format bench clean

help:
	@echo "make demo     answer four questions with plain decoding, a draft chain and a draft tree"
	@echo "make test     set up what the tests need, and run them"
	@echo "make test-sglang  the SGLang plugin against the real SGLang on this CPU, in an environment of its own"
	@echo "make check    formatting, lint, types, import layers"
	@echo "make format   apply formatting and safe lint fixes"
	@echo "make bench    measure decoding on this CPU (about half an hour)"
	@echo "make clean    remove the environment and caches"
	@echo "Options: PYTHON=python3.12; TORCH=torch==2.11.0; TORCH_INDEX=URL to take torch from another index"

demo:
	@$(PYTHON) scripts/setup_env.py $(VENV)
	@$(RUN)/ddtree demo

test:
	@$(PYTHON) scripts/setup_env.py $(VENV) dev train server
	@$(RUN)/ddtree pull
	OMP_NUM_THREADS=1 $(RUN)/python -m pytest -n auto --dist worksteal

test-sglang:
	@$(PYTHON) scripts/setup_sglang_env.py $(SGLANG_VENV)
	OMP_NUM_THREADS=1 $(SGLANG_VENV)/bin/python -m pytest -W ignore tests/sglang
	$(SGLANG_VENV)/bin/python -m pytest -W ignore tests/unit/test_exports.py -k sglang_plugin

check:
	@$(PYTHON) scripts/setup_env.py $(VENV) dev train server
	$(RUN)/ruff format --check
	$(RUN)/ruff check
	$(RUN)/mypy
	$(RUN)/lint-imports --no-logo

format:
	@$(PYTHON) scripts/setup_env.py $(VENV) dev train server
	$(RUN)/ruff format
	$(RUN)/ruff check --fix

bench:
	@$(PYTHON) scripts/setup_env.py $(VENV)
	$(RUN)/python benchmarks/cpu_decode.py --out benchmarks/results/cpu_decode.json

clean:
	rm -rf $(VENV) $(SGLANG_VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
