# `make demo` and `make test` need only Python 3.11 or newer.
# PYTHON=python3.12 selects the interpreter, TORCH_INDEX=URL a package index for torch.

VENV := .venv
BIN := $(VENV)/bin
LOCAL := .local
MARKDOWN := CONTRIBUTING.md README.md SECURITY.md benchmarks docs tests/fixtures
# Number of test processes; each uses one torch thread.
WORKERS ?= 2
PYTEST_FLAGS ?=
# Duration and random seed of `make chaos`.
MINUTES ?= 10
SEED ?= 0

# Tests start many processes, which are faster with cached bytecode.
unexport PYTHONDONTWRITEBYTECODE

# Remove targets of failed commands.
.DELETE_ON_ERROR:
.PHONY: help demo install check test lint format types pytest coverage \
	coverage-html licences test-extended test-slow test-gpu test-envs test-browser test-scale chaos bench docs clean distclean

help:
	@echo "make demo       install, then train an agent on catch and save videos of imagined rollouts"
	@echo "make install    developer install into $(VENV)"
	@echo "make check      lint, types, import order and parity tests (minutes)"
	@echo "make test       lint, types and tests; CI also runs test-extended"
	@echo "make lint       ruff, mdformat and mypy only"
	@echo "make format     format the sources with ruff and the pages with mdformat"
	@echo "make test-extended  tests of further settings, which CI runs after make test"
	@echo "make test-slow  tests that take minutes"
	@echo "make test-envs  test every suite in its own virtual environment (GROUPS=dmc for one)"
	@echo "make test-gpu   tests that need a CUDA device"
	@echo "make chaos      inject faults into runs for $(MINUTES) minutes (MINUTES=2 SEED=1)"
	@echo "make coverage-html  line by line report of the last tests, in $(LOCAL)/coverage-html"
	@echo "make bench      run the benchmarks that this machine can run, with small sizes"
	@echo "make test-browser  test the pages of reverie play and view in Chromium"
	@echo "make test-scale  test actors on a Ray cluster of two nodes on this machine"
	@echo "make docs       build the documentation site, in $(LOCAL)/site"
	@echo "make clean      remove caches and reports; distclean removes $(VENV) too"

demo: $(VENV)/.installed
	$(BIN)/reverie demo

install: $(VENV)/.installed-dev

check: lint
	$(BIN)/pytest -n $(WORKERS) --dist worksteal tests/parity tests/test_layers.py \
		$(PYTEST_FLAGS)

test: lint pytest

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mdformat --check $(MARKDOWN)
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/mdformat $(MARKDOWN)

types: $(VENV)/.installed-dev
	$(BIN)/mypy

pytest: $(VENV)/.installed-dev
	@mkdir -p $(LOCAL)
	@rm -f $(LOCAL)/coverage $(LOCAL)/coverage.* $(LOCAL)/covered.json
	$(BIN)/pytest -n $(WORKERS) --dist worksteal --durations 15 \
		--cov --cov-report json:$(LOCAL)/covered.json \
		--junit-xml $(LOCAL)/junit.xml $(PYTEST_FLAGS)

# The minimum coverage is that of the tests of both targets.
coverage: pytest
	$(MAKE) test-extended
	$(BIN)/python tools/check_coverage.py $(LOCAL)/covered.json

coverage-html: $(LOCAL)/coverage
	$(BIN)/coverage html --no-skip-covered --directory $(LOCAL)/coverage-html

$(LOCAL)/coverage:
	$(MAKE) pytest

licences: $(VENV)/.installed-dev
	$(BIN)/python tools/check_licences.py

test-extended: $(VENV)/.installed-dev
	$(BIN)/pytest -n $(WORKERS) --dist worksteal --durations 10 \
		-m 'extended and not slow and not gpu and not browser and not scale' \
		--cov --cov-append --cov-report json:$(LOCAL)/covered.json $(PYTEST_FLAGS)

test-slow: $(VENV)/.installed-dev
	$(BIN)/pytest -m slow --durations 15 $(PYTEST_FLAGS)

test-gpu: $(VENV)/.installed-dev
	$(BIN)/pytest -m gpu $(PYTEST_FLAGS)

test-envs: $(VENV)/.installed
	$(BIN)/python tools/test_envs.py $(GROUPS)

chaos: $(VENV)/.installed-dev
	$(BIN)/python tools/chaos.py all --minutes $(MINUTES) --seed $(SEED)

test-scale: $(VENV)/.installed-dev
	@$(BIN)/python -c 'import ray' 2>/dev/null || $(BIN)/pip install -q -e '.[ray]'
	$(BIN)/pytest -m scale --durations 5 $(PYTEST_FLAGS) tests/run/test_ray_actors.py tests/campaign/test_ray_campaign.py

test-browser: $(VENV)/.installed-dev
	@sh tools/install_browser.sh $(BIN)
	$(BIN)/pytest -m browser --durations 5 $(PYTEST_FLAGS) tests/play/test_browser.py

bench: $(VENV)/.installed-dev
	$(BIN)/python tools/run_benchmarks.py $(LOCAL)/bench

docs: $(VENV)/.installed-docs
	$(BIN)/python tools/build_docs.py

clean:
	rm -rf $(LOCAL) .mypy_cache .ruff_cache .pytest_cache build dist
	find reverie tests tools benchmarks -name __pycache__ -type d -prune \
		-exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) reverie.egg-info

# One stamp per kind of install: pip runs again only when pyproject.toml changes.
$(VENV)/.installed: pyproject.toml tools/install.sh
	@PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" sh tools/install.sh $(VENV) '.[play]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml tools/install.sh
	@PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" sh tools/install.sh $(VENV) '.[dev]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-docs: pyproject.toml tools/install.sh
	@PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" sh tools/install.sh $(VENV) '.[docs]'
	@touch $@ $(VENV)/.installed
