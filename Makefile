# Two commands for a newcomer: `make run` and `make test`. The rest is for those who work on it.

PYTHON ?= python3
PORT ?= 8000
MODEL ?= qwen2.5-coder-0.5b
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin

# Without an NVIDIA driver the plain wheel would bring gigabytes of CUDA for nothing: pin the
# version of which a CPU wheel may be at hand.
TORCH ?= torch==2.13.0
# The default model needs torch on a GPU only.
EXTRAS := $(if $(shell command -v nvidia-smi),[torch])

# Hundreds of processes start in a run: each is a quarter quicker with bytecode that was kept.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help run levels test test-all check static types quick paths steady coverage explore faults evidence lowest lock wheels image try-wheels sanitize lint bench-cpu bench-speech bench-speculation gpu-dry gpu-compile gpu-bench clean

help:
	@echo "make run        install, fetch the default model, serve it on 127.0.0.1:$(PORT)"
	@echo "make test       install, run what CI runs: make check and one real path of every ability"
	@echo "make test-all   everything: an hour or two; before a release, and once a week on a schedule"
	@echo "make levels     compile the CPU kernels for every processor of this family, in place"
	@echo "make check      format, lint, types, ranks, unit and property tests (under four minutes on two cores)"
	@echo "make steady     the tests of make check TIMES times, quiet or beside BUSY=1: which fall by luck"
	@echo "make coverage   lines that the tests of make check run; fails below FLOOR, 81 per cent"
	@echo "make explore    the property tests with examples that were never tried"
	@echo "make faults     the whole fault table and mutations of every input: two hours"
	@echo "make evidence   dist/evidence: requirements of programs, their tests, figures, faults, packages"
	@echo "make lowest     the lower bounds of the dependencies, installed and tried"
	@echo "make lock       resolve deploy/requirements.lock again"
	@echo "make wheels     dist/: an sdist, and wheels for x86_64 and aarch64 with every kernel level"
	@echo "make image      dist/: an OCI image without a daemon (FLAVOUR=cuda: with CUDA's torch)"
	@echo "make try-wheels what a machine without a compiler gets from dist/: one answer of each wheel"
	@echo "make sanitize   the CPU kernels and their thread team under the sanitizers: minutes"
	@echo "make bench-cpu  the default model beside its peers (benchmarks/cpu_peers.py)"
	@echo "make bench-speech  Whisper base beside faster-whisper (PEER: its Python)"
	@echo "make bench-speculation  the default model with drafts and without, in turns"
	@echo "make gpu-dry    GPU kernels interpreted and compiled; make gpu-bench where a GPU is"
	@echo "make gpu-compile  compiled alone, by two versions of Triton: part of make test-all"
	@echo "make clean      remove the environment and what was built"

$(VENV)/.made:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --progress-bar on --upgrade pip
	@touch $@

