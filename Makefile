# make demo, make test: nothing but Python 3.11+ and make is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WORKERS ?= 2

.PHONY: help install fetch demo serve article test lint bench-identity bench-law bench-overhead bench-kernels bench-perplexity figures clean

help:
	@echo "make demo     decode a few real prompts, plain and speculative, side by side"
	@echo "make serve    serve the small model over HTTP with OpenAI's API"
	@echo "make test     lint, types, import rule and the whole test suite"
	@echo "make article  reproduce the character-model study as a page with plots"
	@echo "make install  only make the virtual environment ($(VENV))"
	@echo "make bench-identity, bench-law, bench-overhead, bench-kernels, bench-perplexity"
	@echo "              the measurements kept under benchmarks/results"
	@echo "make figures  write the README's figures from them"

install: $(READY)

$(READY): pyproject.toml constraints.txt $(wildcard setup.py src/foredraft/kernels/csrc/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --progress-bar on -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --progress-bar on -c constraints.txt -e '.[dev,server]'
	@touch $(READY)

fetch: $(READY)
	$(BIN)/foredraft models fetch smollm2-135m

demo: fetch
	$(BIN)/foredraft demo

serve: fetch
	$(BIN)/foredraft serve --target smollm2-135m

article: $(READY)
	$(BIN)/foredraft lab article

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint fetch
	$(BIN)/python -m pytest -n $(WORKERS)

bench-identity: fetch
	$(BIN)/python benchmarks/identity.py

bench-law: fetch
	$(BIN)/python benchmarks/law.py

bench-overhead: fetch
	$(BIN)/python benchmarks/overhead.py

bench-kernels: $(READY)
	$(BIN)/python benchmarks/kernels.py --out benchmarks/results/kernels.json

bench-perplexity: fetch
	$(BIN)/python benchmarks/perplexity.py

figures: $(READY)
	$(BIN)/python benchmarks/figures.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
