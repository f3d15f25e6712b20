# `make demo` and `make test` are all that a user needs; both set up .venv first, once.
# PYTHON=python3.12 picks the interpreter, ARGS="..." is passed on to the demo or to pytest.

VENV := .venv
RUN := $(VENV)/bin/python
PYTHON ?=
ARGS ?=
N ?= 5

help:
	@echo "make demo     run the three-stage pipeline    (ARGS='--wav FILE', see ARGS=--help)"
	@echo "make test     run the tests                   (ARGS='-k name')"
	@echo "make bench    measure, beside other ways    (ARGS='--quick', see ARGS=--help)"
	@echo "make lint     ruff and mypy"
	@echo "make repeat   a third of the deterministic tests in random order, N times (N=1000)"

demo: $(VENV)/.ready-demo
	@$(RUN) -m examples.pipeline $(ARGS)

test: $(VENV)/.ready-test
	$(RUN) -m pytest $(ARGS)

bench: $(VENV)/.ready-demo $(VENV)-bench/.tried
	@$(RUN) -m benchmarks.bench $(ARGS)

lint: $(VENV)/.ready-dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) -m mypy -p examples -p benchmarks.bench

repeat: $(VENV)/.ready-test
	@.ci/repeat $(N) $(RUN)

# What else is measured has an environment of its own; what cannot be had here is left out, and the output says so.
$(VENV)-bench/.tried: benchmarks/bench/requirements.txt | $(RUN)
	@echo "installing what trio_mori is measured beside into $(VENV)-bench: 350 MB"
	@$(RUN) -m venv --clear $(VENV)-bench
	@$(VENV)-bench/bin/python -m pip install -q --no-deps -r $< || echo "some of it is not to be had here"
	@touch $@

# One stamp for each set of extras; a changed pyproject.toml or constraints.txt installs again.
$(VENV)/.ready-%: pyproject.toml constraints.txt | $(RUN)
	@echo "installing into $(VENV); the first time this fetches torch and may take minutes"
	@$(RUN) -m pip install -q -c constraints.txt -e '.$(EXTRAS_$*)'
	@touch $@

EXTRAS_demo :=
EXTRAS_test := [test]
EXTRAS_dev := [test,dev]

$(RUN):
	@for python in $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.10); do \
	    if "$$python" -c 'import ensurepip, sys, venv; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then \
	        exec "$$python" -m venv --clear $(VENV); \
	    fi; \
	    tried="$$tried $$python ($$("$$python" --version 2>&1 | head -n 1))"; \
	done; \
	echo "Python 3.10 to 3.13 with venv and pip is needed (on Debian also the package python3-venv)." >&2; \
	echo "Tried:$$tried" >&2; \
	echo "Name another one with: make PYTHON=/path/to/python3" >&2; \
	exit 1

.PHONY: help demo test bench lint repeat
.DELETE_ON_ERROR:
.NOTPARALLEL:
