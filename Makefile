# The commands of the project. Everything they need is installed into .venv; nothing outside the checkout is touched but the
# model cache of the user (and what `make install` says).
PYTHON ?= python3
VENV := .venv
PURE := .venv-pure
BIN := $(VENV)/bin
CONSTRAINTS := .ci/constraints.txt
NATIVE := build/editable
# OpenMP's threads spin while they wait: more of them than cores turn a test minute into ten.
export GOMP_SPINCOUNT ?= 1000
# Most tests wait for daemons: two workers, each with whole files, take little more than half of the time.
PYTEST := $(BIN)/python -m pytest -q --durations=15 -n 2 --dist loadfile
# Marks of the tests that need more than the pure environment has.
IMPURE := torch or store or socket or e2e or model or oracle or grammar or systemd

.PHONY: demo test setup native model lint test-pure test-full test-sanitizers bench bench-budgets bench-generation bench-persistence bench-rehydrate bench-trace bench-scaling soak install wheels gpu-wheels clean

demo: model
	$(BIN)/kvd demo

# Each test runs once: the pure ones where torch, zmq and lmdb are not installed, the others where they are.
test: test-pure native model
	$(PYTEST) -m "($(IMPURE)) and not full"

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml clients/python/pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade "pip>=25.1"
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) setuptools scikit-build-core nanobind
	command -v cmake >/dev/null || $(BIN)/python -m pip install -q cmake ninja
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install -q -c $(CONSTRAINTS) --no-build-isolation -e clients/python -e . --group dev
	touch $@

# The native kernels, once more where their sources changed (cmake found ninja or, without it, make); without a compiler there are none, and torch's serve.
native: setup
	@if test -f $(NATIVE)/build.ninja -o -f $(NATIVE)/Makefile; then PATH="$$PWD/$(BIN):$$PATH" cmake --build $(NATIVE); \
	else echo "no native kernels: when .venv was made there was no C++ compiler, or it failed (make clean setup tries again); torch's serve"; fi

model: setup
	$(BIN)/kvd pull smollm2

lint: setup
	$(BIN)/ruff check kvd clients tests
	$(BIN)/ruff format --check kvd clients tests
	$(BIN)/mypy
	$(BIN)/mypy -p kvd_client
	$(BIN)/lint-imports

# The pure tier proves by its environment that the deciding rooms need no torch, no zmq and no lmdb.
$(PURE)/.ready: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(PURE)
	$(PURE)/bin/python -m pip install -q --upgrade "pip>=25.1"
	$(PURE)/bin/python -m pip install -q -c $(CONSTRAINTS) --group pure
	touch $@

test-pure: $(PURE)/.ready
	KVD_TEST_PURE=1 PYTHONPATH=.:clients/python $(PURE)/bin/python -m pytest -q -m "not ($(IMPURE) or full)"

test-full: test-pure native model
	$(PYTEST) -m "$(IMPURE) or full" --timeout 1800

# Of test-full: the native code with the address sanitizer, its pool of threads with the thread sanitizer.
test-sanitizers: setup
	$(BIN)/python -m pytest -q -m full tests/executor/kernels

# Without peers kvd alone: make bench PEERS="--peer vllm=http://127.0.0.1:8101 --server-command vllm='…'".
# It begins anew, GO_ON=1 goes on with what bench.json has of the same code.
bench: model
	$(if $(GO_ON),,rm -f bench.json)
	$(BIN)/python tests/bench/bench_peers_table.py --out bench.json --page docs/benchmarks.md $(PEERS)

# Speculation, streams beside arriving prompts, blocks that beams save: some ten minutes. GENERATION="--draft-model …" for more.
bench-generation: model
	$(if $(GO_ON),,rm -f bench-generation.json)
	$(BIN)/kvd bench generation --out bench-generation.json --page docs/benchmarks-generation.md $(GENERATION)

# What a daemon costs beside its model: memory, idle, beside a neighbour, between steps; fails where a budget is exceeded.
bench-budgets: model
	$(BIN)/python tests/bench/bench_budgets.py --out docs/benchmarks-budgets.md

# No model and no chance: the same figures on every machine.
bench-trace: setup
	$(BIN)/python tests/bench/bench_trace.py --out docs/benchmarks-trace.md

# What the engine costs beside the model, and how it grows.
bench-scaling: setup
	$(BIN)/python tests/bench/bench_engine.py
	$(BIN)/python tests/bench/bench_scaling.py --out docs/benchmarks-scaling.md

# Random work, random deaths, and an oracle: make soak SOAK="--kills 500 --seed 7 --jobs 2".
soak: setup
	PYTHONPATH=tests $(BIN)/python tests/crash/soak.py $(SOAK)

bench-persistence: model
	$(BIN)/python tests/bench/bench_persistence.py --out docs/benchmarks-persistence.md

bench-rehydrate: setup
	$(BIN)/python tests/bench/bench_rehydrate.py --out docs/benchmarks-persistence.md
	$(BIN)/python tests/bench/bench_rehydrate.py --encrypt --out docs/benchmarks-persistence.md

# sdists too: wheels are built from them, so that nothing left in build/ gets in.
wheels: setup
	$(BIN)/python -m build -q --no-isolation --outdir dist clients/python
	$(BIN)/python -m build -q --no-isolation --outdir dist .

# What a GPU machine with Python 3.12, torch and numpy but no network may lack, to travel with the checkout; gpu_check.py needs msgspec of it.
gpu-wheels: setup
	$(BIN)/python -m pip download -q -c $(CONSTRAINTS) --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
	  --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform manylinux_2_12_x86_64 \
	  -d .gpu-wheels msgspec lmdb msgpack pyzmq structlog crc32c tokenizers safetensors gguf
	du -sh .gpu-wheels

install:
	sh systemd/install.sh

clean:
	rm -rf $(VENV) $(PURE) dist build .pytest_cache .mypy_cache .ruff_cache
