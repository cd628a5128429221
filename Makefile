# make setup | check | unit | test | nightly | test-vllm | test-llama-cpp | test-transformers | gpu | mutants | quickstart | docs | dist | clean
# PYTHON chooses the interpreter of the environment, VENV its folder, PROCESSES those that test at once.
PYTHON ?= python3
VENV ?= .venv
PROCESSES ?= 4
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet
# The tests of a file stay in one process, as they share what they have computed; those on one Ray, too (tests/processes.py).
# Those of whole jobs wait for processes two thirds of their time: four at once fill two cores. They come early, in the
# order of the folders: few and long in each file, they would come last by their number.
PYTEST := $(BIN)/python -m pytest -q --dist loadfile --no-loadscope-reorder -n
INPUTS := pyproject.toml deploy/serving/pyproject.toml deploy/constraints.txt

export PYTHON
# Where it is set, each process compiles the product's modules and pytest's tests again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup check unit test nightly test-vllm test-llama-cpp test-transformers gpu mutants quickstart docs dist clean

setup: $(STAMP)

# torch goes first and alone: pinned, from whatever index pip is configured with. Resolved among the others, an
# unpinned torch can bring gigabytes of CUDA packages to a machine that has no GPU.
$(STAMP): $(INPUTS)
	@echo "setup: installing into $(VENV), a few minutes the first time"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install "$$(grep '^torch==' deploy/constraints.txt)" -c deploy/constraints.txt
	@$(PIP) install -c deploy/constraints.txt -e '.[dev,docs,tasks,gguf,quantized]'
	@$(PIP) install -c deploy/constraints.txt -e deploy/serving
	@touch $@

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: setup
	$(PYTEST) 2 -m "not ray and not slow and not variant and not nightly" --ignore=tests/end_to_end

# The type checker needs one core for a minute: it runs beside the tests, and says what it has found after them.
test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@mkdir -p build; $(BIN)/mypy > build/mypy.log 2>&1 & types=$$!; \
	$(PYTEST) $(PROCESSES) -m "not nightly"; tests=$$?; \
	wait $$types; types=$$?; cat build/mypy.log; exit $$((tests + types))

# Every test, with its folders on a disk. Each night (.github/workflows/nightly.yml), with the three targets below.
nightly: setup check
	PYTEST_DEBUG_TEMPROOT=$${TMPDIR:-/tmp} $(PYTEST) $(PROCESSES)

# In environments of their own below .engines, which the script builds: vLLM for CPUs (3.4 GB), llama.cpp, transformers 5.14 to 5.23.
test-vllm:
	tools/engines.sh vllm

# llama.cpp, built from source; its tests run in the environment of `make setup`.
test-llama-cpp: setup
	tools/engines.sh llama-cpp

test-transformers:
	tools/engines.sh transformers

# On a machine with a CUDA device: its kernels against the CPU's, and a layer of 70B by phase.
gpu: setup
	$(BIN)/python -m pytest -q -m gpu tests/gpu
	$(BIN)/python -m tools.benchmarks.device_layer
	$(BIN)/python -m tools.benchmarks.device_layer --memory 24

mutants: setup
	$(BIN)/python -m tools.mutants

quickstart: setup
	$(BIN)/python -m deploy.quickstart

# The site of the documentation, in build/site; a broken link or anchor is an error.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Both wheels of the last commit, with their bills of materials and digests, in dist.
dist: setup
	$(BIN)/python -m tools.distributions

clean:
	rm -rf $(VENV) build dist runs/quickstart .mypy_cache .ruff_cache .pytest_cache mutants
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find . -name '*.egg-info' -type d -prune -exec rm -rf {} +
