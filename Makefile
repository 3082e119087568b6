# Two commands: `make train` sets up and runs the main job, `make test` sets up and passes the tests.
#
# `make gpu` runs every GPU test and measurement on this machine; ARGS="--list" names them.
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
DEV_READY :=
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
DEV_READY := $(VENV)/.ready-dev
endif
PIP := $(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: train test gpu lint format clean

train: $(READY)
	$(PY) examples/train.py $(if $(PROCS),--nproc-per-node $(PROCS)) $(ARGS)

test: $(READY)
	OMP_NUM_THREADS=1 $(PY) -m pytest -q $(ARGS)

gpu: $(READY)
	$(PY) benchmarks/suite.py $(ARGS)

lint: $(DEV_READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(DEV_READY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:
	rm -rf $(or $(strip $(VENV)),.venv) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# PyTorch first and alone: a resolver that starts from megatron-core may bring another build of it.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(if $(PYTHON),,$(error Python 3.11, 3.12 or 3.13 is needed and none was found: name one with PYTHON=...))
	@echo "Setting up $(VENV) with $(PYTHON); the first time downloads PyTorch"
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable ".[megatron,examples,test]"
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	$(PIP) --editable ".[megatron,examples,test,dev]"
	@touch $@
