"""How each command of the docs is tested. A command that is not quick must be in one of these lists."""

from __future__ import annotations

# Values of placeholders when a command is run.
PLACEHOLDERS = {"RUN": "first", "RUN…": "first", "EARLIER": "second"}

# Run as typed, in this order, in one temporary folder, without a GPU: `make test-all`. The order is that of the guide.
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
    "launcher ask first",
    'launcher ask first "List the name of products with price of at most 20." '
    '--input "CREATE TABLE products (id INTEGER PRIMARY KEY, name TEXT NOT NULL, price REAL NOT NULL);"',
    "launcher eval shop --run first --rows 40",
    "launcher eval shop --base --rows 40 -o base.json",
    "launcher train shop --run-id second --set training.config.rank=4 --set training.config.alpha=8",
    "launcher compare first second",
    "launcher compare first second --format text",
    "launcher eval shop --run second --against first --rows 40",
    "launcher export first",
)

# Run after the walk-through, in the same folder; the number is added as `--max-steps`.
SLOW = {
    "launcher train neo4j": 4,
    "launcher train neo4j --wandb disabled": 4,
    "launcher train neo4j --max-restarts 3": 4,
    "launcher train neo4j --random-weights --max-steps 20": None,
    "launcher train neo4j --profile-steps 10:15": 16,
    "launcher eval neo4j": None,
    "launcher eval shop --run first --trust": None,
    "launcher train shop --max-steps 20": None,
    "launcher eval neo4j --base": None,
    "launcher eval --run RUN --rows 100": None,
    'launcher ask RUN "Who directed Alien?" --input "(:Movie)"': None,
    "launcher doctor --run RUN": None,
    "launcher report RUN --write": None,
    "launcher export first --format adapter": None,
    "launcher export first --push my-name/shop-expert --dry-run": None,
}

