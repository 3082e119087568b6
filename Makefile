# Two commands: `make train` sets up and runs the main job, `make test` sets up and passes the tests.
#
# `make fuzz` compares attentions drawn at random with dense float64; ARGS="--help" says how many, and over which ranks.
# `make gpu` runs every test that computes on a GPU; benchmarks/README.md has the commands that measure.
#
#   make train PROCS=4 ARGS="--train-iters 20"     more ranks, other arguments of examples/train.py
#   make train VENV= PYTHON=python3                no virtual environment: the interpreter and PyTorch of a container

VENV ?= .venv
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13; do \
	if $$p -c "$(SUPPORTED)" 2>/dev/null; then echo $$p; break; fi; done)
PROCS ?=
ARGS ?=

ifeq ($(strip $(VENV)),)
PY := $(PYTHON)
READY :=
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
endif
PIP := $(PY) -m pip install --quiet --disable-pip-version-check

.PHONY: train test fuzz gpu lint format clean

train: $(READY)
	$(PY) examples/train.py $(if $(PROCS),--nproc-per-node $(PROCS)) $(ARGS)

test: $(READY)
	OMP_NUM_THREADS=1 $(PY) -m pytest -q $(ARGS)

fuzz: $(READY)
	OMP_NUM_THREADS=1 $(PY) -m dfa_megatron.testing.fuzz $(or $(ARGS),--over together gloo)

gpu: $(READY)
	$(PY) -m pytest -q -m gpu $(ARGS)

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m codespell_lib

format: $(READY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:
	rm -rf $(or $(strip $(VENV)),.venv) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# PyTorch first and alone, in the build that is right for the machine; all else by hash, from the lock.
$(VENV)/.ready: pyproject.toml constraints.txt locks/dev.txt
	$(if $(PYTHON),,$(error Python 3.11, 3.12 or 3.13 is needed and none was found: name one with PYTHON=...))
	@echo "Setting up $(VENV) with $(PYTHON); the first time downloads PyTorch"
	$(PYTHON) -m venv $(VENV)
	$(PIP) --constraint constraints.txt torch
	$(PIP) --no-deps --require-hashes --requirement locks/dev.txt
	$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@
