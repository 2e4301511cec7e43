# make demo, make test: nothing but Python 3.11+ and make is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WORKERS ?= 2
EXAMPLES ?= 1500
MINUTES ?= 30
HEAD ?= build/embedded-head

.PHONY: help install fetch demo serve fuzz soak bench-serving article test lint bench bench-quick bench-identity bench-drafters bench-law bench-overhead bench-kernels bench-perplexity bench-eagle embedded-head figures clean

help:
	@echo "make demo     decode a few real prompts, plain and speculative, side by side"
	@echo "make serve    serve the small model over HTTP with OpenAI's API"
	@echo "make test     lint, types, import rule and the whole test suite"
	@echo "make article  reproduce the character-model study as a page with plots"
	@echo "make bench    foredraft beside other engines, 25 minutes; make bench-quick in 5"
	@echo "make install  only make the virtual environment ($(VENV))"
	@echo "make bench-identity, bench-drafters, bench-law, bench-overhead, bench-kernels, bench-perplexity"
	@echo "              the measurements kept under benchmarks/results"
	@echo "make embedded-head  train the EAGLE-3 head that comes with the package again"
	@echo "make soak, bench-serving  the server under load, MINUTES=30; its throughput by concurrency"
	@echo "make fuzz     thousands of requests made from the server's own OpenAPI document"
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
	$(BIN)/foredraft serve --target smollm2-135m --drafter combined:suffix+eagle3

fuzz: $(READY)
	FOREDRAFT_FUZZ=$(EXAMPLES) $(BIN)/python -m pytest -q tests/test_server_fuzz.py

soak: fetch
	$(BIN)/python benchmarks/soak.py --minutes $(MINUTES)

bench-serving: fetch
	$(BIN)/python benchmarks/serving.py

article: $(READY)
	$(BIN)/foredraft lab article

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint fetch
	$(BIN)/python -m pytest -n $(WORKERS)

bench: fetch
	$(BIN)/foredraft bench --install
	$(BIN)/foredraft bench

bench-quick: fetch
	$(BIN)/foredraft bench --preset quick

bench-identity: fetch
	$(BIN)/python benchmarks/identity.py

bench-drafters: fetch
	$(BIN)/python benchmarks/drafters.py

bench-law: fetch
	$(BIN)/python benchmarks/law.py

bench-overhead: fetch
	$(BIN)/python benchmarks/overhead.py

bench-kernels: $(READY)
	$(BIN)/python benchmarks/kernels.py --out benchmarks/results/kernels.json

bench-perplexity: fetch
	$(BIN)/python benchmarks/perplexity.py

bench-eagle: fetch
	$(BIN)/python benchmarks/eagle.py

# The recipe of the head that comes with the package: two hours on two cores that multiply bfloat16 (avx512_bf16), and
# 14 GB under $(HEAD). It goes on where it was stopped.
embedded-head: fetch
	$(BIN)/foredraft train data --out $(HEAD)/data --prompts 8800 --batch 32 --activations int8
	$(BIN)/foredraft train eagle3 --data $(HEAD)/data --out $(HEAD)/run --steps 5800 --batch 8 --lr 8e-4 --warmup 60 \
		--measure-every 200 --patience 20 --precision bfloat16
	$(BIN)/foredraft train data --out $(HEAD)/more --seed 1 --prompts 2400 --batch 48 --activations int16
	$(BIN)/foredraft train data --out $(HEAD)/more --seed 1 --prompts 4600 --batch 64 --activations int8
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 -m foredraft train eagle3 --data $(HEAD)/more \
		--out $(HEAD)/run2 --from $(HEAD)/run/head --train-lm-head --steps 1300 --batch 8 --lr 5e-4 --warmup 60 \
		--held-out 48 --patience 30 --precision bfloat16
	$(BIN)/foredraft export $(HEAD)/run2/head --out src/foredraft/assets/smollm2-135m-eagle3 \
		--verifier HuggingFaceTB/SmolLM2-135M-Instruct

figures: $(READY)
	$(BIN)/python benchmarks/figures.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