# Compiled in place by a step of its own, which says how far it is; pip would be silent. Without a
# compiler the package is installed all the same. Its own `make` has no part in this one's jobs.
BUILD := env -u MAKEFLAGS -u MFLAGS -u MAKELEVEL $(BIN)/python src/headrace/kernels/cpu/build.py
CSRC := $(wildcard src/headrace/kernels/cpu/csrc/* src/headrace/text/csrc/*)
$(VENV)/.compiled: CMakeLists.txt $(CSRC) | $(VENV)/.made
	@command -v cmake >/dev/null || $(BIN)/pip install --quiet --progress-bar on cmake
	@if $(BUILD); then touch $@; \
	    else echo "the slower reference kernels serve: headrace explain"; fi

# pip installs packages and compiles nothing.
EDITABLE := install --progress-bar on --config-settings=wheel.cmake=false --editable
$(VENV)/.installed: pyproject.toml | $(VENV)/.compiled
	$(if $(EXTRAS),$(BIN)/pip install --progress-bar on "$(TORCH)")
	$(BIN)/pip $(EDITABLE) ".$(EXTRAS)"
	@touch $@

$(VENV)/.tested: $(VENV)/.installed
	$(BIN)/pip install --progress-bar on "$(TORCH)"
	$(BIN)/pip --quiet $(EDITABLE) ".[test]"
	@touch $@

# Every level of the kernels, for the tests that compare them.
levels: $(VENV)/.tested
	$(BUILD) --levels all

run: $(VENV)/.installed
	$(BIN)/headrace serve $(MODEL) --port $(PORT)

# Workers share by test: one long file does not keep a core waiting.
PYTEST := $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal --durations 20
QUICK := not slow and not model and not gpu

test: $(VENV)/.tested
	$(MAKE) --jobs 2 static types paths

test-all: levels
	$(BIN)/pip --quiet $(EDITABLE) ".[charts]"
	$(MAKE) static types
	$(PYTEST) -m "not gpu"
	$(MAKE) gpu-compile
	.ci/locked
	.ci/lowest

check: $(VENV)/.tested
	$(MAKE) --jobs 2 static types quick

static: $(VENV)/.tested
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/ruff check src tests benchmarks

types: $(VENV)/.tested
	$(BIN)/mypy

quick: $(VENV)/.tested
	$(PYTEST) -m "$(QUICK)"

# tests/paths.py names them.
paths: $(VENV)/.tested
	$(PYTEST) -m "$(QUICK) or path"

TIMES ?= 10
steady: $(VENV)/.tested
	$(BIN)/python tests/steady.py --times $(TIMES) $(if $(BUSY),--busy)

# Lines that the tests of `make check` run, in this process alone: 83 % on 2026-11-23 (40,807 lines,
# six minutes). FLOOR fails the run below so many per cent.
FLOOR ?= 81
coverage: $(VENV)/.tested
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -m "not slow and not model and not gpu" \
	    -p pytest_cov --cov --cov-report=term:skip-covered --cov-fail-under=$(FLOOR)

# What it finds becomes a test of its own: the other targets try the same examples every time.
explore: $(VENV)/.tested
	HYPOTHESIS_PROFILE=explore $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal \
	    -m "not model and not gpu" -k "$(K)"

# CI tries the quick rows (tests/faults); this one writes the table of docs/reliability.md.
FUZZ ?= 100000
faults: $(VENV)/.tested
	$(BIN)/python tests/faults/table.py --fuzz $(FUZZ) --json benchmarks/results/faults.json \
	    --table docs/reliability.md

evidence: $(VENV)/.tested
	$(BIN)/python tests/evidence.py dist/evidence

lowest:
	.ci/lowest

# One file for every platform and Python that is served, with the hashes of all its wheels.
lock: $(VENV)/.installed
	$(BIN)/pip install --quiet uv
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	    --no-annotate --no-header --upgrade pyproject.toml --output-file deploy/requirements.lock
	cp deploy/requirements.lock deploy/image.lock
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	    --no-annotate --no-header --extra factory --extra discovery pyproject.toml \
	    --output-file deploy/image.lock
	cp deploy/image.lock deploy/image-cuda.lock
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	    --no-annotate --no-header --extra factory --extra discovery --extra torch pyproject.toml \
	    --output-file deploy/image-cuda.lock

wheels:
	PYTHON=$(PYTHON) deploy/wheels.sh

# The image without a daemon, for this processor unless ARCHITECTURES says more; FLAVOUR=cuda.
FLAVOUR ?= cpu
ARCHITECTURES ?= $(if $(filter aarch64,$(shell uname -m)),arm64,amd64)
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
IMAGE = $(VERSION)$(if $(filter-out cpu,$(FLAVOUR)),-$(FLAVOUR))
image: $(VENV)/.installed
	@ls dist/headrace-*.whl >/dev/null 2>&1 || $(MAKE) wheels
	$(BIN)/pip --quiet $(EDITABLE) ".[factory]"
	$(BIN)/headrace factory image --flavour $(FLAVOUR) --architectures $(ARCHITECTURES) \
	    --wheels dist --store dist/store
	@rm -f dist/headrace-$(IMAGE).tar
	$(BIN)/headrace factory bundle dist/headrace-$(IMAGE).tar headrace:$(IMAGE) --store dist/store
	@echo "podman pull oci-archive:dist/headrace-$(IMAGE).tar:headrace:$(IMAGE)"
	@echo "podman run -p 8000:8000 -v headrace:/cache localhost/headrace:$(IMAGE)"

try-wheels:
	PYTHON=$(PYTHON) deploy/try_wheels.sh

# Without a GPU: every kernel in the interpreter, then what gpu-compile does: a summary is kept, the
# full tables are in build/.
gpu-dry: $(VENV)/.tested .venv36/.installed
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal \
	    tests/kernels_triton tests/kernels/test_cuda_graphs.py
	@mkdir -p build
	$(BIN)/python benchmarks/gpu_dry.py --json build/gpu_dry.json --table build/gpu_tables.md \
	    --record benchmarks/results/gpu_dry.json --page docs/gpu-tables.md
	PYTHONPATH=src .venv36/bin/python benchmarks/gpu_dry.py --brief

# Every kernel compiled for sm_80, sm_90 and sm_100 and read, and launched at a driver that runs
# nothing; those of two models also by Triton 3.6, which a GPU machine may have (`make gpu-dry`: of
# all). `make test` interprets some, `make test-all` every one.
gpu-compile: $(VENV)/.tested .venv36/.installed
	$(BIN)/python benchmarks/gpu_dry.py --brief
	PYTHONPATH=src .venv36/bin/python benchmarks/gpu_dry.py --brief --quick

# Another Triton, and whatever else this tree uses.
.venv36/.installed: $(VENV)/.tested
	$(PYTHON) -m venv .venv36
	.venv36/bin/pip install --progress-bar on --no-deps "triton==3.6.0"
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
	    "$$(.venv36/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/tree.pth"
	@touch $@

# With one: needs torch, triton and transformers in $(PYTHON), nothing installed by us.
gpu-bench:
	PYTHONPATH=src $(PYTHON) benchmarks/gpu_bench.py --json benchmarks/results/gpu_bench.json

# The peers in benchmarks/cpu_peers.py's variables; one that is not there is named as absent.
bench-speech: $(VENV)/.installed
	$(BIN)/python benchmarks/speech.py $(if $(PEER),--peer $(PEER)) $(ARGS)

bench-cpu: $(VENV)/.installed
	$(BIN)/python benchmarks/cpu_peers.py --json benchmarks/results/cpu_peers.json

bench-speculation: $(VENV)/.installed
	$(BIN)/python benchmarks/speculation.py --threads 2 --json benchmarks/results/speculation.json
	$(BIN)/python benchmarks/speculation_speed.py --json benchmarks/results/speculation_speed.json

# Address, undefined and thread over each level, and the kernel tests on such a library: minutes.
sanitize: $(VENV)/.tested
	SANITIZE=all $(BIN)/python -m pytest -q -rs -n 0 tests/kernels_cpu/test_sanitizers.py

lint: $(VENV)/.tested
	$(BIN)/ruff format src tests benchmarks
	$(BIN)/ruff check --fix src tests benchmarks

clean:
	rm -rf $(VENV) .venv36 build dist
