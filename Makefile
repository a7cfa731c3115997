# Everything needs only Python >= 3.10, a C++ compiler and a package index: each target makes the
# virtual environments it needs, and makes them again only when what they come from has changed.
#
#   make demo      install, check the results on this machine, train a small model
#   make test      install, run the whole test suite (PYTEST_ARGS=... narrows it)
#   make lint      ruff, mypy and clang-format; make format lets them write
#   make device    the extension in place, for another Python or fewer kernels:
#                  DEVICE_PYTHON=python3.12 HEAD_DIMS=64,128 ARCHS=90a
#   make gpu-test  FAMILY=sm80 SHARD=1/1: the recorded run on a GPU. SANITIZER=memcheck runs the
#                  small tests under that tool, OUT_JSON=file records elsewhere;
#                  gpu-record-check names the families that have to run again
#   make sass      registers, memory and instructions of every built kernel
#   make ladder    the road to FlashAttention, measured: docs/results/ladder.md
#   make ncu       CASE="sdpa-flash backward D64 causal S4k": the hardware's counters of each kernel
#                  of one case, a table and a report for the GUI; PROFILE_ARGS="--out prefix ..."
#   make nsys      CASE=...: when each call and kernel of it runs
#   make roofline  the kernels profiled so far under the card's roofs

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: venv install test demo lint format device gpu-test gpu-record-check sass ladder ncu nsys
.PHONY: roofline api clean

PYTHON ?= python3
VENV ?= .venv
LINT_VENV ?= .venv-lint
DEVICE_PYTHON ?= python3.12
TORCH ?= torch>=2.10
PYTEST_ARGS ?=
TRAIN_ARGS ?=
CASE ?=
PROFILE_ARGS ?=
FAMILY ?= sm80
SHARD ?= 1/1
SANITIZER ?=
OUT_JSON ?=
HEAD_DIMS ?=
ARCHS ?=

# The installed package where there is one, so that a GPU machine may bring its own Python.
RUN ?= $(if $(wildcard $(VENV)/bin/python),$(VENV)/bin/python,$(PYTHON))
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
LINT_BIN ?= $(LINT_VENV)/bin
DEVICE_VENV := build/venv-$(notdir $(DEVICE_PYTHON))

# One-line lists of pyproject.toml, without brackets: "a", "b"
list = $(shell sed -n 's/^$(1) = \[\(.*\)\]$$/\1/p' pyproject.toml | tr -d ',')
SOURCES := $(shell find setup.py pyproject.toml csrc flash_ext -type f \
             ! -name '*.pyc' ! -name '*.so' ! -name '.*')
CPP := $(shell find csrc bench tests -name '*.h' -o -name '*.cuh' -o -name '*.cu' -o -name '*.cpp')

venv: $(VENV)/.made

$(VENV)/.made:
	$(PYTHON) -m venv $(VENV)
	touch $@

install: $(VENV)/.installed

# One resolution for torch and the package, built in isolation.
$(VENV)/.installed: $(VENV)/.made $(SOURCES)
	$(VENV)/bin/python -m pip install --disable-pip-version-check '$(TORCH)' '.[test,bench]'
	touch $@

test: install
	$(VENV)/bin/pytest $(PYTEST_ARGS)

# From docs, where the installed package is what `import flash_ext` finds. Threads that sleep while
# they wait train a little slower alone, and several times faster beside other work.
demo: export OMP_WAIT_POLICY := PASSIVE
demo: install
	cd docs && ../$(VENV)/bin/python -m flash_ext
	$(VENV)/bin/python docs/examples/train_gpt.py $(TRAIN_ARGS)

$(LINT_VENV)/bin: pyproject.toml
	$(PYTHON) -m venv $(LINT_VENV)
	$(LINT_VENV)/bin/python $(PIP_INSTALL) $(call list,dev)
	touch $@

lint: $(LINT_BIN)
	$(LINT_BIN)/ruff check .
	$(LINT_BIN)/ruff format --check .
	$(LINT_BIN)/clang-format --dry-run -Werror $(CPP)
	$(LINT_BIN)/mypy

format: $(LINT_BIN)
	$(LINT_BIN)/ruff check --fix .
	$(LINT_BIN)/ruff format .
	$(LINT_BIN)/clang-format -i $(CPP)

$(DEVICE_VENV)/.made: pyproject.toml
	$(DEVICE_PYTHON) -m venv $(DEVICE_VENV)
	$(DEVICE_VENV)/bin/python $(PIP_INSTALL) $(call list,requires)
	touch $@

device: $(DEVICE_VENV)/.made
	FLASH_EXT_HEAD_DIMS='$(HEAD_DIMS)' FLASH_EXT_CUDA_ARCHS='$(ARCHS)' \
	  $(DEVICE_VENV)/bin/python setup.py --quiet build_ext --inplace
	du -h flash_ext/_C*.so flash_ext/_classic*.so

gpu-test:
	$(RUN) -m flash_ext.testing.record run --family $(FAMILY) --shard $(SHARD) \
	  $(if $(SANITIZER),--sanitizer $(SANITIZER)) $(if $(OUT_JSON),--out '$(OUT_JSON)')

gpu-record-check:
	$(RUN) flash_ext/testing/check_record.py

sass:
	$(RUN) -m flash_ext.testing.gates --sass build/sass

ladder:
	$(RUN) -m bench.ladder --out bench/results/ladder.csv
	$(RUN) -m bench.ladder_report bench/results/ladder.csv --out docs/results

ncu:
	$(RUN) -m bench.profile $(CASE) $(PROFILE_ARGS)

nsys:
	$(RUN) -m bench.profile $(CASE) --timeline nsys $(PROFILE_ARGS)

roofline:
	$(RUN) -m bench.roofline bench/results/tmp/profile/*.csv

api:
	$(PYTHON) docs/generate_api.py

clean:
	rm -rf build dist *.egg-info flash_ext/*.so $(VENV) $(LINT_VENV)
