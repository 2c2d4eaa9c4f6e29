"""Plans for smaller GPUs, run on a larger one with `launcher train --vram-limit`: estimated and actual memory.

The four experts' own configurations on their samples, Qwen3 shapes with random weights; the plan for the smaller GPU
decides the split. Cases run one at a time. One row of JSON per case; cases with a row are skipped.

    python benchmarks/vram_limit.py measure --out vram_limit.jsonl           # a GPU with more than 32 GiB
    python benchmarks/vram_limit.py measure --cases 1.7B-full-16 8B-full-24 --out vram_limit.jsonl
    python benchmarks/vram_limit.py table vram_limit.jsonl                   # the table of docs/PERFORMANCE.md
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from child_environment import ROOT, make_environment  # type: ignore[import-not-found]  # in this folder
from resumable_cases import add_row, iterate_unmeasured, read_rows, run_subcommands  # type: ignore[import-not-found]  # in this folder

from launcher.core import metrics
from launcher.core.metrics import load_metrics
from launcher.core.run_paths import RunPaths
from launcher.core.units import bytes_to_gib
from launcher.plan import load_plan
from launcher.runs.record import load_outcome

NUM_STEPS, WARMUP_STEPS = 8, 3
LIMIT_SECONDS = 330.0  # of a case; a base of 8B is built and trained in 150 s


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    name: str
    expert: str
    gib: int
    flags: tuple[str, ...] = ()


LARGE = ("--base", "Qwen/Qwen3-8B")
FULL = ("--set", "training.config.adapter_type=full", "--set", "training.config.optim=null")
# Updates within the backward pass need one micro-batch per step, and no clipping.
IN_BACKWARD = tuple(
    word
    for key, value in (("max_grad_norm", 0), ("batch_size", 2), ("gradient_accumulation_steps", 1))
    for word in ("--set", f"training.config.{key}={value}")
)
CASES = (
    Case(name="neo4j-24", expert="neo4j", gib=24),
    Case(name="typescript-24", expert="typescript", gib=24),
    Case(name="sql-32", expert="sql", gib=32),
    Case(name="json-16", expert="json", gib=16),
    Case(name="8B-int4-24", expert="neo4j", gib=24, flags=(*LARGE, "--set", "base_models.0.quantization=int4")),
    Case(name="8B-32", expert="neo4j", gib=32, flags=LARGE),
    Case(name="1.7B-full-16", expert="neo4j", gib=16, flags=("--base", "Qwen/Qwen3-1.7B", *FULL)),
    Case(name="8B-full-24", expert="neo4j", gib=24, flags=(*LARGE, *FULL, *IN_BACKWARD)),
)


def make_command(case: Case, runs_dir: Path) -> list[str]:
    settings = {
        "training.dataset.path": "sample/train.jsonl",
        "training.dataset.format": "jsonl",
        "training.config.torch_compile": "true",
        "training.config.save_strategy": "no",
        "training.config.load_best_model_at_end": "false",
        "training.config.evaluation_strategy": "no",
    }
    overrides = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    head = [sys.executable, "-m", "launcher", "train", case.expert, "--profile", "full", "--random-weights"]
    size = ["--vram-limit", f"{case.gib}GiB", "--max-steps", str(NUM_STEPS), "--wandb", "disabled"]
    return [
        *head,
        *size,
        "--no-calibration",
        "--runs-dir",
        str(runs_dir),
        "--run-id",
        case.name,
        *overrides,
        *case.flags,
    ]


def measure(case: Case, folder: Path) -> dict[str, Any]:
    paths = RunPaths(folder / "runs" / case.name)
    environment = make_environment(LAUNCHER_DATA_DIR=str(folder), LAUNCHER_CACHE_DIR=str(folder / "cache"))
    completed = subprocess.run(
        make_command(case, folder / "runs"),
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    outcome = load_outcome(paths.outcome)
    if completed.returncode or outcome is None:
        return {"error": f"exit code {completed.returncode}: {completed.stdout[-400:]}"}
    plan, rows = load_plan(paths.plan), load_metrics(paths.metrics)
    steady = [row for row in rows if row.step > WARMUP_STEPS and metrics.TOKENS_PER_SECOND in row.values]
    context = next(term.num_bytes for term in plan.memory.terms if term.name == "context")
    reserved = max(row.values[metrics.PEAK_RESERVED_GIB] for row in rows if metrics.PEAK_RESERVED_GIB in row.values)
    return {
        "split": [plan.batch.micro_batch_size, plan.batch.gradient_accumulation_steps],
        "checkpointing": plan.checkpointing,
        "cuda_graph": plan.cuda_graph,
        "attention": plan.attention.backend,
        "weights": plan.precision.trainable_dtype,
        "optimizer": plan.optimizer.name + (", in backward" if plan.optimizer.in_backward else ""),
        "host_gib": round(bytes_to_gib(plan.memory.host_bytes), 2),
        "predicted_tokens_per_second": plan.speed.tokens_per_second,
        "predicted_gib": round(bytes_to_gib(plan.memory.total_bytes), 2),
        "reserved_gib": round(reserved + bytes_to_gib(context), 2),
        "tokens_per_second": round(statistics.median(row.values[metrics.TOKENS_PER_SECOND] for row in steady)),
        "fallbacks": list(outcome.oom_fallbacks),
    }


def run_measure(args: argparse.Namespace) -> None:
    cases = [case for case in CASES if not args.cases or case.name in args.cases]
    for case in iterate_unmeasured(cases, args.out, args.minutes):
        row: dict[str, Any] = {"case": case.name, "limit_gib": case.gib}
        with tempfile.TemporaryDirectory() as name:
            try:
                row |= measure(case, Path(name))
            except subprocess.TimeoutExpired:
                row["error"] = f"timed out after {LIMIT_SECONDS:.0f} s"
        add_row(args.out, row)
        print(row, file=sys.stderr, flush=True)


def run_table(args: argparse.Namespace) -> None:
    print("| | limit | split | reserved, with the context | estimated | tokens/s | OOM fallbacks |")
    print("|---|---|---|---|---|---|---|")
    for row in read_rows(args.rows):
        if "error" in row:
            print(f"| {row['case']} | {row['limit_gib']} GiB | {row['error'][:80]} | | | | |")
            continue
        split, used = " x ".join(map(str, row["split"])), row["reserved_gib"]
        print(
            f"| {row['case']} | {row['limit_gib']} GiB | {split} | {used} GiB ({used / row['limit_gib']:.0%}) | "
            f"{row['predicted_gib']} | {row['tokens_per_second']:,} | {', '.join(row['fallbacks']) or 'none'} |"
        )


if __name__ == "__main__":
    run_subcommands(__doc__, [], "default: all", run_measure, run_table)
