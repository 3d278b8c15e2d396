# Every target works on a fresh clone with Python 3.11 (or later), make and git: the first one makes .venv.
# Without a GPU, `make install TORCH_INDEX=URL`, with the index of torch's CPU builds, saves two gigabytes.

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell command -v python3.11 || command -v python3)
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
READY := $(VENV)/.ready
LONG := $(VENV)/.long

.DEFAULT_GOAL := help
MINUTES ?= 10
.PHONY: help install run check test test-long fuzz lint format docs pictures bench bench-quick compare golden wheel clean distclean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(READY) ## make .venv with everything in it

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "error: no python3 on PATH; install Python 3.11 or later" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "error: $(PYTHON) is older than Python 3.11; try make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@echo "installing into $(VENV) (torch first, the largest; once) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@$(PIP) install -c constraints.txt -e ".[test,docs]"
	@touch $@

run: $(READY) ## train CartPole-v1 to a mean return of 475
	$(BIN)/headrace up --env CartPole-v1 --workers 2 --num-envs 8 --seed 0 --until-return 475 --timeout-s 600 \
		--run-dir runs/cartpole

# Four at a time, also on two cores: many tests wait, for processes that are killed and come back, for instance.
PYTEST := $(BIN)/python -m pytest -n 4 --dist worksteal

# What a change is tried on while it is made. A change in annexes alone waits for their tests and for those of the main
# house. Markers say what is left out; pyproject.toml says what they mean.
check: $(READY) ## the tests that kill no processes and take no time (under two minutes on 2 cores); ANNEX=slurm: its own
	chosen=$$($(BIN)/python .ci/annex_tests.py $(ANNEX)) && \
		$(PYTEST) -m "not (chaos or netns or slow or processes or long or thorough)" $$chosen

test: $(READY) ## the tests that decide whether a change goes in; ANNEX=slurm: those of one annex
	chosen=$(if $(ANNEX),$$($(BIN)/python .ci/annex_tests.py $(ANNEX))) && $(PYTEST) -m "not thorough" $(PYTEST_FLAGS) $$chosen

# Libraries that read recordings, and those that recordings are exported to: without them their tests are skipped.
$(LONG): $(READY)
	@$(PIP) install -c constraints.txt -e ".[long]"
	@touch $@

test-long: $(LONG) ## the tests that `make test` leaves out, and one round of all benches
	$(PYTEST) -m thorough $(PYTEST_FLAGS)
	$(BIN)/python tests/bench/run.py --quick

fuzz: $(READY) ## lie for MINUTES=10 to broker, learner, worker, policy server, a whole fleet
	$(BIN)/python tests/fuzz/run.py $(MINUTES)

lint: $(READY) ## format, lint, types, spelling, layers and the budget of lines
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --num-workers auto
	$(BIN)/codespell
	$(BIN)/lint-imports --no-cache > /dev/null || $(BIN)/lint-imports --no-cache
	$(BIN)/python .ci/budget.py

format: $(READY) ## repair formatting and what ruff can repair
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(READY) ## build docs/_build/html, with every warning an error
	@$(BIN)/python -c 'import furo, myst_parser, sphinx, sphinx_copybutton' 2> /dev/null \
		|| $(PIP) install -c constraints.txt -e ".[docs]"
	$(BIN)/python docs/_ext/generated_pages.py
	$(BIN)/python -m sphinx -W --keep-going -n -q -b html docs docs/_build/html
	@echo "open $(CURDIR)/docs/_build/html/index.html"

pictures: $(READY) ## take the pictures of the guides again, of a small fleet (needs chromium)
	$(BIN)/python docs/_ext/pictures.py

bench: $(READY) ## measure against the limits, side by side; writes bench-results/
	$(BIN)/python tests/bench/run.py

bench-quick: $(READY) ## one round of short turns (about three minutes): shows that all of it runs
	$(BIN)/python tests/bench/run.py --quick

compare: $(READY) ## measure beside other libraries, in environments of their own; long; some: PEERS="sb3 gymnasium"
	$(BIN)/python tests/bench/compare.py $(PEERS)

golden: $(READY) ## add to tests/golden/ what a new kind of message or space, a new case of sampling, or a release needs
	$(BIN)/python tests/golden/golden_samples.py
	$(BIN)/python tests/golden/golden_fleets.py
	$(BIN)/python tests/golden/golden_recordings.py
	$(BIN)/python tests/golden/golden_chunks.py

wheel: $(READY) ## build dist/*.whl and dist/*.tar.gz; a commit has the same bytes each time
	@rm -rf dist
	@.ci/dist $(BIN)/python dist
	@ls dist/*

clean: ## remove what was built and measured, not .venv
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache bench-results runs docs/_build
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## remove .venv too
	rm -rf $(VENV)
