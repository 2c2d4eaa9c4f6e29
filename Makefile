# Every target installs what it needs into .venv, once. `make help` lists the targets.

EXPERT ?=
STEPS ?=
ARGS ?=
VARY ?=
FUZZ_SECONDS ?=
FUZZ_SEED ?=
PYTHON ?= python3
VENV ?= .venv
# Test processes: one more than CI has cores, because many tests wait.
JOBS ?= 3
# By folder: xdist would put files with few tests last, and those are the ones that train.
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# With an NVIDIA GPU: NVML metrics, 8-bit and 4-bit weights.
comma := ,
EXTRAS := train,dev$(if $(shell command -v nvidia-smi),$(comma)cuda)
SETUP_FILES := pyproject.toml constraints.txt

# Checked before anything is installed. With ARGS, the run may name the expert, or launcher reports that it is missing.
EXPERTS = $(patsubst experts/%/manifest.json,%,$(wildcard experts/*/manifest.json))
VARIABLES := EXPERT STEPS ARGS VARY FUZZ_SECONDS FUZZ_SEED PYTHON VENV JOBS
UNKNOWN := $(filter-out $(VARIABLES),$(foreach name,$(.VARIABLES),$(if $(findstring command,$(origin $(name))),$(name))))
$(if $(UNKNOWN),$(error unknown: $(UNKNOWN). Variables: $(VARIABLES). Flags of launcher go into ARGS, as ARGS='--gpu h100'))
$(if $(EXPERT)$(ARGS),,$(if $(filter train plan prepare compare eval regression bench,$(MAKECMDGOALS)), \
	$(error no expert given. Write EXPERT=NAME; experts: $(EXPERTS))))

.DEFAULT_GOAL := help
.PHONY: help train plan prepare compare dashboard doctor eval regression bench ablation quality-tools test test-fast test-all test-gpu test-slurm test-targets torture fuzz check format \
	configs docs schema samples memory-grid clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  EXPERT=neo4j selects the expert, STEPS=10 limits the steps, ARGS='--gpu rtx4090' adds flags, PYTHON=python3.12 selects the Python"

train: $(VENV)/.full  ## train an expert: make train EXPERT=neo4j [STEPS=10] [ARGS='--gpu rtx4090']
	@$(BIN)/launcher train $(EXPERT) $(if $(STEPS),--max-steps $(STEPS)) $(ARGS)

plan: $(VENV)/.light  ## print the plan of an expert: make plan EXPERT=sql ARGS='--gpu h100 --gpus 8'
	@$(BIN)/launcher plan $(EXPERT) $(if $(STEPS),--max-steps $(STEPS)) $(ARGS)

prepare: $(VENV)/.full  ## tokenize, audit and pack an expert's data: make prepare EXPERT=sql
	@$(BIN)/launcher prepare $(EXPERT) $(ARGS)

compare: $(VENV)/.light  ## compare the runs of an expert on one page: make compare EXPERT=neo4j
	@$(BIN)/launcher compare $(if $(EXPERT),--expert $(EXPERT)) $(ARGS)

dashboard: $(VENV)/.full  ## create or update the W&B workspace: make dashboard ARGS='--entity team'
	@$(BIN)/launcher dashboard $(ARGS)

doctor: $(VENV)/.full  ## find problems of this machine or a run: make doctor ARGS='--run RUN'
	@$(BIN)/launcher doctor $(EXPERT) $(ARGS)

eval: $(VENV)/.full  ## judge an expert's answers: make eval EXPERT=json ARGS='--base'
	@$(BIN)/launcher eval $(EXPERT) $(ARGS)

regression: $(VENV)/.full  ## train and judge the old and the optimised configuration: make regression EXPERT=json [STEPS=10]
	@$(BIN)/launcher regression $(EXPERT) $(if $(STEPS),--max-steps $(STEPS)) $(ARGS)

bench: $(VENV)/.full  ## compare two settings: make bench EXPERT=neo4j VARY=torch_compile=true,false
	@$(BIN)/launcher bench $(EXPERT) --vary $(or $(VARY),$(error give VARY=KEY=A,B, such as VARY=torch_compile=true,false)) $(if $(STEPS),--steps $(STEPS)) $(ARGS)

ablation: $(VENV)/.full  ## what each optimisation contributes, alone and cumulative: make ablation EXPERT=neo4j
	@$(BIN)/launcher bench ablation $(EXPERT) $(if $(STEPS),--steps $(STEPS)) $(ARGS)

quality-tools: $(VENV)/quality-node/.done  ## install the Cypher and TypeScript judges that run in Node (needs npm)

test: $(VENV)/.full  ## run the tests
	@$(PYTEST) $(ARGS)

test-fast: $(VENV)/.full  ## run the unit tests that are quick, start no process and import no torch: for the inner loop
	@LAUNCHER_TEST_FAST=1 $(PYTEST) -m 'not slow and not process and not long' tests/unit $(ARGS)

test-all: $(VENV)/.full  ## run all tests, including the slow ones: BF16, DoRA, offload, 90 combinations on 4 ranks
	@LAUNCHER_TEST_ALL=1 $(PYTEST) $(ARGS)

test-gpu: $(VENV)/.full  ## run the tests that need a GPU
	@LAUNCHER_TEST_GPU=1 $(BIN)/python -m pytest $(addprefix tests/training/,monitoring/test_step_timer.py engine/test_cuda_graph.py model/test_fused_decoder_layer.py model/test_loss.py kernels/test_varlen_attention.py kernels/test_nf4.py model/test_fused_lora_linear.py inference/test_graphed_decoding.py) $(ARGS)
	@LAUNCHER_TEST_GPU=1 $(BIN)/python -m pytest tests/training/verify/test_packing.py tests/training/test_families.py tests/training/engine/test_chunked_adamw.py -k on_a_gpu $(ARGS)

test-slurm: $(VENV)/.full  ## run the tests on a real Slurm with two virtual nodes (Debian, as root: installs it)
	@command -v slurmctld > /dev/null || { apt-get update -qq && \
		apt-get install -qq -y --no-install-recommends slurmctld slurmd slurm-client munge; } > /dev/null
	@$(BIN)/python -m pytest tests/slurm $(ARGS)

test-targets: $(VENV)/.full  ## check job files with SkyPilot, dstack, Kubeflow and Kubernetes (installs them), and run their scripts
	@$(PYTHON) -m venv $(VENV)/targets
	@$(VENV)/targets/bin/pip install --quiet --disable-pip-version-check -r tests/targets/requirements.txt
	@LAUNCHER_TEST_ALL=1 LAUNCHER_TEST_TARGETS=$(VENV)/targets $(BIN)/python -m pytest tests/targets $(ARGS)

torture: $(VENV)/.full  ## kill preparations and trainings at random moments, more than 150 times; takes half an hour
	@LAUNCHER_TORTURE=1 $(BIN)/python -m pytest tests/faults $(ARGS)

fuzz: $(VENV)/.full  ## damage manifests, runs, rows, answers and checkpoints at random: make fuzz [FUZZ_SECONDS=3600] [FUZZ_SEED=1]
	@FUZZ_SECONDS=$(or $(FUZZ_SECONDS),60) FUZZ_SEED=$(or $(FUZZ_SEED),0) $(BIN)/python -m tests.fuzz

check: $(VENV)/.full  ## lint, formatting, types, vocabulary, generated files
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m launcher.render.presets --check
	@$(BIN)/python -m tools.check_words
	@$(BIN)/python -m tools.docs --check
	@$(BIN)/python -m experts.generator --check

format: $(VENV)/.full  ## format the code
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

configs: $(VENV)/.light  ## regenerate accelerate_configs/ and ds_configs/
	@$(BIN)/python -m launcher.render.presets

docs: $(VENV)/.light  ## regenerate docs/CLI.md, EXPERT_FORMAT.md, families.md, gpus.md and images/plan.svg
	@$(BIN)/python -m tools.docs

schema: $(VENV)/.light  ## regenerate experts/manifest.schema.json
	@$(BIN)/launcher schema > experts/manifest.schema.json.tmp && mv experts/manifest.schema.json.tmp experts/manifest.schema.json

memory-grid: $(VENV)/.full  ## measure memory against its prediction: make memory-grid [ARGS='--minutes 10']
	@$(BIN)/python -m benchmarks.memory_grid --out memory.jsonl $(ARGS)

samples: $(VENV)/.full  ## regenerate and check the experts' sample data
	@$(BIN)/python -m experts.generator

clean:  ## remove the virtual environment and caches; keep runs and prepared data
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed; name one with: make PYTHON=python3.12 ..." >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) \
		|| { rm -rf $(VENV); echo "python3 -m venv failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 2; }

# Planning needs light packages only.
$(VENV)/.light: $(SETUP_FILES) | $(BIN)/python
	@echo "Setting up $(VENV) (planning)..."
	@$(INSTALL) --editable .
	@touch $@

# Training and development: torch and the packages of the tests. Takes a few minutes, once.
$(VENV)/.full: $(SETUP_FILES) | $(BIN)/python
	@echo "Setting up $(VENV) (training, tests)... this takes a few minutes, once"
	@$(INSTALL) torch==2.13.0
	@$(INSTALL) --editable '.[$(EXTRAS)]'
	@touch $(VENV)/.light $@

# The Neo4j analyser and the TypeScript compiler, pinned; they are not committed.
$(VENV)/quality-node/.done: launcher/judges/node/package.json launcher/judges/node/package-lock.json | $(BIN)/python
	@command -v npm > /dev/null || { echo "npm is needed; on Debian and Ubuntu: apt install npm" >&2; exit 2; }
	@mkdir -p $(@D) && cp launcher/judges/node/package.json launcher/judges/node/package-lock.json $(@D)
	@cd $(@D) && npm ci --ignore-scripts --no-fund --no-audit --loglevel=error
	@touch $@
