# Two commands: `make train` sets up and runs the main job, `make test` sets up and passes the tests.
#
# `make quick` passes some of every kind of test in a few minutes.
# `make fuzz` compares attentions drawn at random with dense float64; ARGS="--help" says how many, and over which ranks.
# `make models` compares a tiny model of every type of transformers on two ranks with one process, in ten minutes.
# `make gpu` runs the tests that compute on a GPU, some cases of each kernel's (7 minutes on one H200, 9 with flash-linear-attention), `make gpu-all` all; benchmarks/README.md has the commands that measure.
# `make paper` measures the paper's claims again on two GPUs in half an hour; `make paper-toy` does so at toy size on a CPU.
#
#   make train PROCS=4 ARGS="--train-iters 20"     more ranks, other arguments of examples/train.py
#   make test WORKERS=8 ARGS=tests/plan            in more processes than three; WORKERS= for one, without pytest-xdist
#   make train VENV= PYTHON=python3                no virtual environment: the interpreter and PyTorch of a container

VENV ?= .venv
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13; do \
	if $$p -c "$(SUPPORTED)" 2>/dev/null; then echo $$p; break; fi; done)
PROCS ?=
ARGS ?=

PLAN := geometry ir masks layouts pack heads greedy choose cost draw
KERNELS := conformance segments stress
QUICK := $(PLAN:%=tests/plan/test_%.py) $(KERNELS:%=tests/kernels/test_kernel_%.py) \
	tests/remat/test_frames.py tests/test_architecture.py tests/test_house.py \
	"tests/remat/test_attention.py::test_remat_runs_and_sends_half_of_full_recompute_with_the_same_bits[2-ring]" \
	"tests/runtime/comm/test_gloo.py::test_every_schedule_and_dtype_is_exact_over_gloo[2]" \
	"tests/runtime/execute/test_bound.py::test_replays_on_one_rank_are_exact" \
	"tests/runtime/test_heads.py::test_every_count_of_heads_is_exact[3-3]" \
	"tests/runtime/test_combinations.py::test_options_drawn_at_random_are_exact_together_or_refused[--over gloo --ranks 2 --first 32 --cases 16]"

ifeq ($(strip $(VENV)),)
PY := $(PYTHON)
READY :=
WORKERS ?=
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
# One more than the cores of a small machine: many tests wait for a timeout, or for each other's messages.
WORKERS ?= 3
endif
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -q $(if $(WORKERS),-n $(WORKERS) --dist loadgroup)
PIP := $(PY) -m pip install --quiet --disable-pip-version-check

.PHONY: train test quick fuzz fuzz-frameworks models gpu gpu-all paper paper-toy lint format docs clean

train: $(READY)
	$(PY) examples/train.py $(if $(PROCS),--nproc-per-node $(PROCS)) $(ARGS)

test: $(READY)
	$(PYTEST) $(ARGS)

quick: $(READY)
	$(PYTEST) $(QUICK) $(ARGS)

fuzz: $(READY)
	OMP_NUM_THREADS=1 $(PY) -m tests.fuzz $(or $(ARGS),--over together gloo)

fuzz-frameworks: $(READY)
	ONLY_SET_UP=1 .ci/deepspeed.sh
	OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu $(VENV)/deepspeed/bin/python -W ignore -m tests.fuzz --over frameworks $(ARGS)

models: $(READY)
	ONLY_SET_UP=1 .ci/deepspeed.sh
	OMP_NUM_THREADS=1 $(VENV)/deepspeed/bin/python -W ignore -m tests.huggingface.sweep $(or $(ARGS),--out dfa_megatron/huggingface/models.json)

# Each kernel is compiled once on the machine; what FlashAttention-4 compiled is kept beside the repository's runs.
gpu gpu-all fuzz: export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED := 1
gpu gpu-all: $(READY)
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -m gpu --by-file -n $$((($$(nproc --all) + 1) / 2)) --dist loadgroup $(if $(@:gpu=),,--drawn 12) $(ARGS)

paper paper-toy: $(READY)
	PYTHON=$(PY) benchmarks/sets.sh $@ runs/$@ $(ARGS)

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m codespell_lib

format: $(READY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: $(READY)
	.ci/docs.sh $(ARGS)

clean:
	rm -rf $(or $(strip $(VENV)),.venv) build dist .pytest_cache .mypy_cache .ruff_cache

# PyTorch first and alone, in the build that is right for the machine; all else by hash, from the lock.
$(VENV)/.ready: pyproject.toml constraints.txt locks/dev.txt
	$(if $(PYTHON),,$(error Python 3.11, 3.12 or 3.13 is needed and none was found: name one with PYTHON=...))
	@echo "Setting up $(VENV) with $(PYTHON); the first time downloads PyTorch"
	$(PYTHON) -m venv $(VENV)
	$(PIP) --constraint constraints.txt torch
	$(PIP) --no-deps --require-hashes --requirement locks/dev.txt
	$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@
