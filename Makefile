# `make demo` and `make test` install what they need into .venv; `make help` lists every command.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q
PINNED := -c constraints.txt
# A plain `torch` would fetch gigabytes of CUDA: the pinned release is installed first, everything else finds it there.
TORCH  := torch==2.13.0

PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile

.PHONY: help demo quick test test-all test-long oracles-test check lint types docs docs-outputs suite chromium axe bench peers reproduce fuzz oracles oldest matrix screenshots pages clean

help:  ## List the commands
	@grep -E '^[a-z-]+:.*  ## ' Makefile | sed -E 's/^([a-z-]+):.*  ## /\1\t/' | expand -t 16

demo: $(VENV)/demo.stamp  ## Run strati on an embedded transformer; the report is out/demo/report.html
	rm -rf out/demo
	$(BIN)/strati demo --out out/demo

quick: $(VENV)/test.stamp lint  ## Lint and the fastest tests, under 2 minutes
	$(PYTEST) -m 'not (slow or browser or ray or long or oracle or thorough)' tests

test: $(VENV)/test.stamp  ## Lint, types, docs and all tests that are not slow, in parallel: about 8 minutes
	@$(MAKE) --no-print-directory -j 2 check suite

test-all: $(VENV)/test.stamp chromium axe  ## Every test (Ray, browser, notebooks, calibrations) and the coverage gate
	$(PYTEST) -m 'not (long or oracle)' --timeout 900 --cov=strati --cov-report=term:skip-covered --cov-fail-under=90

test-long: $(VENV)/test.stamp  ## Tests of many minutes each (paper tables, large calibrations), outside CI
	$(BIN)/python -m pytest -m long --timeout 7200

suite: $(VENV)/test.stamp
	$(PYTEST)

check: lint docs docs-outputs types  ## Lint, types and documentation without the tests

docs-outputs: $(VENV)/test.stamp
	$(BIN)/python tools/fill_docs.py --check

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/test.stamp
	$(BIN)/mypy

docs: $(VENV)/test.stamp  ## Build the documentation into site/
	$(BIN)/zensical build --strict --clean

# The pages that are made from code and stored results.
pages: $(VENV)/test.stamp
	$(BIN)/python tools/api_page.py
	$(BIN)/python tools/cli_page.py
	$(BIN)/python tools/schema_page.py
	$(BIN)/python tools/reproduce_all.py --docs

bench: $(VENV)/test.stamp oracles
	for file in benchmarks/bench_*.py; do echo "== $$file"; $(BIN)/python $$file || exit 1; done

# Beside weightwatcher, devinterp and curvlinops alone, one after the other in one run.
peers: $(VENV)/test.stamp oracles
	$(BIN)/python benchmarks/bench_scan.py --only FCN
	$(BIN)/python benchmarks/bench_llc.py --quick --only devinterp
	$(BIN)/python benchmarks/bench_devinterp.py --quick
	$(BIN)/python benchmarks/bench_curvlinops.py

reproduce: $(VENV)/test.stamp
	$(BIN)/python tools/reproduce_all.py

fuzz: $(VENV)/test.stamp
	$(PIP) install $(PINNED) atheris
	$(BIN)/python tests/fuzz/fuzz_open.py -max_total_time=120

screenshots: $(VENV)/test.stamp chromium
	$(BIN)/python tools/screenshots.py

# weightwatcher, devinterp and curvlinops, which the benchmarks measure against, pull much: they get an environment of their own.
oracles: .venv-oracles/ready.stamp

.venv-oracles/ready.stamp:
	$(PYTHON) -m venv .venv-oracles
	.venv-oracles/bin/python -m pip -q install $(TORCH)
	.venv-oracles/bin/python -m pip -q install $(TORCH) weightwatcher==0.7.7 devinterp==2.0.1 curvlinops-for-pytorch==3.0.1 lycoris-lora==4.1.3 rebasin==0.0.47
# curvlinops pulls a torchvision that does not load beside the CPU torch, and transformers then fails to import.
	.venv-oracles/bin/python -m pip -q uninstall -y torchvision
	.venv-oracles/bin/python -m pip -q install --no-deps pyhessian==0.1
	.venv-oracles/bin/python -m pip -q install -e . hypothesis jsonschema pytest pytest-timeout
	touch $@

