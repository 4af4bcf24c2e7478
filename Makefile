# make demo   install Weft into .venv and run `weft demo`
# make test   install what the tests need; lint, types, import rules, tests that need no GPU
# make quick  the tests that need neither torch nor another process, in less than a minute
# make docs   docs/cli.md from the commands' help, and the documentation site into site/
# make exhaustive   the tests that prove again, on more families and sizes, what `make test` proves on a few
# make test-clients   libraries that people use, each in an environment of its own, against a server
# make test-page   the server's page in a browser (CHROMIUM=/usr/bin/chromium, or playwright's own)
# make test-gpu   the tests that need a CUDA device, with the python3 that is there
#
# PYTHON=python3.12 chooses the interpreter that makes .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
# Tests start dozens of processes; without bytecode on disk each would compile all that it imports.
export PYTHONDONTWRITEBYTECODE :=
.DELETE_ON_ERROR:
.PHONY: help demo quick test exhaustive test-clients test-page test-gpu docs lint types imports pytest format clean

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

demo: $(VENV)/.installed-demo
	@$(BIN)/weft demo

# mypy fills the time in which tests wait.
test: lint imports
	@$(MAKE) --no-print-directory -j 2 types pytest

lint: $(VENV)/.installed-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/.installed-test
	$(BIN)/mypy

imports: $(VENV)/.installed-test
	$(BIN)/lint-imports

# More workers than cores, of one thread each, as tests often wait for other processes. A file stays
# together, as its tests share engines. In which order files are taken is in tests/conftest.py.
TESTS := tests --ignore tests/gpu --ignore tests/page
pytest: $(VENV)/.installed-test
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/pytest $(TESTS) --workers 4

quick: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/pure --workers 2

exhaustive: $(VENV)/.installed-test
	EXHAUSTIVE=1 OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/pytest $(TESTS) -m exhaustive \
	  --workers 2

# They want other versions of packages than Weft does, and than one another.
test-clients: $(VENV)/.installed-test
	$(PYTHON) tests/clients/run.py $(abspath $(BIN)/python) --envs $(abspath $(VENV)-clients)

test-page: $(VENV)/.installed-test
	test -d $(VENV)-page || $(PYTHON) -m venv $(VENV)-page
	$(VENV)-page/bin/pip install -q --disable-pip-version-check playwright==1.65.2 pytest
	test -n "$${CHROMIUM:-}" || $(VENV)-page/bin/playwright install chromium
	WEFT_PYTHON=$(abspath $(BIN)/python) $(VENV)-page/bin/python -m pytest --noconftest -c /dev/null tests/page/test_page.py

# What the other tests import need not be there.
test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest tests/gpu

docs: $(VENV)/.installed-test
	$(BIN)/python -m weft.cli.reference > docs/cli.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf $(VENV) $(VENV)-clients $(VENV)-page site .mypy_cache .ruff_cache .import_linter_cache .hypothesis

# Again only when what is installed has changed. The constraints are the versions that were tested,
# so pip does not search.
$(VENV)/.installed-%: pyproject.toml constraints.txt | $(BIN)/python
	@echo 'Installing Weft and what "make $*" needs into $(VENV); the first time takes some minutes.'
	@$(BIN)/python -m pip install --disable-pip-version-check --no-compile --progress-bar off \
	    -c constraints.txt -e ".$(if $(filter-out demo,$*),[$*])" \
	  | while IFS= read -r line; do \
	      case "$$line" in Collecting*|Building*|Installing*) printf '  %.76s\n' "$$line";; esac; \
	    done
	@touch $@

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo 'There is no $(PYTHON); say PYTHON=/path/to/python, 3.11 or newer.' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Weft needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) -V 2>&1);" \
	    'say PYTHON=/path/to/a/newer/python.' >&2; exit 1; }
	@test "$$(uname)" = Linux || { \
	  echo "Weft runs on Linux, and this is $$(uname); use a container or a virtual machine." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
