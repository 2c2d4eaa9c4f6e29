"""Validates the quality gate: closed for an expert trained on shuffled answers, open between two seeds.

Experts are trained on the tiny base model with different seeds, evaluated on the same rows, and compared pairwise in
both directions. One more is trained on rows with shuffled answers. Uses `launcher train` and `launcher eval` as a user
would; takes minutes on two cores.

    python benchmarks/quality_gate.py --expert json --seeds 7 --out gate.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
from itertools import permutations
from pathlib import Path
from typing import Any

from child_environment import ROOT, make_environment  # type: ignore[import-not-found]  # in this folder

from launcher.judges.gate import check_change
from launcher.judges.results import EvalResult, compare_results, load_result

MAX_REGRESSION = 0.05


def run_launcher(work: Path, *words: str) -> None:
    environment = make_environment(LAUNCHER_DATA_DIR=str(work / "data"), WANDB_MODE="disabled")
    completed = subprocess.run(
        [sys.executable, "-m", "launcher", *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if completed.returncode != 0:
        sys.exit(f"launcher {' '.join(words)}: exit code {completed.returncode}\n{completed.stderr[-2000:]}")


def train_and_evaluate(
    args: argparse.Namespace, run_id: str, seed: int, expert: str | Path | None = None
) -> EvalResult:
    settings: dict[str, str | int] = {
        "training.config.seed": seed,
        "training.config.batch_size": 4,
        "evaluation.task_rows": 0,
    }
    settings |= {"training.config.gradient_accumulation_steps": 1, "training.config.evaluation_strategy": "no"}
    settings |= {"training.config.save_strategy": "no", "training.config.load_best_model_at_end": False}
    words = [
        word
        for key, value in settings.items()
        for word in ("--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}")
    ]
    run_flags = ["--runs-dir", str(args.work / "runs"), "--run-id", run_id]
    run_launcher(
        args.work,
        "train",
        str(expert or args.expert),
        "--profile",
        "smoke",
        "--max-steps",
        str(args.steps),
        *words,
        *run_flags,
    )
    out = args.work / f"{run_id}.json"
    run_launcher(
        args.work,
        "eval",
        "--run",
        run_id,
        "--runs-dir",
        str(args.work / "runs"),
        "--rows",
        str(args.rows),
        "-o",
        str(out),
    )
    return load_result(out)


def shuffle_answers(expert: str, folder: Path) -> Path:
    """Copy the expert, with the answers of its training rows shuffled."""
    copy = folder / f"{expert}-shuffled"
    shutil.copytree(ROOT / "experts" / expert, copy, dirs_exist_ok=True)
    file = copy / "sample" / "train.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    field = list(rows[0])[-1]
    answers = [row[field] for row in rows]
    random.Random(0).shuffle(answers)
    file.write_text(
        "".join(json.dumps({**row, field: answer}) + "\n" for row, answer in zip(rows, answers, strict=True))
    )
    return copy / "manifest.json"


def compare(old: EvalResult, new: EvalResult) -> dict[str, Any]:
    change, _ = compare_results(old, new)
    verdict = check_change(change, MAX_REGRESSION)
    return {"old": old.subject, "new": new.subject, "is_open": verdict.is_open, "words": verdict.message}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--expert", default="json")
    parser.add_argument("--seeds", type=int, default=7, help="7: 21 pairs, 42 comparisons")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=None, help="runs and data; kept")
    args = parser.parse_args()
    args.work = args.work or Path(tempfile.mkdtemp(prefix="gate-"))
    args.work.mkdir(parents=True, exist_ok=True)
    results = []
    for seed in range(args.seeds):
        results.append(train_and_evaluate(args, f"seed-{seed}", seed))
        print(f"seed {seed}: {results[-1].main.rate:.1%} correct", file=sys.stderr, flush=True)
    pairs = [compare(old, new) for old, new in permutations(results, 2)]
    shuffled = train_and_evaluate(args, "shuffled", 0, shuffle_answers(args.expert, args.work))
    row: dict[str, Any] = {
        "expert": args.expert,
        "steps": args.steps,
        "rows": args.rows,
        "rates": [round(result.main.rate, 4) for result in results],
        "comparisons": len(pairs),
        "closed": [pair for pair in pairs if not pair["is_open"]],
        "shuffled_rate": round(shuffled.main.rate, 4),
        "shuffled": compare(results[0], shuffled),
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    args.out.write_text(json.dumps(row, indent=1) + "\n")
    print(json.dumps(row, indent=1))
    too_often = len(row["closed"]) > len(pairs) / 20
    sys.exit(1 if too_often or row["shuffled"]["is_open"] else 0)


if __name__ == "__main__":
    main()
