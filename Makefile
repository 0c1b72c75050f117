# Everything a fresh machine needs: `make demo` and `make test`. No other step.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q
PINNED := -c constraints.txt
# A plain `torch` would fetch gigabytes of CUDA: the pinned release is installed first, everything else finds it there.
TORCH  := torch==2.13.0

.PHONY: demo test check docs chromium slow bench peers reproduce fuzz oracles oldest matrix coverage screenshots pages axe clean

demo: $(VENV)/demo.stamp
	rm -rf out/demo  # of an earlier version, whose study this one would not go on with
	$(BIN)/strati demo --out out/demo

test: $(VENV)/test.stamp chromium axe check
	$(BIN)/python -m pytest -n 2 --dist loadfile

check: $(VENV)/test.stamp docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/fill_docs.py --check

docs: $(VENV)/test.stamp
	$(BIN)/python -m mkdocs build --strict --quiet

# The pages that are made from code and stored results.
pages: $(VENV)/test.stamp
	$(BIN)/python tools/api_page.py
	$(BIN)/python tools/cli_page.py
	$(BIN)/python tools/schema_page.py
	$(BIN)/python tools/reproduce_all.py --docs

slow: $(VENV)/test.stamp
	$(BIN)/python -m pytest -m slow --timeout 3600

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
	.venv-oracles/bin/python -m pip -q install $(TORCH) weightwatcher==0.7.7 devinterp==2.0.1 curvlinops-for-pytorch==3.0.1
# curvlinops pulls a torchvision that does not load beside the CPU torch, and transformers then fails to import.
	.venv-oracles/bin/python -m pip -q uninstall -y torchvision
	touch $@

# The built wheel in clean environments: every Python that is there; oldest, newest and pinned versions; every extra alone.
# Some of it: make matrix CELLS='--python 3.12 --cell plain-oldest'
matrix:
	$(PYTHON) tools/matrix.py $(CELLS)

# Which lines the quick tests reach.
coverage: $(VENV)/test.stamp
	$(PIP) install $(PINNED) pytest-cov
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not slow and not browser and not ray' --cov=strati --cov-report=term-missing:skip-covered tests

# The oldest versions that pyproject.toml allows (torch apart, which is pinned everywhere): the tests that need no browser.
oldest: .venv-oldest/ready.stamp
	.venv-oldest/bin/python -m pytest -n 2 --dist loadfile -m 'not slow and not browser and not ray' -W default \
	  tests/network tests/spectra tests/run tests/cli tests/test_foundation.py tests/test_tables.py

.venv-oldest/ready.stamp: pyproject.toml tools/oldest.py
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip -q install $(TORCH)
	.venv-oldest/bin/python tools/oldest.py > .venv-oldest/oldest.txt
	.venv-oldest/bin/python -m pip -q install -c .venv-oldest/oldest.txt -e '.[dev]'
	touch $@

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo.stamp: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) install $(PINNED) $(TORCH)
	$(PIP) install $(PINNED) -e '.[torch,plot]'
	touch $@

$(VENV)/test.stamp: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) install $(PINNED) $(TORCH)
	$(PIP) install $(PINNED) -e '.[dev]'
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
