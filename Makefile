# Needs Python 3.11 or newer, make and git. Everything that is written stays in this folder.

VENV := .venv
READY := $(VENV)/.ready
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3; do \
	$$name -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && command -v $$name && break; done)
DAILY := not slow and not realdata and not browser

export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
# Prefect's and MLflow's own variables are set by fcl (flows/environment.py).
export XDG_CACHE_HOME := $(CURDIR)/.fcl/cache
export DO_NOT_TRACK := true
export DVC_NO_ANALYTICS := 1
# In .dvc/config it would be relative to a queued experiment's copy, which then fails.
export DVC_SITE_CACHE_DIR := $(CURDIR)/.fcl/dvc
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup demo ui report docs test test-slow test-all lint audit lock bench clean
.NOTPARALLEL:

help:  ## what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

setup: $(READY)  ## .venv with the pinned packages (the others do this by themselves)

demo: $(READY)  ## run the pipeline of params.yaml and compare the methods
	dvc repro
	fcl compare
	@echo 'The report is report/index.html; "make ui" opens MLflow.'

ui: $(READY)  ## MLflow's pages on 127.0.0.1
	fcl ui

report: $(READY)  ## write report/index.html anew
	fcl report

test: $(READY)  ## the suite of every day
	pytest -m '$(DAILY)'

test-slow: $(READY)  ## the rest: real tools, faults, real data, pages in a browser
	pytest -m 'not ($(DAILY))' --timeout 600

test-all: test test-slow  ## both

docs: $(READY)  ## the site of docs/ into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet

lint: $(READY) docs  ## ruff, mypy, the import contracts, and the site's links
	ruff check
	ruff format --check
	mypy
	lint-imports

# CVE-2025-69872: DVC's cache pickles into folders that are the user's own (SECURITY.md); no version without it.
audit: .fcl/audit/.ready  ## known holes of the pinned packages, by pip-audit (wants the network)
	.fcl/audit/bin/pip-audit --strict --disable-pip --no-deps -r constraints.txt --ignore-vuln CVE-2025-69872

lock: .fcl/audit/.ready  ## requirements.lock anew from constraints.txt: a hash of each file of each version
	.fcl/audit/bin/uv pip compile --quiet --no-deps --generate-hashes --no-header --no-annotate \
		--no-emit-package torch --python-version 3.11.7 constraints.txt --output-file requirements.lock

.fcl/audit/.ready: Makefile
	$(PYTHON) -m venv .fcl/audit
	.fcl/audit/bin/pip install --quiet pip-audit==2.10.1 uv==0.13.8
	@touch $@

bench: $(READY)  ## every benchmark as a ratio to its yardstick: half an hour, alone on the machine
	fcl bench

clean:  ## caches and build files; data, runs and .venv stay
	rm -rf .fcl build site *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt requirements.lock
	@test -n '$(PYTHON)' || { echo 'fclflow needs Python 3.11 or newer with its venv module; none was found.' >&2; exit 1; }
	@echo 'Setting up $(VENV) with $(PYTHON): about two minutes, once.'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --use-pep517 --require-hashes --no-deps -r requirements.lock
	$(VENV)/bin/pip install --quiet --use-pep517 -c constraints.txt -e '.[workflow,ray,text,dev]'
	@touch $@
