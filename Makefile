# The one task runner; CI calls the same targets (.ci/run). `make help` lists them.
#
# The environment lives in .venv. An install leaves a stamp named after the part of pyproject.toml that decides what is
# installed, so a repeated `make` installs nothing and needs no network, and a checkout that only moves times does not either.

PYTHON ?= python3
ARGS ?=
VENV := .venv
PY := $(VENV)/bin/python
SGLANG_VENV := .venv-sglang
RAY_VENV := .venv-ray

KEY := $(shell sed '/^. ---- tools ----/q' pyproject.toml | cksum | cut -d' ' -f1)
CORE := $(VENV)/.strawq-core-$(KEY)
DEV := $(VENV)/.strawq-dev-$(KEY)
BENCH := $(VENV)/.strawq-bench-$(KEY)
RAY := $(RAY_VENV)/.strawq-ray-$(KEY)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# An exported PYTHONPATH or PYTHONHOME would put other code before the environment's own.
unexport PYTHONHOME
unexport PYTHONPATH

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test check bench soak campaign test-sglang test-ray format clean

help: ## list the targets
	@echo "make TARGET [ARGS='...'] [PYTHON=python3.12]"
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1 /p' Makefile | while read -r name text; do printf '  %-13s %s\n' "$$name" "$$text"; done

demo: $(CORE) ## install the core alone and run `strawq demo` (ARGS goes to it)
	@$(VENV)/bin/strawq demo $(ARGS)

# How many workers: tests/conftest.py. `worksteal` gives each a row of neighbours, which share fixtures. A test that hangs
# takes its worker along (faulthandler_timeout): the second one ends the run.
test: $(DEV) ## run the test suite, two workers for each core, four at most (ARGS goes to pytest: -n0 for none)
	$(PY) -m pytest -n auto --dist worksteal --max-worker-restart 1 $(ARGS)

check: $(DEV) ## format, lint, types, import direction, contracts
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -m pytest -q tests/architecture
	@if [ -f tools/contracts.py ]; then echo "$(PY) -m tools.contracts --check"; $(PY) -m tools.contracts --check; fi

format: $(DEV) ## rewrite the sources as `make check` wants them
	$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .

bench: $(CORE) ## measure strawq beside straw-queue, or alone where that cannot be had (ARGS goes to tools.bench)
	@$(MAKE) --no-print-directory $(BENCH) || echo "strawq: straw-queue cannot be installed here; measuring strawq alone" >&2
	$(PY) -m tools.bench $(ARGS)

soak: $(CORE) ## 200,000 groups through one pool, processes killed all the time (ARGS goes to tools.soak)
	$(PY) -m tools.soak $(ARGS)

campaign: $(DEV) ## 10,000 seeds of the simulation (ARGS goes to tools.campaign), then the long randomised tests
	$(PY) -m tools.campaign $(ARGS)
	$(PY) -m pytest -m campaign -o faulthandler_timeout=0

test-sglang: $(DEV) ## tests against a real SGLang engine on the CPU (2.6 GB, own environment)
	STRAWQ_SGLANG_VENV="$(abspath $(SGLANG_VENV))" $(PY) tools/sglang_cpu/run.py $(ARGS)

test-ray: $(RAY) ## tests of `strawq work --ray` on a local Ray cluster of several nodes (own environment)
	$(RAY_VENV)/bin/python -m pytest $(or $(ARGS),tests/ray)

clean: ## remove builds and caches; the environments (.venv, .venv-sglang, .venv-ray) stay
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name '.venv*' -prune -o -name .git -prune -o -type d -name __pycache__ -exec rm -rf {} +

# ---- environments ----

# `pip` is the last file that creating an environment writes: where it is, the environment is whole.
%/bin/pip:
	@command -v $(PYTHON) >/dev/null || { echo "strawq: no '$(PYTHON)' on PATH; name a Python 3.10 or newer: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "strawq: needs Python 3.10 or newer, and '$(PYTHON)' is $$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])'); try make PYTHON=python3.12" >&2; exit 1; }
	@if $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then $(PYTHON) -m venv $*; \
	elif command -v uv >/dev/null; then uv venv --quiet --allow-existing --seed --python $(PYTHON) $*; \
	elif $(PYTHON) -c 'import virtualenv' 2>/dev/null; then $(PYTHON) -m virtualenv --quiet $*; \
	elif command -v virtualenv >/dev/null; then virtualenv --quiet --python $(PYTHON) $*; \
	else echo "strawq: '$(PYTHON)' cannot create environments (no ensurepip); install python3-venv (Debian, Ubuntu: apt install python3-venv), uv or virtualenv" >&2; exit 1; fi

# pip before 21.3 cannot install a pyproject.toml in place; a newer one is left as it is, without a look at the network.
$(CORE): | $(VENV)/bin/pip
	@echo "installing strawq into $(VENV)"
	@$(PY) -m pip install --quiet 'pip>=21.3'
	@$(PY) -m pip install --quiet --editable .
	@touch $@

$(DEV): | $(VENV)/bin/pip
	@echo "installing strawq[dev] into $(VENV)"
	@$(PY) -m pip install --quiet 'pip>=21.3'
	@$(PY) -m pip install --quiet --editable '.[dev]'
	@touch $(CORE) $@

$(BENCH): | $(VENV)/bin/pip
	@echo "installing strawq[bench] into $(VENV) (torch: this takes minutes)"
	@$(PY) -m pip install --quiet 'pip>=21.3'
	@$(PY) -m pip install --quiet --editable '.[bench]'
	@touch $(CORE) $@

$(RAY): | $(RAY_VENV)/bin/pip
	@echo "installing strawq[dev,ray] into $(RAY_VENV)"
	@$(RAY_VENV)/bin/python -m pip install --quiet 'pip>=21.3'
	@$(RAY_VENV)/bin/python -m pip install --quiet --editable '.[dev,ray]'
	@touch $@
