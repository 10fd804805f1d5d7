# Everything that a person or a CI machine does here, one word each; `make` alone lists the words.
#
# Each word prepares what it needs and no more, in ./.venv, once. If $(PYTHON) has torch,
# that torch is used, and what else is there is not installed again (nor is a network needed for it);
# if not, TORCH is installed first. So
#     make test PYTHON=/path/to/python     tests against that Python and its torch (after make distclean)
#
# CUDA=1 compiles the CUDA kernels, CUDA=0 leaves them out. Without a choice they are compiled where nvcc and a GPU
# are found (tools/cuda_image.py).

PYTHON ?= python3
TORCH ?= torch==2.13.0
# Where there is no GPU, torch without CUDA, which PyPI does not have: 200 MB in place of 3 GB.
TORCH_INDEX ?= $(if $(wildcard /dev/nvidiactl /proc/driver/nvidia/gpus/*),,https://download.pytorch.org/whl/cpu)
TESTS ?= tests
SHARD ?= 1/16
ARGS ?=
CUDA ?=

ifneq ($(filter 0 1,$(CUDA)),)
export ZSHARD_CUDA := $(CUDA)
else ifeq ($(origin CUDA),command line)
$(error CUDA must be 0 or 1, got '$(CUDA)')
endif

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --retries 2 install --quiet
CLANG_FORMAT := $(PY) -c 'import clang_format; clang_format.clang_format()'
TIDY_FILES = $(sort $(shell find csrc -name '*.c'))
C_FILES = $(sort $(shell find csrc cuda tests/c -name '*.[ch]' -o -name '*.[ch]pp' -o -name '*.cu' -o -name '*.cuh'))

# All tests without further words go to a worker more than there are cores (of few), file by file: many wait.
WORKERS := $(PY) -c 'import os, xdist; print("-n", 1 + min(4, len(os.sched_getaffinity(0))), \
    "--dist loadfile --no-loadscope-reorder")' 2>/dev/null

# Tests start hundreds of processes, which would each compile the tests and zshard anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test quick thorough test-trainers bench lint messages docs format build wheel sanitize fuzz clean distclean
.NOTPARALLEL:
.DEFAULT_GOAL := help

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: build $(VENV)/.demo ## train a GPT on 2 ranks; compare with DDP and FSDP2 (ARGS=--long, --quick)
	$(PY) examples/demo.py $(ARGS)

test: build $(VENV)/.test $(if $(filter 1,$(CUDA)),$(VENV)/.nccl) ## the tests (TESTS=tests/optim/test_clip.py, ARGS="-k name")
	@$(if $(ARGS)$(filter-out tests,$(TESTS)),,$(PY) tests/lib/c_compile.py)
	$(PY) -m pytest $(TESTS) $(ARGS) $(if $(ARGS)$(filter-out tests,$(TESTS)),,$$($(WORKERS)))

quick: build $(VENV)/.test ## the tests that start no ranks and no Python, and the C programs: three minutes
	@$(PY) tests/lib/c_compile.py
	$(PY) -m pytest $(TESTS) --quick $(ARGS) $$($(WORKERS))

thorough: build $(VENV)/.test $(VENV)/.trainers $(VENV)/.nccl ## all cases of all tests, in parts: SHARD=3/16 (tests/shards.json)
	$(PY) -m pytest $(TESTS) --shard $(SHARD) -o timeout=1800 $(ARGS) $$($(WORKERS))

test-trainers: build $(VENV)/.test $(VENV)/.trainers ## the tests with real trainers (TESTS=tests/trainers/test_lightning.py)
	$(PY) -m pytest $(if $(filter tests,$(TESTS)),tests/trainers tests/checkpoint/test_fixtures.py,$(TESTS)) $(ARGS) $(if $(ARGS),,$$($(WORKERS)))

BENCHMARKS = host_time step_time memory predictions collectives optim saves
bench: build $(VENV)/.demo ## the benchmarks (ARGS=..., BENCHMARKS=memory)
	@for name in $(BENCHMARKS); do \
	    echo "== $$name"; $(PY) -m benchmarks.$$name $(ARGS) || failed="$$failed $$name"; \
	done; [ -z "$$failed" ] || { echo "failed:$$failed"; exit 1; }

lint: build $(VENV)/.lint ## ruff, mypy, clang-format, clang-tidy, and the stubs against the built module
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(CLANG_FORMAT) --dry-run --Werror $(C_FILES)
	$(PY) tools/tidy.py $(TIDY_FILES)
	@printf '[mypy]\nfollow_imports = skip\n' > build/stubtest.ini # mypy has just checked the imports
	$(PY) -m mypy.stubtest zshard._core --mypy-config-file build/stubtest.ini

messages: ## every text that a user may read, with its file and line (ARGS=csrc/comm, --docstrings, ...)
	@$(PYTHON) docs/tools/messages.py $(ARGS)

docs: build $(VENV)/.docs ## the site, in build/site; broken links fail (look: python3 -m http.server -d build/site)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build

format: $(VENV)/.lint ## apply what lint checks
	$(PY) -m ruff check --fix-only --quiet .
	$(PY) -m ruff format .
	$(CLANG_FORMAT) -i $(C_FILES)

build: $(VENV)/.zshard ## compile what changed, in place (CUDA=1: with the CUDA kernels)
	@$(PY) setup.py -q build_ext --inplace

wheel: build ## a wheel in dist/ for this Python and torch: pip install it where there is no compiler (CUDA=1: with kernels)
	ZSHARD_LOCAL_VERSION=1 $(PY) -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .

# Both run in another build, below a preloaded runtime: tests/lib/sanitized.py says how.
sanitize: build $(VENV)/.test ## the tests with AddressSanitizer and UndefinedBehaviorSanitizer (TESTS=...)
	$(PY) tests/lib/sanitized.py -m pytest $(addprefix $(CURDIR)/,$(TESTS)) $(ARGS)

FUZZ := $(CURDIR)/build/fuzz

fuzz: build $(VENV)/.test ## fuzz what reads checkpoints, so sanitized, until Ctrl-C (ARGS=..., INPUT=crash-...)
	@mkdir -p $(FUZZ)/corpus
	$(PY) tests/lib/sanitized.py --fuzzing $(CURDIR)/tests/checkpoint/fuzz_checkpoint.py -artifact_prefix=$(FUZZ)/ \
	    $(ARGS) $(or $(abspath $(INPUT)),$(FUZZ)/corpus)

clean: ## remove what was built; ./.venv stays
	rm -rf build dist *.egg-info zshard/*.so zshard/*.built .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## remove ./.venv too
	rm -rf $(VENV)

# --- set-up, each step stamped when it is done ------------------------------------------------------

# The Python. A virtual environment made from another one does not see that one's packages, so its
# folders are listed in a .pth file; for a plain Python they are there already. And the setuptools
# that Pythons before 3.12 put into a new environment is too old, and hides a newer one outside.
FIND_TORCH := import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)
FIND_NCCL := import importlib.util as u, sys; sys.exit(u.find_spec("nvidia") is None or u.find_spec("nvidia.nccl") is None)
FOLDERS := import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")
PURELIB := import sysconfig; print(sysconfig.get_path("purelib"))

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "zshard needs Python 3.11 or newer: make ... PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	    { echo "$(PYTHON) cannot make virtual environments: apt install python3-venv" >&2; exit 1; }
	@if $(PYTHON) -c '$(FIND_TORCH)'; then \
	    echo "set-up: creating ./$(VENV) with the torch of $$($(PYTHON) -c 'import sys; print(sys.prefix)')"; \
	    $(PYTHON) -m venv --system-site-packages $(VENV) && \
	    $(PYTHON) -c '$(FOLDERS)' > "$$($(PY) -c '$(PURELIB)')/torch-of-parent.pth" && \
	    $(PY) -m pip uninstall --quiet --yes setuptools 2>/dev/null; \
	else \
	    echo "set-up: installing $(TORCH) into ./$(VENV)"; \
	    $(PYTHON) -m venv $(VENV) && \
	    $(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(TORCH) 'setuptools>=77'; \
	fi
	@$(PY) -c 'import setuptools; exit(int(setuptools.__version__.split(".")[0]) < 77)' 2>/dev/null || \
	    $(PIP) 'setuptools>=77' || \
	    { echo "set-up: setuptools 77 or newer is needed and could not be installed" >&2; exit 1; }
	@touch $@

# zshard itself, editable: Python files are used where they lie, the extension is built in place.
$(VENV)/.zshard: pyproject.toml $(VENV)/.python
	@echo "set-up: compiling zshard, about a minute on two cores"
	@$(PY) setup.py -q build_ext --inplace
	@$(PIP) --no-build-isolation --no-deps --no-index --editable .
	@touch $@

# The tools of one word: an extra of pyproject.toml. Only what is missing is fetched; where that is not
# to be had, the tests run without some tools, but not without pytest.
$(VENV)/.test $(VENV)/.lint $(VENV)/.docs: $(VENV)/.%: $(VENV)/.zshard
	@if $(PIP) 'zshard[$*]'; then touch $@; \
	elif test $* = test && $(PY) -c 'import pytest' 2>/dev/null; then \
	    echo "set-up: some test tools could not be installed: continuing without them" >&2; \
	else \
	    echo "set-up: the tools of \`make $*\` could not be installed" >&2; exit 1; \
	fi

# The real libnccl and its headers, 200 MB, which a few tests of CUDA=1 look at: the one that torch's CUDA build brings, or
# that build's version. Without it they skip.
$(VENV)/.nccl: $(VENV)/.zshard
	@{ $(PY) -c '$(FIND_NCCL)' || $(PIP) --no-deps nvidia-nccl-cu13==2.29.7; } && touch $@ || \
	    echo "set-up: libnccl could not be installed: continuing without the tests of the real one" >&2

# Lightning, Accelerate, TRL, ...: beside the torch that is there, whatever they would like.
$(VENV)/.trainers: $(VENV)/.zshard
	@$(PIP) "torch==$$($(PY) -c 'import torch; print(torch.__version__.split("+")[0])')" 'zshard[trainers]'
	@touch $@

# Progress bars and plots: the demo runs without them. What is imported of them is compiled then, not all now.
$(VENV)/.demo: $(VENV)/.zshard
	@$(PIP) --no-compile 'zshard[demo]' && touch $@ || \
	    echo "set-up: $$(sed -n 's/^demo = //p' pyproject.toml) could not be installed: continuing without" >&2
