# make demo: answer two real prompts with and without speculation on the CPU.
# make test: lint, types, import contracts and every CPU test.
# make test-gpu: the tests of tests/gpu; make test-gpu-sanitizer: memcheck and racecheck.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# As many as the cores of a small machine.
TEST_WORKERS ?= 2
# Beside each other on one GPU, a few GiB each.
GPU_TEST_WORKERS ?= 4
# The tests start many processes, and each would compile every module again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-gpu test-gpu-sanitizer style lint fmt bench-cpu clean

$(VENV)/.runtime: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: $(VENV)/.runtime
	$(BIN)/sametoken demo

style: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

lint: style
	$(BIN)/mypy

# Types are checked beside the tests; what mypy found is printed after them. CPU tests see no GPU.
test: style
	@$(BIN)/mypy >$(VENV)/mypy.txt 2>&1 & types=$$!; \
	CUDA_VISIBLE_DEVICES= $(BIN)/pytest -n $(TEST_WORKERS) --dist loadgroup --no-loadscope-reorder --ignore=tests/gpu; \
	tests=$$?; wait $$types; types=$$?; cat $(VENV)/mypy.txt; exit $$((tests | types))

test-gpu:
	PYTHONPATH=src:$$PYTHONPATH $(PYTHON) -m pytest tests/gpu -m "not alone" -n $(GPU_TEST_WORKERS) --dist worksteal
	PYTHONPATH=src:$$PYTHONPATH $(PYTHON) -m pytest tests/gpu -m alone

test-gpu-sanitizer:
	benchmarks/law/sanitizer.sh

fmt: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-cpu: $(VENV)/.runtime
	$(BIN)/python benchmarks/cpu/whole_requests.py

clean:
	rm -rf $(VENV) build src/*.egg-info
