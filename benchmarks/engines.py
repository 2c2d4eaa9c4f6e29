"""Cost of each distributed strategy on one GPU: the same training with every kind of config, compared with plain.

Each case is a complete `launcher train`: plan, accelerate and DeepSpeed configs, `accelerate launch`, training, a
checkpoint and a final evaluation. Qwen3-0.6B's shape with random weights, 16 x 2,048 tokens per step, synthetic text of
log-normal lengths (mean 350 tokens), loss on all tokens, compiled. Reports the median of steady steps, without warm-up
and those around the checkpoint. One row of JSON per case; a failed case does not affect the others.

    python benchmarks/engines.py measure --cases lora --out engines.jsonl
    python benchmarks/engines.py measure --cases full --out engines.jsonl --budget 570
    python benchmarks/engines.py table engines.jsonl                    # the table of docs/PERFORMANCE.md
    python benchmarks/engines.py measure --cases tiny --out tiny.jsonl  # every code path on one CPU rank
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from child_environment import ROOT, make_environment  # type: ignore[import-not-found]  # in this folder
from resumable_cases import add_row  # type: ignore[import-not-found]  # in this folder
from synthetic_rows import write_rows  # type: ignore[import-not-found]  # in this folder

from launcher.core import metrics
from launcher.core.metrics import StepMetrics, load_metrics
from launcher.core.processes import find_processes, send_signal
from launcher.core.run_paths import RunPaths
from launcher.core.units import bytes_to_gib
from launcher.plan import Plan, load_plan
from launcher.runs.record import load_outcome

ALL_LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
WARMUP_STEPS = 4  # the first compiles, and the optimizer allocates its state
SETTLING_STEPS = 2  # after a checkpoint: caches are cold, and files may still be written
TAIL_LINES = 40
MARK = "LAUNCHER_BENCHMARK_MARK"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    base: str
    batch_size: int
    sequence_length: int
    mean_tokens: int
    num_steps: int
    save_step: int
    num_held_out: int
    compiles: bool
    on_cpu: bool = False


LARGE = Sizes(
    base="Qwen/Qwen3-0.6B",
    batch_size=16,
    sequence_length=2048,
    mean_tokens=350,
    num_steps=24,
    save_step=13,
    num_held_out=96,
    compiles=True,
)
SMALL = Sizes(
    base=str(ROOT / "launcher/base_models/tiny_base"),  # as a local folder, so that its weights are random, too
    batch_size=2,
    sequence_length=256,
    mean_tokens=90,
    num_steps=8,
    save_step=5,
    num_held_out=8,
    compiles=False,
    on_cpu=True,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    adapter: str
    strategy: str
    offload: str = "none"
    sizes: Sizes = LARGE

    @property
    def name(self) -> str:
        suffix = {"none": "", "optimizer": "-optimizer", "optimizer_and_parameters": "-parameters"}[self.offload]
        return f"{'tiny-' if self.sizes.on_cpu else ''}{self.adapter}-{self.strategy}{suffix}"

    @property
    def single(self) -> Case:
        return dataclasses.replace(self, strategy="single", offload="none")


ENGINES = (
    ("single", "none"),
    ("ddp", "none"),
    ("fsdp2", "none"),
    ("zero2", "none"),
    ("zero3", "none"),
    ("zero2", "optimizer"),
    ("zero3", "optimizer_and_parameters"),
)


def make_cases(adapter: str, sizes: Sizes) -> list[Case]:
    return [Case(adapter=adapter, strategy=strategy, offload=offload, sizes=sizes) for strategy, offload in ENGINES]


GROUPS = {
    "lora": make_cases("lora", LARGE),
    "full": make_cases("full", LARGE),
    "qlora": [Case(adapter="qlora", strategy=strategy) for strategy in ("single", "fsdp2", "zero3")],
    "tiny": make_cases("lora", SMALL) + make_cases("full", SMALL),
}


def make_manifest(case: Case, folder: Path) -> Path:
    sizes = case.sizes
    is_full, quantization = case.adapter == "full", "int4" if case.adapter == "qlora" else "none"
    config = {
        "method": "sft",
        "adapter_type": "lora" if case.adapter == "qlora" else case.adapter,
        **({} if is_full else {"rank": 16, "alpha": 32, "dropout": 0.0, "target_modules": ALL_LINEARS}),
        "epochs": 1.0,
        "max_steps": sizes.num_steps,
        "learning_rate": 1e-4,
        "batch_size": sizes.batch_size,
        "gradient_accumulation_steps": 1,
        "max_seq_length": sizes.sequence_length,
        "packing": True,
        "loss_on": "all",
        # Plans do not compile under ZeRO-3, either.
        "torch_compile": sizes.compiles and case.strategy != "zero3",
        "optim": "adamw_torch_fused",
        "dataloader_num_workers": 2,
        "logging_steps": 4,
        "evaluation_strategy": "steps",
        "eval_steps": sizes.num_steps,
        "save_strategy": "steps",
        "save_steps": sizes.save_step,
        "load_best_model_at_end": False,
    }
    manifest = {
        "name": "expert-engines",
        "version": "0.1.0",
        "schema_version": "2.0",
        "description": "Generated text.",
        "base_models": [{"name": sizes.base, "quantization": quantization, "prompt_template": "chatml"}],
        "training": {
            "dataset": {"path": "rows.jsonl", "validation_path": "held_out.jsonl", "format": "jsonl"},
            "config": config,
        },
    }
    path = folder / f"{case.adapter}.json"
    path.write_text(json.dumps(manifest, indent=2))
    return path


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CommandResult:
    exit_code: int
    wall_seconds: float
    timed_out: bool
    console: list[str]


def start(words: list[str], work: Path, console: Path, limit_seconds: float) -> CommandResult:
    """Run a launcher command as a user would, and kill all its processes at the end."""
    mark = uuid.uuid4().hex
    variables = {"LAUNCHER_DATA_DIR": str(work / "data"), "PYTHONUNBUFFERED": "1", MARK: mark}
    began, timed_out = time.monotonic(), False
    with console.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "launcher", *words],
            cwd=ROOT,
            env=make_environment(**variables),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            timed_out = True
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
        finally:
            send_signal(find_processes(f"{MARK}={mark}"), signal.SIGKILL)
            process.wait()
    seconds = time.monotonic() - began
    lines = console.read_text(encoding="utf-8", errors="replace").splitlines()
    return CommandResult(exit_code=process.returncode, wall_seconds=seconds, timed_out=timed_out, console=lines)


def list_words(case: Case, manifest: Path, overrides: list[str]) -> list[str]:
    """Return the arguments that `launcher prepare` and `launcher train` share."""
    words = [str(manifest), "--random-weights", "--profile", "full"]
    if case.strategy != "single":
        words += ["--strategy", case.strategy] + (["--cpu-ranks", "1"] if case.sizes.on_cpu else [])
    settings = [f"training.config.offload={case.offload}", *overrides]
    return words + [word for value in settings for word in ("--set", value)]


def measure_case(case: Case, work: Path, overrides: list[str], limit_seconds: float) -> dict[str, Any]:
    folder, paths = get_folder(case, work), RunPaths(work / "runs" / case.name)
    shutil.rmtree(paths.root, ignore_errors=True)
    words = list_words(case, make_manifest(case, folder), overrides)
    run = ["--run-id", paths.run_id, "--runs-dir", str(paths.root.parent)]
    result = start(["train", *words, *run], work, work / f"{case.name}.txt", limit_seconds)
    row: dict[str, Any] = {
        "exit_code": result.exit_code,
        "wall_seconds": round(result.wall_seconds, 1),
        "timed_out": result.timed_out,
    }
    if result.exit_code != 0:
        row["console"] = result.console[-TAIL_LINES:]
    if paths.plan.is_file():
        row |= describe_plan(load_plan(paths.plan))
    outcome = load_outcome(paths.outcome)
    if outcome is not None:
        row |= outcome.model_dump(mode="json", include={"status", "steps_done", "final_loss", "observed", "versions"})
        row["error"] = outcome.error[-2000:]
    if result.exit_code != 0 and not row.get("error"):  # it failed before writing an outcome
        row["error"] = "\n".join(line for line in result.console if "error" in line.lower())[-2000:]
    rows = load_metrics(paths.metrics) if paths.metrics.is_file() else []
    row |= summarize(case.sizes, rows)
    row["missing"] = list(list_missing(case, row, rows, paths))
    for large in (paths.adapter, paths.checkpoints):
        shutil.rmtree(large, ignore_errors=True)
    return row


def get_folder(case: Case, work: Path) -> Path:
    return work / ("small" if case.sizes.on_cpu else "large")


def describe_plan(plan: Plan) -> dict[str, Any]:
    return {
        "planned": f"{plan.strategy}, offload {plan.offload}",
        "micro_batch_size": plan.batch.micro_batch_size,
        "accumulation": plan.batch.gradient_accumulation_steps,
        "attention": plan.attention.backend,
        "checkpointing": plan.checkpointing,
        "compile": None if plan.compile is None else plan.compile.scope,
        "loss": plan.loss_kernel,
        "loader_workers": plan.loader.num_workers,
        "predicted_gib": round(bytes_to_gib(plan.memory.allocated_bytes), 2),
        "predicted_host_gib": round(bytes_to_gib(plan.memory.host_bytes), 2),
        "predicted_tokens_per_second": plan.speed.tokens_per_second,
    }


def summarize(sizes: Sizes, rows: list[StepMetrics]) -> dict[str, Any]:
    """Summarize the steps. Peaks only grow: the one before the checkpoint is that of training, the last of all."""
    steps = [row for row in rows if metrics.STEP_SECONDS in row.values]
    around_checkpoint = range(sizes.save_step, sizes.save_step + SETTLING_STEPS + 1)
    steady = [row for row in steps if row.step > WARMUP_STEPS and row.step not in around_checkpoint]
    evaluations = [row.values for row in rows if metrics.EVAL_LOSS in row.values]
    summary: dict[str, Any] = {"evaluations": evaluations}
    if not steady:
        return summary
    median = {name: statistics.median(row.values[name] for row in steady) for name in steady[0].values}
    before = [row for row in steps if row.step <= sizes.save_step][-1]
    return summary | {
        "tokens_per_second": round(median[metrics.TOKENS_PER_SECOND]),
        "step_seconds": round(median[metrics.STEP_SECONDS], 4),
        "slowest_step_seconds": round(max(row.values[metrics.STEP_SECONDS] for row in steady), 4),
        "first_step_seconds": round(steps[0].values[metrics.STEP_SECONDS], 1),
        "data_wait_seconds": round(median[metrics.DATA_WAIT_SECONDS], 5),
        "mfu": median.get(metrics.DEVICE_MFU),
        "peak_gib": round_gib(before.get(metrics.PEAK_ALLOCATED_GIB)),
        "reserved_gib": round_gib(before.get(metrics.PEAK_RESERVED_GIB)),
        "last_peak_gib": round_gib(steps[-1].get(metrics.PEAK_ALLOCATED_GIB)),
        "losses": [round(row.values[metrics.TRAIN_LOSS], 4) for row in steps],
    }


def round_gib(number: float | None) -> float | None:
    return None if number is None else round(number, 2)


def list_missing(case: Case, row: dict[str, Any], rows: list[StepMetrics], paths: RunPaths) -> Iterator[str]:
    """Yield what is missing in a run that seems successful."""
    if row.get("planned") != f"{case.strategy}, offload {case.offload}":
        yield f"the engine: {row.get('planned')}"
    if row.get("steps_done") != case.sizes.num_steps:
        yield "steps"
    if not row.get("loader_workers"):
        yield "loader workers"
    if not row["evaluations"]:
        yield "evaluation"
    if not row.get("observed"):
        yield "banner"
    if not any(paths.checkpoints.glob("*")):
        yield "checkpoint"
    if not any(paths.adapter.glob("*.safetensors")):
        yield "trained weights"
    if any(not math.isfinite(each.values[metrics.TRAIN_LOSS]) for each in rows if metrics.TRAIN_LOSS in each.values):
        yield "finite losses"


def run_measure(args: argparse.Namespace) -> None:
    began = time.monotonic()
    cases = [case for name in args.cases for case in GROUPS.get(name, [])]
    cases += [case for group in GROUPS.values() for case in group if case.name in args.cases]
    (args.work / "runs").mkdir(parents=True, exist_ok=True)
    for folder, case in {get_folder(case, args.work): case for case in cases}.items():
        write_rows(case.sizes, folder)
        words = list_words(case.single, make_manifest(case.single, folder), [])
        prepared = start(["prepare", *words], args.work, args.work / "prepare.txt", args.limit)
        print(*prepared.console[-TAIL_LINES:], sep="\n", file=sys.stderr, flush=True)
    for case in cases:
        left = args.budget - (time.monotonic() - began)
        row: dict[str, Any] = {**dataclasses.asdict(case), "case": case.name, "overrides": args.overrides}
        if left < args.least:
            row["error"] = f"not started: only {max(0.0, left):.0f} s left"
        else:
            try:
                row |= measure_case(case, args.work, args.overrides, min(args.limit, left))
            except Exception as error:  # one failed case must not stop the others
                row["error"] = f"{type(error).__name__}: {str(error)[:500]}"
        add_row(args.out, row)
        print(format_progress(row, time.monotonic() - began), file=sys.stderr, flush=True)


def format_progress(row: dict[str, Any], seconds: float) -> str:
    names = ("exit_code", "tokens_per_second", "step_seconds", "peak_gib", "predicted_gib", "wall_seconds", "missing")
    shown = "  ".join(f"{name} {row[name]}" for name in names if row.get(name) not in (None, []))
    error_lines = [line for line in (row.get("error") or "").splitlines() if line.strip()]
    return f"{seconds:5.0f} s  {row['case']}: {shown}{'  ' + error_lines[-1][:300] if error_lines else ''}"


def run_table(args: argparse.Namespace) -> None:
    """Print the last row of each case, relative to the single process with the same adapter."""
    rows = {row["case"]: row for row in map(json.loads, args.rows.read_text().splitlines())}
    print("| case | tokens/s | to single | peak GiB | to single | predicted | error | waits for data | command |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        if row.get("tokens_per_second") is None:
            reason = ((row.get("error") or "").strip().splitlines() or [f"exit code {row.get('exit_code')}"])[-1]
            print(f"| {name} | {reason[:80]} | | | | | | | |")
            continue
        single = rows.get(name[: name.index(row["strategy"])] + "single", {})
        rate, peak, predicted = row["tokens_per_second"], row["peak_gib"], row["predicted_gib"]
        cells = [
            f"{name} ({row['accumulation']} x {row['micro_batch_size']})",
            f"{rate:,}",
            f"{rate / single['tokens_per_second'] - 1:+.1%}" if single.get("tokens_per_second") else "",
            str(peak),
            f"{peak - single['peak_gib']:+.2f}" if peak and single.get("peak_gib") else "",
            str(predicted),
            f"{predicted / peak - 1:+.1%}" if peak else "",
            f"{row['data_wait_seconds'] / row['step_seconds']:.1%}",
            ", ".join([f"{row['wall_seconds']:.0f} s", *(f"no {item}" for item in row["missing"])]),
        ]
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    measure = verbs.add_parser("measure")
    measure.add_argument("--cases", nargs="+", default=["lora", "full"], help="names, or: lora, full, qlora, tiny")
    measure.add_argument("--out", type=Path, required=True)
    measure.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "engines", help="data and runs")
    measure.add_argument("--limit", type=float, default=180.0, metavar="SECONDS", help="time limit per case")
    measure.add_argument("--budget", type=float, default=math.inf, metavar="SECONDS", help="time limit of all cases")
    measure.add_argument("--least", type=float, default=40.0, metavar="SECONDS", help="left time to start a case")
    measure.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    measure.set_defaults(run=run_measure)
    table = verbs.add_parser("table")
    table.add_argument("rows", type=Path)
    table.set_defaults(run=run_table)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
