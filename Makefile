# make setup | check | unit | test | nightly | test-vllm | test-llama-cpp | test-transformers | gpu | mutants | quickstart | real | docs | dist | clean
# PYTHON: the interpreter of the environment; VENV: its folder; PROCESSES: the number of test processes.
PYTHON ?= python3
VENV ?= .venv
PROCESSES ?= 4
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet
# The tests of a file stay in one process, as they share results; so do tests that share a Ray (tests/processes.py).
# Tests of whole jobs wait two thirds of their time: four processes fill two cores. They run early, in the order of the
# folders: ordered by number, their few and long tests would run last.
PYTEST := $(BIN)/python -m pytest -q --dist loadfile --no-loadscope-reorder -n
INPUTS := pyproject.toml deploy/serving/pyproject.toml deploy/constraints.txt

export PYTHON
# With PYTHONDONTWRITEBYTECODE, each process would compile all modules and tests again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup check unit test nightly test-vllm test-llama-cpp test-transformers gpu mutants quickstart real docs dist clean

setup: $(STAMP)

# torch is installed first, alone and pinned, from pip's configured index. Resolved with the other packages, an unpinned
# torch can bring gigabytes of CUDA packages to a machine without a GPU.
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

# The type checker needs one core for a minute: it runs beside the tests, and its report follows theirs.
test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@mkdir -p build; $(BIN)/mypy > build/mypy.log 2>&1 & types=$$!; \
	$(PYTEST) $(PROCESSES) -m "not nightly"; tests=$$?; \
	wait $$types; types=$$?; cat build/mypy.log; exit $$((tests + types))

# Every test, with its folders on a disk. Runs each night (.github/workflows/nightly.yml), with the three targets below.
nightly: setup check
	PYTEST_DEBUG_TEMPROOT=$${TMPDIR:-/tmp} $(PYTEST) $(PROCESSES)

# In separate environments below .engines, which the script builds: vLLM for CPUs (3.4 GB), llama.cpp, transformers 5.14 to 5.23.
test-vllm:
	tools/engines.sh vllm

# llama.cpp's server, from a wheel; its tests run in the environment of `make setup`.
test-llama-cpp: setup
	tools/engines.sh llama-cpp

test-transformers:
	tools/engines.sh transformers

# On a machine with a CUDA device: its kernels against the CPU's, a layer of 70B by phase, and the engines' tokens per
# second. VLLM: the Python of an environment with vLLM for CUDA; without it, transformers alone.
gpu: setup
	$(BIN)/python -m pytest -q -m gpu tests/gpu
	$(BIN)/python -m tools.benchmarks.device_layer
	$(BIN)/python -m tools.benchmarks.device_layer --memory 24
	$(BIN)/python -m tools.benchmarks.engine_speed --dtypes bfloat16 $(if $(VLLM),--vllm $(VLLM))

mutants: setup
	$(BIN)/python -m tools.mutants

quickstart: setup
	$(BIN)/python -m deploy.quickstart

# The README's figures on a real model, in runs/real: hours, which it says first, on two cores. The same command goes on
# after a kill. The model, texts and tasks come from the hub; or from LAMINA_REAL_MODELS, a folder with
# smollm2-135m-instruct, LAMINA_REAL_TEXTS, one with the three files of `python -m tools.real --help`, and
# LAMINA_REAL_TASKS, task files such as tools/tasks/*.yaml. STEPS: some of the steps.
REAL := $(if $(LAMINA_REAL_MODELS),--models '$(LAMINA_REAL_MODELS)')
REAL += $(if $(LAMINA_REAL_TEXTS),--texts '$(LAMINA_REAL_TEXTS)')
REAL += $(if $(LAMINA_REAL_TASKS),--tasks $(LAMINA_REAL_TASKS))
real: setup
	$(BIN)/python -m tools.real $(STEPS) $(REAL)

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
