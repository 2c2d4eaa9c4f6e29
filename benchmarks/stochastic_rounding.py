"""Compares full fine-tuning with less precision against FP32 weights and BF16 matmuls, on a real base.

Every seed is trained with the same data: FP32 weights and moments, BF16 weights with stochastic rounding and FP32
moments, BF16 weights with 8-bit moments, and (`--kinds fp32 fp8`) FP32 weights with FP8 matmuls. Reports the validation
loss after the last step. One row of JSON per run; runs with a row are skipped.

    python benchmarks/stochastic_rounding.py --base FOLDER --out rounding.jsonl      # nine runs on one GPU
    python benchmarks/stochastic_rounding.py --base FOLDER --out rounding.jsonl --steps 200 --expert sql
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
from resumable_cases import add_row, iterate_unmeasured, read_rows  # type: ignore[import-not-found]  # in this folder

from launcher.core import metrics
from launcher.core.metrics import load_metrics
from launcher.core.run_paths import RunPaths

KINDS: dict[str, dict[str, str]] = {
    "fp32": {"bf16_stochastic_round": "false", "optim": "adamw_torch_fused"},
    "bf16": {"bf16_stochastic_round": "true", "optim": "adamw_torch_fused"},
    "bf16-8bit": {"bf16_stochastic_round": "true", "optim": "adamw_bnb_8bit"},
    "fp8": {"bf16_stochastic_round": "false", "optim": "adamw_torch_fused", "precision": "fp8"},
}
DEFAULT_KINDS = ("fp32", "bf16", "bf16-8bit")  # FP8 needs a hidden size of 1,024


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    kind: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.seed}"


def make_command(case: Case, args: argparse.Namespace, runs_dir: Path) -> list[str]:
    settings = {
        "dataset.path": "sample/train.jsonl",
        "dataset.format": "jsonl",
        "config.adapter_type": "full",
        "config.seed": str(case.seed),
        "config.batch_size": "8",
        "config.gradient_accumulation_steps": "1",
        "config.warmup_steps": str(max(1, args.steps // 20)),
        "config.warmup_ratio": "null",
        "config.evaluation_strategy": "epoch",
        "config.save_strategy": "no",
        "config.load_best_model_at_end": "false",
        **{f"config.{key}": value for key, value in KINDS[case.kind].items()},
    }
    overrides = [word for key, value in settings.items() for word in ("--set", f"training.{key}={value}")]
    head = [sys.executable, "-m", "launcher", "train", args.expert, "--profile", "full", "--base", args.base]
    run = ["--max-steps", str(args.steps), "--runs-dir", str(runs_dir), "--run-id", case.name, "--wandb", "disabled"]
    limit = ["--vram-limit", args.vram_limit] if args.vram_limit else []
    return [*head, *run, *limit, "--no-calibration", "--set", "evaluation.task_rows=0", *overrides]


def measure(case: Case, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    environment = make_environment(LAUNCHER_DATA_DIR=str(folder))
    command = make_command(case, args, folder / "runs")
    completed = subprocess.run(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if completed.returncode:
        return {"error": f"exit code {completed.returncode}: {(completed.stdout + completed.stderr)[-400:]}"}
    rows = load_metrics(RunPaths(folder / "runs" / case.name).metrics)
    losses = [row.values[metrics.EVAL_LOSS] for row in rows if metrics.EVAL_LOSS in row.values]
    trained = [row.values[metrics.TRAIN_LOSS] for row in rows if metrics.TRAIN_LOSS in row.values]
    return {"eval_loss": losses[-1], "first_train_loss": trained[0], "steps": len(trained)}


def print_table(file: Path) -> None:
    losses: dict[str, dict[int, float]] = {kind: {} for kind in KINDS}
    for row in read_rows(file):
        if "error" not in row:
            losses[row["kind"]][row["seed"]] = row["eval_loss"]
    print("| weights, moments | seeds | mean validation loss | relative to FP32, per seed |\n|---|---|---|---|")
    for kind, by_seed in losses.items():
        ratios = [f"{by_seed[seed] / losses['fp32'][seed] - 1:+.2%}" for seed in by_seed if seed in losses["fp32"]]
        mean = f"{statistics.mean(by_seed.values()):.4f}" if by_seed else ""
        print(f"| {kind} | {len(by_seed)} | {mean} | {', '.join(ratios)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, help="folder or name of a base model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--expert", default="neo4j")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), default=list(DEFAULT_KINDS))
    parser.add_argument("--vram-limit", help="for each training, with the same global batch")
    parser.add_argument("--minutes", type=float, default=1e6, help="start no run later; exit code 75: runs are left")
    args = parser.parse_args()
    cases = [Case(kind=kind, seed=seed) for seed in args.seeds for kind in args.kinds]
    with tempfile.TemporaryDirectory() as name:
        for case in iterate_unmeasured(cases, args.out, args.minutes):
            row = {"case": case.name, **dataclasses.asdict(case), "base": args.base}
            row |= measure(case, args, Path(name))
            add_row(args.out, row)
            print(row, file=sys.stderr, flush=True)
    print_table(args.out)


if __name__ == "__main__":
    main()
