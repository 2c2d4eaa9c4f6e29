"""How each command of the docs is held. One that is in none of these lists, and is not quick, fails the test."""

from __future__ import annotations

# Placeholders, and what they are when a command is run.
PLACEHOLDERS = {"RUN": "first", "RUN…": "first", "EARLIER": "second"}

# Run as typed, one after the other, in a folder of their own, without a GPU: `make test-all`.
# The guide's walk-through stands here in its order; what it cannot do without is done by it.
WALK_THROUGH = (
    "head -n 1 experts/sql/sample/train.jsonl",
    "launcher new shop --data experts/sql/sample/train.jsonl --test experts/sql/sample/test.jsonl",
    "launcher validate shop",
    "launcher plan shop",
    "launcher prepare shop",
    "launcher data",
    "launcher train shop --run-id first",
    "launcher report first",
    "launcher doctor --run first --quick",
    'launcher ask first "List the name of products with price of at most 20." '
    '--input "CREATE TABLE products (id INTEGER PRIMARY KEY, name TEXT NOT NULL, price REAL NOT NULL);"',
    "launcher eval shop --run first --rows 40",
    "launcher eval shop --base --rows 40 -o base.json",
    "launcher train shop --run-id second --set training.config.rank=4",
    "launcher compare first second",
    "launcher compare first second --format text",
    "launcher eval shop --run second --against first --rows 40",
    "launcher export first",
)

# As above, behind the walk-through. `--max-steps` is added to trainings: what they show does not need 60 steps.
SLOW = {
    "launcher train neo4j": 4,
    "launcher train neo4j --wandb disabled": 4,
    "launcher train neo4j --max-restarts 3": 4,
    "launcher train neo4j --random-weights --max-steps 20": None,
    "launcher train neo4j --profile-steps 10:15": 16,
    "launcher eval neo4j": None,
    "launcher eval neo4j --base": None,
    "launcher eval --run RUN --rows 100": None,
    'launcher ask RUN "Who directed Alien?" --input "(:Movie)"': None,
    "launcher doctor --run RUN": None,
    "launcher report RUN --write": None,
}

_GPU = "needs a GPU, and downloads the base"
_SHOWN = "expanded by `make -n`, and its launcher command parsed; it installs packages"
_BENCH = "a measurement of minutes to an hour; tests/bench runs the same verb with few steps"
_MEASURED = "sums up what a GPU has measured; tests/unit/bench/test_memory_grid.py"
PINNED = {
    "source .venv/bin/activate": "changes the shell that it is typed into, and nothing else",
    "launcher doctor": "its verdict depends on the machine; tests/unit/doctor and tests/faults/test_doctor.py hold it",
    "launcher doctor neo4j": "its verdict depends on the machine, as above",
    "launcher doctor neo4j --json": "its verdict depends on the machine, as above",
    "launcher doctor --quick": "its verdict depends on the machine, as above",
    "launcher doctor --json": "its verdict depends on the machine, as above",
    "launcher train neo4j --resume": "needs a run that was cut; tests/faults/test_resume.py cuts some and resumes them",
    "launcher train neo4j --resume RUN --verify 3": "needs a run that was cut; tests/faults/test_resume.py",
    "launcher train neo4j --resume RUN --gpus 2 --strategy fsdp2": "two GPUs; CPU ranks in tests/faults",
    "accelerate launch launcher/train.py --manifest experts/neo4j/manifest.json --resume RUN": "a cut run, as above",
    "accelerate launch --config_file accelerate_configs/fsdp2_8gpu.yaml launcher/train.py "
    "--manifest experts/neo4j/manifest.json": "needs eight GPUs; tests/distributed/test_bare.py has CPU ranks",
    "launcher train neo4j --nodes 2 --node-rank 0 --rendezvous HOST:29500 --run-id a": "waits for a second node; "
    "tests/distributed/test_preflight.py has two",
    "launcher train neo4j --gpu h100 --gpus 8 --nodes 2 --slurm": "needs Slurm; tests/slurm has one",
    "launcher rehearse neo4j --gpu h100 --gpus 8 --nodes 2": "minutes of CPU ranks; tests/distributed/test_matrix.py "
    "rehearses each strategy",
    "launcher train neo4j --wandb-project experts --wandb-entity team --wandb-tags nightly,lora --wandb-notes "
    '"higher rank"': "tells a W&B server where there is a key; tests/tracking has a server",
    "launcher train neo4j --wandb-artifacts adapter,manifest": "tells a W&B server, as above",
    "launcher dashboard": "asks a W&B server; tests/unit/dashboard holds what is sent",
    "launcher dashboard --entity team --project experts --name nightly": "asks a W&B server, as above",
    "launcher dashboard --url 'https://wandb.ai/team/experts?nw=a0b1c2d3'": "asks a W&B server, as above",
    "launcher eval --run RUN --against EARLIER --max-drop 5%": "the walk-through runs a gate like it",
    "launcher regression json": "two trainings of one epoch; tests/unit/regression, and figures in docs/STATUS.md",
    "launcher regression sql --rows 100 --max-drop 2% --json": "two trainings, as above",
    "launcher regression json --max-steps 10": "two trainings, as above",
    "launcher bench neo4j --vary torch_compile=true,false": _GPU,
    "launcher bench neo4j --vary batch_size=4,8 --random-weights --base Qwen/Qwen3-0.6B": _GPU,
    "launcher bench sql --vary base_models.0.quantization=none,int4 --out bench/quantised": _GPU,
    "launcher bench shop --vary torch_compile=true,false": _GPU,
    "launcher bench ladder neo4j": _BENCH,
    "launcher bench ladder shop": _BENCH,
    "launcher bench memory --out rows.jsonl --minutes 10": _GPU,
    "launcher bench memory --collect rows.jsonl --into benchmarks/results/memory_h200.json --table": _MEASURED,
    "launcher bench memory --out tiny.jsonl --bases tiny": "ten minutes; tests/training has some cases",
    "make train EXPERT=neo4j": _SHOWN,
    "make plan EXPERT=sql": _SHOWN,
    "make plan EXPERT=sql ARGS='--gpu rtx5090'": _SHOWN,
    "make prepare EXPERT=sql": _SHOWN,
    "make test": "runs this test",
    "make test ARGS='tests/unit/plan -x'": "runs other tests",
    "make test-all": "runs this test",
    "make check": "`.ci/run` runs it before the tests",
    "make help": "run by test_make_help_lists_every_target",
}

# Pages that say what was run, where and when: their commands are a record, and only their flags are checked.
RECORDS = {"STATUS.md"}

# Programs of others, whose flags are not ours to check.
FOREIGN = {
    "docker": "needs a daemon and gigabytes; tests/release lints the Dockerfile",
    "wandb": "a program of W&B's; tests/tracking reads runs with it",
    "pre-commit": "changes this checkout's hooks; tests/release checks its file",
}
