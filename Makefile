# Everything runs from a fresh clone with Python 3.11+, make and a package registry. A second call reuses .venv.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
DEMO ?= runs/demo
DEMO_FLAGS ?=# for a quick look: make demo DEMO_FLAGS="--optim.epochs 2"

CASES ?= 10000
SEED ?= 0

BENCH_VENV ?= .venv-bench
BENCH_FLAGS ?=# make bench BENCH_FLAGS="--only views memory"; on a machine that others use too: "--busy"

CHAOS_FLAGS ?=# make chaos-stops CHAOS_FLAGS="--campaign kills --minutes 10"

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# One thread per process: with one process per core, more threads only wait for each other.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.PHONY: help demo test chaos lint docs bench bench-quick bench-accuracy profile chaos-stops picture
.DEFAULT_GOAL := help

help:
	@echo "make demo   train BYOV and BYOL on digits, evaluate both, find planted odd images, write $(DEMO)/report.html"
	@echo "make test   run the whole test suite"
	@echo "make chaos  damage $(CASES) files of every kind: each is read, or refused in one sentence (20 minutes)"
	@echo "make lint   run ruff, mypy and import-linter"
	@echo "make docs   build the documentation site in site/; warnings are errors"
	@echo "make bench  compare byov with other libraries: benchmarks/results.md (under 40 minutes)"
	@echo "make bench-quick     four parts of it with few rounds, in runs/bench-quick (3 minutes)"
	@echo "make bench-accuracy  probe accuracy after 10 minutes of training, three seeds (1.5 hours; resumes if repeated)"
	@echo "make profile  show where the time of a BYOV step goes, and its lower bound (a minute)"
	@echo "make chaos-stops  stop every long command in every way, and check that nothing is lost (an hour)"
	@echo "make picture  take a screenshot of the demo's page: docs/report.png (needs chromium)"

demo: $(VENV)/.stamp-demo
	@if [ -e $(DEMO) ]; then echo "removing an earlier demo in $(DEMO)"; rm -rf $(DEMO)/byov $(DEMO)/byol $(DEMO)/folder $(DEMO)/odd.* $(DEMO)/report.html; fi
	$(BIN)/byov train digits --method byov --out $(DEMO)/byov $(DEMO_FLAGS)
	$(BIN)/byov train digits --method byol --out $(DEMO)/byol $(DEMO_FLAGS)
	$(BIN)/byov evaluate $(DEMO)/byov
	$(BIN)/byov evaluate $(DEMO)/byol
	$(BIN)/python benchmarks/planted.py build --normal digits --odd noise:15 letters:15 charts:10:alike --images 500 --out $(DEMO)/folder
	$(BIN)/byov score $(DEMO)/byov $(DEMO)/folder/images --out $(DEMO)/odd.parquet
	$(BIN)/byov report $(DEMO)/byov $(DEMO)/byol --out $(DEMO)/report.html
	@$(BIN)/python benchmarks/planted.py table --brief --scores $(DEMO)/odd.parquet --truth $(DEMO)/folder/truth.csv --column oddness
	@$(BIN)/python benchmarks/planted.py table --brief --scores $(DEMO)/odd.parquet --truth $(DEMO)/folder/truth.csv --column uncertainty
	@echo "odd images: $(DEMO)/odd.html, all metrics: $(DEMO)/report.html"

test: $(VENV)/.stamp-test
	$(ONE_THREAD) $(BIN)/python -m pytest -n $(JOBS) -rs

chaos: $(VENV)/.stamp-test
	$(ONE_THREAD) PYTHONPATH=tests $(BIN)/python tests/fuzz.py --cases $(CASES) --seed $(SEED)

lint: $(VENV)/.stamp-test
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

# mkdocs.yml sets strict: a broken link, a missing page or an unknown name fails the build.
docs: $(VENV)/.stamp-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "documentation: site/index.html"

bench: $(BENCH_VENV)/.stamp
	$(BENCH_VENV)/bin/python -W ignore benchmarks/run.py $(BENCH_FLAGS)

bench-quick: $(BENCH_VENV)/.stamp
	$(BENCH_VENV)/bin/python -W ignore benchmarks/run.py --quick --out runs/bench-quick $(BENCH_FLAGS)

bench-accuracy: $(BENCH_VENV)/.stamp
	$(BENCH_VENV)/bin/python -W ignore benchmarks/accuracy.py $(BENCH_FLAGS)
	$(BENCH_VENV)/bin/python -W ignore benchmarks/run.py --render

profile: $(VENV)/.stamp-demo
	@KINETO_LOG_LEVEL=99 $(BIN)/python -W ignore benchmarks/profiled.py

chaos-stops: $(VENV)/.stamp-test
	$(ONE_THREAD) $(BIN)/python -W ignore benchmarks/chaos.py $(CHAOS_FLAGS)

picture:
	@test -e $(DEMO)/report.html || { echo "run make demo first"; exit 2; }
	chromium --headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync \
	  --hide-scrollbars --user-data-dir="$$(mktemp -d)" --window-size=1200,1350 --screenshot=docs/report.png \
	  "file://$(abspath $(DEMO)/report.html)"

# ------------------------------------------------------------------------------------------------------------- set-up

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("byov needs Python 3.11 or newer: make PYTHON=/path/to/python" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

# torch first and alone: whatever build is found (or was installed by hand), nothing below asks for another.
$(VENV)/.stamp-demo: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing byov and its dependencies into $(VENV) (torch is large: a few minutes the first time)"
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) --editable ".[pretrained]"
	@touch $@

# torchvision without its dependencies: all are installed, and its wheel may ask for a CUDA build of torch.
# timm, which [test] installs, then finds both and asks for no other.
$(VENV)/.stamp-test: $(VENV)/.stamp-demo
	$(PIP) --no-deps "$$(grep '^torchvision==' constraints.txt)"
	$(PIP) --editable ".[test,lint]"
	@touch $@

$(VENV)/.stamp-docs: $(VENV)/.stamp-demo
	$(PIP) --editable ".[docs]"
	@touch $@

# The peers have a separate environment, so that none of them decides what byov is tested with.
BENCH_PIP := $(BENCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
$(BENCH_VENV)/.stamp: pyproject.toml constraints.txt benchmarks/constraints.txt
	@echo "installing byov and its peers into $(BENCH_VENV) (a few minutes the first time)"
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_PIP) "$$(grep '^torch==' constraints.txt)"
	$(BENCH_PIP) --no-deps "$$(grep '^torchvision==' constraints.txt)"
	$(BENCH_PIP) -c benchmarks/constraints.txt --editable ".[bench]"
	@touch $@
