# Everything from a fresh clone with Python 3.11+, make and a package registry. A second run reuses .venv.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
DEMO ?= runs/demo
DEMO_FLAGS ?=# for a quick look: make demo DEMO_FLAGS="--optim.epochs 2"

BENCH_VENV ?= .venv-bench
BENCH_FLAGS ?=# make bench BENCH_FLAGS="--only views memory"; on a machine that others use too: "--busy"

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# One thread a process: with one process a core, more threads only wait for each other.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.PHONY: help demo test lint bench bench-quick bench-accuracy profile picture
.DEFAULT_GOAL := help

help:
	@echo "make demo   train BYOV and BYOL on digits, evaluate both, find planted odd images, write $(DEMO)/report.html"
	@echo "make test   the whole test suite"
	@echo "make lint   ruff, mypy, import-linter"
	@echo "make bench  byov beside what one would use instead: benchmarks/results.md (under 40 minutes)"
	@echo "make bench-quick     four of its parts with few rounds, one size each, in runs/bench-quick (3 minutes)"
	@echo "make bench-accuracy  probe accuracy after 10 minutes of training, three seeds (1.5 hours; can be stopped and repeated)"
	@echo "make profile  where the time of a BYOV step goes, and the least it could be (a minute)"
	@echo "make picture  docs/report.png, a screenshot of the demo's page (needs chromium)"

demo: $(VENV)/.stamp-demo
	@if [ -e $(DEMO) ]; then echo "removing $(DEMO), the demo of an earlier time"; rm -rf $(DEMO)/byov $(DEMO)/byol $(DEMO)/folder $(DEMO)/odd.* $(DEMO)/report.html; fi
	$(BIN)/byov train digits --method byov --out $(DEMO)/byov $(DEMO_FLAGS)
	$(BIN)/byov train digits --method byol --out $(DEMO)/byol $(DEMO_FLAGS)
	$(BIN)/byov evaluate $(DEMO)/byov
	$(BIN)/byov evaluate $(DEMO)/byol
	$(BIN)/python benchmarks/planted.py build --normal digits --odd noise:15 letters:15 charts:10:alike --images 500 --out $(DEMO)/folder
	$(BIN)/byov score $(DEMO)/byov $(DEMO)/folder/images --out $(DEMO)/odd.parquet
	$(BIN)/byov report $(DEMO)/byov $(DEMO)/byol --out $(DEMO)/report.html
	@$(BIN)/python benchmarks/planted.py table --brief --scores $(DEMO)/odd.parquet --truth $(DEMO)/folder/truth.csv --column oddness
	@$(BIN)/python benchmarks/planted.py table --brief --scores $(DEMO)/odd.parquet --truth $(DEMO)/folder/truth.csv --column uncertainty
	@echo "odd images: $(DEMO)/odd.html, all measures: $(DEMO)/report.html"

test: $(VENV)/.stamp-test
	$(ONE_THREAD) $(BIN)/python -m pytest -n $(JOBS) -rs

lint: $(VENV)/.stamp-test
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(BENCH_VENV)/.stamp
	$(BENCH_VENV)/bin/python -W ignore benchmarks/run.py $(BENCH_FLAGS)

bench-quick: $(BENCH_VENV)/.stamp
	$(BENCH_VENV)/bin/python -W ignore benchmarks/run.py --quick --out runs/bench-quick $(BENCH_FLAGS)

bench-accuracy: $(BENCH_VENV)/.stamp
	$(BENCH_VENV)/bin/python -W ignore benchmarks/accuracy.py $(BENCH_FLAGS)
	$(BENCH_VENV)/bin/python -W ignore benchmarks/run.py --render

profile: $(VENV)/.stamp-demo
	@KINETO_LOG_LEVEL=99 $(BIN)/python -W ignore benchmarks/profiled.py

picture:
	@test -e $(DEMO)/report.html || { echo "run make demo first"; exit 2; }
	chromium --headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync \
	  --hide-scrollbars --user-data-dir="$$(mktemp -d)" --window-size=1200,1350 --screenshot=docs/report.png \
	  "file://$(abspath $(DEMO)/report.html)"

# ------------------------------------------------------------------------------------------------------------- set-up

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("byov needs Python 3.11 or newer: make PYTHON=/path/to/python" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

# torch first and alone: whatever build of it is found (or was put there by hand), nothing below asks for another.
$(VENV)/.stamp-demo: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing what byov needs into $(VENV) (torch is large: a few minutes the first time)"
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) --editable ".[pretrained]"
	@touch $@

# torchvision without its dependencies: all are there, and its wheel's idea of a torch may be a CUDA one.
# timm, which [test] brings, then finds both and asks for no other.
$(VENV)/.stamp-test: $(VENV)/.stamp-demo
	$(PIP) --no-deps "$$(grep '^torchvision==' constraints.txt)"
	$(PIP) --editable ".[test,lint]"
	@touch $@

# The peers have an environment of their own, so that none of them decides what byov is tested with.
BENCH_PIP := $(BENCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
$(BENCH_VENV)/.stamp: pyproject.toml constraints.txt benchmarks/constraints.txt
	@echo "installing byov and its peers into $(BENCH_VENV) (a few minutes the first time)"
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_PIP) "$$(grep '^torch==' constraints.txt)"
	$(BENCH_PIP) --no-deps "$$(grep '^torchvision==' constraints.txt)"
	$(BENCH_PIP) -c benchmarks/constraints.txt --editable ".[bench]"
	@touch $@