_GPU = "needs a GPU, and downloads the base"
_SHOWN = "expanded by `make -n` and its launcher command parsed; it installs packages"
_BENCH = "takes minutes to an hour; tests/bench runs the same command with few steps"
_MEASURED = "summarizes GPU measurements; tests/unit/benchmarks/memory_grid/test_grid.py"
PINNED = {
    "make fuzz FUZZ_SECONDS=3600 FUZZ_SEED=20261117": "takes an hour, as below",
    "make fuzz FUZZ_SECONDS=600": "takes ten minutes; tests/fuzz runs the same targets for seconds",
    "source .venv/bin/activate": "only changes the current shell",
    "launcher doctor": "the result depends on the machine; tests/unit/analysis/doctor, tests/faults/test_doctor.py",
    "launcher doctor neo4j": "the result depends on the machine, as above",
    "launcher doctor shop": "the result depends on the machine, as above",
    "launcher doctor neo4j --json": "the result depends on the machine, as above",
    "launcher doctor --free": "needs a GPU; tests/unit/analysis/doctor/test_free_memory.py",
    "launcher doctor --quick": "the result depends on the machine, as above",
    "launcher doctor --json": "the result depends on the machine, as above",
    "launcher train neo4j --resume": "needs an interrupted run; tests/faults/test_resume.py",
    "launcher train neo4j --resume RUN --verify 3": "needs an interrupted run; tests/faults/test_resume.py",
    "launcher train neo4j --resume RUN --gpus 2 --strategy fsdp2": "two GPUs; CPU ranks in tests/faults",
    "accelerate launch launcher/train.py --manifest experts/neo4j/manifest.json --resume RUN": "as above",
    "accelerate launch --config_file accelerate_configs/fsdp2_8gpu.yaml launcher/train.py "
    "--manifest experts/neo4j/manifest.json": "needs eight GPUs; "
    "tests/distributed/test_plain_accelerate_launch.py has CPU ranks",
    "launcher train neo4j --nodes 2 --node-rank 0 --rendezvous HOST:29500 --run-id a": "waits for a second node; "
    "tests/distributed/test_preflight.py has two",
    "launcher train neo4j --gpu h100 --gpus 8 --nodes 2 --on slurm": "needs Slurm; tests/slurm has one",
    "launcher rehearse neo4j --gpu h100 --gpus 8 --nodes 2": "minutes of CPU ranks; tests/distributed/test_matrix.py "
    "rehearses each strategy",
    "launcher train neo4j --wandb-project experts --wandb-entity team --wandb-tags nightly,lora --wandb-notes "
    '"higher rank"': "uploads to a W&B server if there is a key; tests/tracking has a server",
    "launcher train neo4j --report-to tensorboard": "needs the extra package; tests/tracking/test_tracker_uploader.py",
    "launcher train neo4j --report-to wandb,mlflow": "needs an MLflow server; tests/tracking/test_tracker_uploader.py",
    "launcher sweep shop --param learning_rate=1e-5..1e-3:log --param rank=8,16,32 --trials 12 --max-hours 8": "twelve "
    "trainings; tests/faults/test_sweep.py",
    "launcher train neo4j --wandb-artifacts adapter,manifest": "uploads to a W&B server, as above",
    "launcher export first --format gguf": "needs the converter; tests/training/export/test_gguf.py runs it",
    "launcher export first --format gguf --quantization f16,q8_0,q4_k_m --out shop-gguf": "needs llama.cpp, as above",
    "launcher export first --push my-name/shop-expert": "uploads; tests/training/export/test_push.py has a server",
    "launcher export first --format gguf --push my-name/shop-expert-gguf --public": "uploads, as above",
    "launcher dashboard": "needs a W&B server; tests/unit/analysis/wandb_dashboard",
    "launcher dashboard --entity team --project experts --name nightly": "needs a W&B server, as above",
    "launcher dashboard --url 'https://wandb.ai/team/experts?nw=a0b1c2d3'": "needs a W&B server, as above",
    "launcher eval --run RUN --against EARLIER --max-regression 5%": "the walk-through runs a gate like it",
    "launcher regression json": "two trainings of one epoch; tests/training/bench/test_regression.py",
    "launcher regression sql --rows 100 --max-regression 2% --json": "two trainings, as above",
    "launcher regression json --max-steps 10": "two trainings, as above",
    "launcher regression neo4j --set training.config.precision=fp8": "needs a GPU; tests/unit/bench/test_regression.py",
    "launcher train neo4j --precision fp8": "needs a GPU; tests/training/model/test_fp8_base.py",
    "launcher bench neo4j --vary torch_compile=true,false": _GPU,
    "launcher bench neo4j --vary batch_size=4,8 --random-weights --base Qwen/Qwen3-0.6B": _GPU,
    "launcher bench sql --vary base_models.0.quantization=none,int4 --out bench/quantised": _GPU,
    "launcher bench shop --vary torch_compile=true,false": _GPU,
    "launcher train json --max-steps 1": "a measured command; tests/training/runtime/test_unused_packages.py runs it",
    "launcher bench attention neo4j": _GPU,
    "launcher bench attention shop": _GPU,
    "launcher bench ablation neo4j": _BENCH,
    "launcher bench ablation neo4j --profile full --random-weights --set training.dataset.path=sample/train.jsonl "
    "--set training.dataset.format=jsonl --set training.config.torch_compile=true --set training.config.batch_size=4 "
    "--set training.config.precision=fp8 --warm 1 --steps 50 --seconds 11": _GPU,
    "launcher train neo4j --profile full --random-weights --max-steps 20": _GPU,
    "launcher bench ablation shop": _BENCH,
    "python -m benchmarks.memory_grid --out rows.jsonl --minutes 10": _GPU,
    "python -m benchmarks.memory_grid --list --gpu h200": _MEASURED,
    "python -m benchmarks.memory_grid --collect rows.jsonl "
    "--output benchmarks/results/memory_h200.json --table": _MEASURED,
    "python -m benchmarks.memory_grid --out tiny.jsonl --bases tiny": "ten minutes; tests/training has some cases",
    "make train EXPERT=neo4j": _SHOWN,
    "make plan EXPERT=sql": _SHOWN,
    "make plan EXPERT=sql ARGS='--gpu rtx5090'": _SHOWN,
    "make prepare EXPERT=sql": _SHOWN,
    "make test": "runs this test",
    "make test-fast": "runs other tests",
    "make test ARGS='tests/unit/plan -x'": "runs other tests",
    "make test-all": "runs this test",
    "make check": "`.ci/run` runs it before the tests",
    "make help": "run by test_make_help_lists_every_target",
}

# Pages that record commands of measurements: only their flags are checked.
RECORDS = {"CLAIMS.md", "STATUS.md"}

# Programs of other projects, whose flags are not checked.
FOREIGN = {
    "docker": "needs a daemon; tests/release lints the Dockerfile",
    "sky": "starts cloud instances; tests/targets parses the file and runs its script",
    "kubectl": "needs a cluster; tests/targets parses the file and runs its script",
    "dstack": "needs a server; tests/targets parses the file and runs its script",
    "wandb": "tests/tracking reads runs with it",
    "vllm": "needs a GPU and a large package; tests/training/export loads the same folders with transformers and PEFT",
    "llama-server": "needs llama.cpp; tests/training/export/test_gguf.py runs the file with llama-cpp-python",
    "ollama": "needs Ollama; tests/training/export/test_serving.py compares the template with the training's",
    "rsync": "copies to another machine",
    "pre-commit": "changes this checkout's hooks; tests/release checks its file",
}
