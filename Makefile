# Every target sets up what it needs, in .venv; a second call is instant. `make help` lists them.

EXPERT ?= neo4j
STEPS ?=
ARGS ?=
PYTHON ?= python3
VENV ?= .venv

BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# An NVIDIA GPU has metrics of its own, and 8-bit and 4-bit weights.
comma := ,
EXTRAS := train,dev$(if $(shell command -v nvidia-smi),$(comma)cuda)
SETUP_FILES := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help train plan prepare compare dashboard doctor eval regression bench ladder quality-tools test test-all test-gpu test-slurm torture check format \
	configs docs schema samples memory-grid clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  EXPERT=neo4j picks the expert, STEPS=10 shortens the run, ARGS='--gpu rtx4090' adds flags, PYTHON=python3.12 another Python"

train: $(VENV)/.full  ## train an expert: make train EXPERT=neo4j [STEPS=10] [ARGS='--gpu rtx4090']
	@$(BIN)/launcher train $(EXPERT) $(if $(STEPS),--max-steps $(STEPS)) $(ARGS)

plan: $(VENV)/.light  ## show the plan of an expert: make plan EXPERT=sql ARGS='--gpu h100 --gpus 8'
	@$(BIN)/launcher plan $(EXPERT) $(if $(STEPS),--max-steps $(STEPS)) $(ARGS)

prepare: $(VENV)/.full  ## tokenise, audit and pack an expert's data: make prepare EXPERT=sql
	@$(BIN)/launcher prepare $(EXPERT) $(ARGS)

compare: $(VENV)/.light  ## compare the runs of an expert on one page: make compare EXPERT=neo4j
	@$(BIN)/launcher compare --expert $(EXPERT) $(ARGS)

dashboard: $(VENV)/.full  ## create or update the W&B workspace: make dashboard ARGS='--entity team'
	@$(BIN)/launcher dashboard $(ARGS)

doctor: $(VENV)/.full  ## say what is wrong with this machine, or a run: make doctor ARGS='--run RUN'
	@$(BIN)/launcher doctor $(EXPERT) $(ARGS)

eval: $(VENV)/.full  ## judge an expert's answers: make eval EXPERT=json ARGS='--base'
	@$(BIN)/launcher eval $(EXPERT) $(ARGS)

regression: $(VENV)/.full  ## old configuration against the optimised one, trained and judged: make regression EXPERT=json [STEPS=10]
	@$(BIN)/launcher regression $(EXPERT) $(if $(STEPS),--max-steps $(STEPS)) $(ARGS)

bench: $(VENV)/.full  ## is A faster than B: make bench EXPERT=neo4j VARY=torch_compile=true,false
	@$(BIN)/launcher bench $(EXPERT) --vary $(or $(VARY),$(error give VARY=KEY=A,B, such as VARY=torch_compile=true,false)) $(if $(STEPS),--steps $(STEPS)) $(ARGS)

ladder: $(VENV)/.full  ## what each optimisation brings, alone and together: make ladder EXPERT=neo4j
	@$(BIN)/launcher bench ladder $(EXPERT) $(if $(STEPS),--steps $(STEPS)) $(ARGS)

quality-tools: $(VENV)/quality-node/.done  ## install what judges Cypher and TypeScript in Node (needs npm)

test: $(VENV)/.full  ## run the tests
	@$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

test-all: $(VENV)/.full  ## run the tests, the slow ones too: BF16, DoRA, offload, 90 on 4 ranks
	@LAUNCHER_TEST_ALL=1 $(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

test-gpu: $(VENV)/.full  ## run the tests of what only a GPU can show
	@LAUNCHER_TEST_GPU=1 $(BIN)/python -m pytest $(addprefix tests/training/test_,clock.py graphs.py joined.py loss.py own_attention.py packed.py products.py) $(ARGS)

test-slurm: $(VENV)/.full  ## run the tests on a real Slurm of two virtual nodes (Debian, as root: installs it)
	@command -v slurmctld > /dev/null || { apt-get update -qq && \
		apt-get install -qq -y --no-install-recommends slurmctld slurmd slurm-client munge; } > /dev/null
	@$(BIN)/python -m pytest tests/slurm $(ARGS)

torture: $(VENV)/.full  ## kill preparations and trainings at random moments, more than 150 times; half an hour
	@LAUNCHER_TORTURE=1 $(BIN)/python -m pytest tests/faults $(ARGS)

check: $(VENV)/.full  ## lint, formatting, types, generated files
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m launcher.render.presets --check
	@$(BIN)/python -m launcher.guides --check
	@$(BIN)/python -m experts.generator --check

format: $(VENV)/.full  ## rewrite the code in the house style
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

configs: $(VENV)/.light  ## regenerate accelerate_configs/ and ds_configs/
	@$(BIN)/python -m launcher.render.presets

docs: $(VENV)/.light  ## regenerate docs/CLI.md, EXPERT_FORMAT.md, gpus.md and the picture of a plan
	@$(BIN)/python -m launcher.guides

schema: $(VENV)/.light  ## regenerate experts/manifest.schema.json
	@$(BIN)/launcher schema > experts/manifest.schema.json.tmp && mv experts/manifest.schema.json.tmp experts/manifest.schema.json

memory-grid: $(VENV)/.full  ## measure memory against the prediction, as far as it gets: make memory-grid [ARGS='--minutes 10']
	@$(BIN)/launcher bench memory --out memory.jsonl $(ARGS)

samples: $(VENV)/.full  ## regenerate the experts' sample data, every row checked
	@$(BIN)/python -m experts.generator

clean:  ## remove the virtual environment and caches; runs and prepared data stay
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed; name one with: make PYTHON=python3.12 ..." >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) \
		|| { rm -rf $(VENV); echo "python3 -m venv failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 2; }

# Planning: light packages only.
$(VENV)/.light: $(SETUP_FILES) | $(BIN)/python
	@echo "Setting up $(VENV) (planning)..."
	@$(INSTALL) --editable .
	@touch $@

# Training and development: torch and everything that the tests use. Minutes, once.
$(VENV)/.full: $(SETUP_FILES) | $(BIN)/python
	@echo "Setting up $(VENV) (training, tests)... this takes a few minutes, once"
	@$(INSTALL) torch==2.13.0
	@$(INSTALL) --editable '.[$(EXTRAS)]'
	@touch $(VENV)/.light $@

# The Neo4j analyser and the TypeScript compiler, as pinned; nothing of theirs is committed.
$(VENV)/quality-node/.done: launcher/quality/node/package.json launcher/quality/node/package-lock.json | $(BIN)/python
	@command -v npm > /dev/null || { echo "npm is needed; on Debian and Ubuntu: apt install npm" >&2; exit 2; }
	@mkdir -p $(@D) && cp launcher/quality/node/package.json launcher/quality/node/package-lock.json $(@D)
	@cd $(@D) && npm ci --ignore-scripts --no-fund --no-audit --loglevel=error
	@touch $@