# The tools that load exported plans pin other versions of transformers than the peers above.
.venv-recipes/ready.stamp:
	$(PYTHON) -m venv .venv-recipes
	.venv-recipes/bin/python -m pip -q install $(TORCH)
	.venv-recipes/bin/python -m pip -q install $(TORCH) llmcompressor==0.14.0.1 auto-round==0.15.1 nvidia-modelopt==0.47.0 torchao==0.18.0 peft==0.21.2 optimum
	.venv-recipes/bin/python -m pip -q install $(TORCH) --no-build-isolation gptqmodel==7.6.0
	.venv-recipes/bin/python -m pip -q install -e . gguf hypothesis jsonschema pytest pytest-timeout
	touch $@

# transformer-lens pins other versions of transformers and numpy as well.
.venv-lens/ready.stamp:
	$(PYTHON) -m venv .venv-lens
	.venv-lens/bin/python -m pip -q install $(TORCH)
	.venv-lens/bin/python -m pip -q install $(TORCH) transformer-lens==4.3.0
	.venv-lens/bin/python -m pip -q install -e . hypothesis jsonschema pytest pytest-timeout
	touch $@

oracles-test: oracles .venv-recipes/ready.stamp .venv-lens/ready.stamp  ## Compare with weightwatcher, curvlinops, LyCORIS and TransformerLens themselves, and load plans in other tools (outside CI)
	.venv-oracles/bin/python -m pytest -m oracle -W default tests/oracles --ignore tests/oracles/test_recipes.py --ignore tests/oracles/test_transformer_lens.py
	.venv-recipes/bin/python -m pytest -m oracle -W default tests/oracles/test_recipes.py
	.venv-lens/bin/python -m pytest -m oracle -W default tests/oracles/test_transformer_lens.py

# The built wheel in clean environments: every Python that is there; oldest, newest and pinned versions; every extra alone.
# Some of it: make matrix CELLS='--python 3.12 --cell plain-oldest'
matrix:
	$(PYTHON) tools/matrix.py $(CELLS)

# The oldest versions that pyproject.toml allows (torch apart, which is pinned everywhere): the tests that need no browser.
oldest: .venv-oldest/ready.stamp
	.venv-oldest/bin/python -m pytest -n 2 --dist loadfile -W default \
	  tests/network tests/spectra tests/run tests/cli tests/test_foundation.py tests/test_tables.py

.venv-oldest/ready.stamp: pyproject.toml tools/oldest.py
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip -q install $(TORCH)
	.venv-oldest/bin/python tools/oldest.py > .venv-oldest/oldest.txt
	.venv-oldest/bin/python -m pip -q install -c .venv-oldest/oldest.txt -e '.[dev]' -e ./reproductions
	touch $@

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo.stamp: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) install $(PINNED) $(TORCH)
	$(PIP) install $(PINNED) -e '.[torch,plot,transformers]'
	touch $@

$(VENV)/test.stamp: pyproject.toml reproductions/pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) install $(PINNED) $(TORCH)
	$(PIP) install $(PINNED) -e '.[dev]' -e ./reproductions
	touch $@ $(VENV)/demo.stamp

# The page is tested in a real browser where one can be had; without one those tests skip and say so.
chromium:
	@command -v chromium >/dev/null || { \
	  command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ] \
	    && apt-get update -q >/dev/null && apt-get install -qy chromium >/dev/null \
	    || echo "chromium is not installed and cannot be installed here: the browser tests will skip"; }

# axe-core looks for barriers in the page, where npm can be had; without it that test skips and says so.
axe: $(VENV)/test.stamp
	@[ -f $(VENV)/axe.min.js ] || { command -v npm >/dev/null && cd $(VENV) && npm pack -s axe-core@4.10.3 >/dev/null \
	  && tar -xzOf axe-core-4.10.3.tgz package/axe.min.js > axe.min.js; } \
	  || echo "axe-core cannot be had here: the test for barriers will skip"

clean:
	rm -rf out site build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
