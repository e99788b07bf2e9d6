# Needs Python 3.11 or newer, make and git. Writes only into this folder.

VENV := .venv
READY := $(VENV)/.ready
DEVELOP := $(VENV)/.ready-develop
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3; do \
	$$name -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && command -v $$name && break; done)
DAILY := not slow and not realdata and not browser
# A process for each processor; a file's tests stay together, for their fixtures.
SIDE_BY_SIDE := --numprocesses logical --dist loadfile

export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
# Prefect's and MLflow's own variables are set by fcl (flows/prefect/environment.py).
export XDG_CACHE_HOME := $(CURDIR)/.fcl/cache
export DO_NOT_TRACK := true
export DVC_NO_ANALYTICS := 1
# In .dvc/config it would be relative to the copy that a queued experiment runs in, and fail there.
export DVC_SITE_CACHE_DIR := $(CURDIR)/.fcl/dvc
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Each process would compile our modules anew, and pytest its tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo ui report docs test test-slow test-all lint audit lock bench clean
.NOTPARALLEL:

help:  ## the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

setup: $(DEVELOP)  ## .venv with what development needs (each target sets up what it needs itself)

demo: $(READY)  ## run the pipeline of params.yaml and compare the methods
	dvc repro
	fcl compare
	@echo 'The report is report/index.html; "make ui" opens MLflow.'

ui: $(READY)  ## MLflow's pages on 127.0.0.1
	fcl ui

report: $(READY)  ## rewrite report/index.html
	fcl report

test: $(DEVELOP)  ## the daily suite
	pytest $(SIDE_BY_SIDE) -m '$(DAILY)'

test-slow: $(DEVELOP)  ## the rest: real tools, faults, real data, pages in a browser
	pytest $(SIDE_BY_SIDE) -m 'not ($(DAILY))'

test-all: test test-slow  ## both

docs: $(DEVELOP)  ## build the site of docs/ in site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet

lint: $(DEVELOP) docs  ## ruff, mypy, the import contracts, and the site's links
	ruff check
	ruff format --check
	mypy
	lint-imports

# CVE-2025-69872: DVC's cache pickles into the user's own folders (SECURITY.md); all versions have it.
audit: .fcl/audit/.ready  ## known vulnerabilities of the pinned packages, by pip-audit (needs the network)
	.fcl/audit/bin/pip-audit --strict --disable-pip --no-deps -r constraints.txt --ignore-vuln CVE-2025-69872

# For every Python from 3.11.0 on. torch and what it brings of CUDA differ from index to index, so they have no hash.
RESOLVE := .fcl/audit/bin/uv pip compile --quiet --universal --python-version 3.11.0 --no-header --no-annotate
WITHOUT_TORCH := grep -vE '^(torch|triton|cuda-.*|nvidia-.*)=='

lock: .fcl/audit/.ready  ## resolve pyproject.toml's ranges: constraints.txt, and with hashes requirements*.lock
	$(RESOLVE) --all-extras -c constraints.txt pyproject.toml | $(WITHOUT_TORCH) > .fcl/audit/develop.txt
	$(RESOLVE) --extra workflow -c .fcl/audit/develop.txt pyproject.toml | $(WITHOUT_TORCH) > .fcl/audit/run.txt
	$(RESOLVE) --no-deps --generate-hashes .fcl/audit/run.txt --output-file requirements.lock
	$(RESOLVE) --no-deps --generate-hashes .fcl/audit/develop.txt --output-file requirements-develop.lock
	{ grep -E '^(#|torch==)' constraints.txt; cat .fcl/audit/develop.txt; } > .fcl/audit/constraints.txt
	mv .fcl/audit/constraints.txt constraints.txt

.fcl/audit/.ready: Makefile
	$(PYTHON) -m venv .fcl/audit
	.fcl/audit/bin/pip install --quiet pip-audit==2.10.1 uv==0.13.8
	@touch $@

bench: $(DEVELOP)  ## all benchmarks as ratios to their yardsticks: half an hour, alone on the machine
	fcl bench

clean:  ## remove caches and build files; data, runs and .venv stay
	rm -rf .fcl build site *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt requirements.lock
	@test -n '$(PYTHON)' || { echo 'fclflow needs Python 3.11 or newer with its venv module; none was found.' >&2; exit 1; }
	@echo 'Setting up $(VENV) with $(PYTHON): about two minutes, once.'
	$(PYTHON) -m venv --clear $(VENV)
	$(VENV)/bin/pip install --quiet --use-pep517 --require-hashes --no-deps -r requirements.lock
	$(VENV)/bin/pip install --quiet --use-pep517 -c constraints.txt -e '.[workflow]'
	@touch $@

$(DEVELOP): $(READY) requirements-develop.lock
	@echo 'Adding what development needs to $(VENV).'
	$(VENV)/bin/pip install --quiet --use-pep517 --require-hashes --no-deps -r requirements-develop.lock
	$(VENV)/bin/pip install --quiet --use-pep517 -c constraints.txt -e '.[workflow,ray,text,dev]'
	@touch $@
