"""Measures speed and memory of the training loop with Qwen3 shapes and random weights, and compares with the plan.

Documents have log-normal lengths (mean 350 tokens) and are packed into sequences of 2,048; the loss is on all tokens.
Reports the median step, so that one stall does not hide the speed. One row of JSON per case.

    export PYTORCH_ALLOC_CONF=expandable_segments:True
    python benchmarks/training.py measure --out training.jsonl            # all cases
    python benchmarks/training.py measure --cases 0.6B-lora-16 --out training.jsonl
    python benchmarks/training.py table training.jsonl                    # the table of docs/STATUS.md
    python benchmarks/training.py measure --cases tiny --out tiny.jsonl   # every code path on a CPU
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from resumable_cases import measure_cases, read_rows, run_subcommands  # type: ignore[import-not-found]  # in this folder
from torch._dynamo.utils import counters

from launcher.base_models.catalogue import TINY_BASE_NAME
from launcher.bench.workers.documents import write_random_store
from launcher.core import metrics
from launcher.core.metrics import StepMetrics, load_metrics
from launcher.core.run_paths import RunPaths, write_files
from launcher.core.units import bytes_to_gib
from launcher.plan import Plan
from launcher.request.request import Request, plan_request
from launcher.request.run_directory import input_texts
from launcher.training.build import build_run
from launcher.training.engine.accelerator import build_accelerator
from launcher.training.engine.run import TrainingRun
from launcher.training.loop import train
from launcher.training.model.layer_path import describe_path
from launcher.training.monitoring.meters import MemoryMeter, Meters, ThroughputMeter
from launcher.training.observers.metrics_writer import MetricsWriter
from launcher.training.verify.packing import PackingCheck

ALL_LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MEAN_TOKENS = 350
WARMUP_STEPS = 4  # the first compiles, and the optimizer makes its state


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    name: str
    base: str
    micro_batch_size: int
    sequence_length: int = 2048
    adapter: str = "lora"
    quantization: str = "none"
    attention: str = "auto"
    compiles: bool = True
    num_steps: int = 16
    more: dict[str, Any] = dataclasses.field(default_factory=dict)  # of training.config


def qwen(size: str, rows: int, kind: str, **changes: Any) -> Case:
    adapters = {"qlora": "lora", "qdora": "dora", "full8bit": "full"}
    adapters |= {"fp8": "lora", "fp8dora": "dora", "fp8full": "full"}
    adapter = adapters.get(kind, kind)
    more = changes.pop("more", {})
    if kind.startswith("fp8"):
        more = {**more, "precision": "fp8"}
    if kind == "full8bit":
        more = {**more, "optim": "adamw_bnb_8bit"}
    return Case(
        name=changes.pop("name", f"{size}-{kind}-{rows}"),
        base=f"Qwen/Qwen3-{size}",
        micro_batch_size=rows,
        adapter=adapter,
        quantization="int4" if kind in ("qlora", "qdora") else "none",
        more=more,
        **changes,
    )


CASES = [
    *(qwen("0.6B", 16, kind) for kind in ("lora", "dora", "qlora", "full")),
    *(qwen("8B", 4, kind) for kind in ("lora", "dora", "qlora", "full8bit")),
    *(qwen("0.6B", rows, "lora") for rows in (2, 8)),
    qwen("0.6B", 8, "full"),
    qwen("1.7B", 8, "full"),
]
FP8 = [
    *(qwen("0.6B", rows, "fp8") for rows in (16, 8, 2)),
    qwen("8B", 4, "fp8"),
    qwen("0.6B", 16, "fp8dora"),
    qwen("0.6B", 16, "fp8full"),
    qwen("1.7B", 8, "fp8full"),
    qwen("0.6B", 16, "fp8", name="0.6B-fp8-16-dropout", more={"dropout": 0.1}),
]
BACKENDS = [
    qwen("0.6B", 2, "lora", name=f"attention-{name}", attention=name, compiles=False, num_steps=6)
    for name in ("varlen", "flex", "sdpa", "eager")
]
TINY = [
    Case(
        name=f"tiny-{kind}", base=TINY_BASE_NAME, micro_batch_size=2, sequence_length=256, adapter=kind, compiles=False
    )
    for kind in ("lora", "dora", "ia3", "full")
]
# Not compiled: the plan compares both.
EAGER = [
    qwen(size, rows, kind, name=f"{size}-{kind}-{rows}-eager", compiles=False)
    for size, kind, rows in (("0.6B", "lora", 16), ("0.6B", "full", 16), ("8B", "lora", 4))
]
SMALL = [qwen("0.6B", 2, kind) for kind in ("dora", "qlora", "full")]
# Dropout, as in the published manifests.
DROPPED = [
    qwen("0.6B", rows, kind, name=f"0.6B-{kind}-{rows}-dropout", more={"dropout": 0.1})
    for kind, rows in (("dora", 16), ("lora", 16), ("dora", 2))
]
# A published configuration (4-bit DoRA without gate_proj, dropout, checkpointing, eager), and the cost of each part.
PUBLISHED = [
    qwen(
        "0.6B",
        24,
        "qdora",
        name=name,
        sequence_length=1536,
        compiles=compiles,
        more={
            "target_modules": [linear for linear in ALL_LINEARS if linear != "gate_proj"],
            "dropout": dropout,
            "gradient_checkpointing": recomputes,
            "torch_compile_mode": "reduce-overhead",
            "optim": "adamw_bnb_8bit",
        },
    )
    for name, compiles, dropout, recomputes in (
        ("published", False, 0.1, True),
        ("published-compiled", True, 0.1, True),
        ("published-kept", False, 0.1, False),
        ("published-without-dropout", False, 0.0, True),
    )
]
# The least memory for 16 x 2,048 tokens.
LOW = [
    qwen("0.6B", 1, "lora"),
    *(
        qwen("0.6B", rows, "lora", name=f"0.6B-lora-{rows}-recomputed", more={"gradient_checkpointing": True})
        for rows in (2, 4, 8)
    ),
]
GROUPS = {
    "main": CASES,
    "fp8": FP8,
    "small": SMALL,
    "eager": EAGER,
    "dropped": DROPPED,
    "published": PUBLISHED,
    "low": LOW,
    "backends": BACKENDS,
    "tiny": TINY,
}


def make_manifest(case: Case, folder: Path) -> Path:
    config = {
        "method": "sft",
        "adapter_type": case.adapter,
        **({"rank": 16, "alpha": 32, "dropout": 0.0} if case.adapter in ("lora", "dora") else {}),
        **({"target_modules": ALL_LINEARS} if case.adapter != "full" else {}),
        "epochs": 1.0,
        "max_steps": case.num_steps,
        "learning_rate": 1e-4,
        "batch_size": case.micro_batch_size,
        "gradient_accumulation_steps": 1,
        "max_seq_length": case.sequence_length,
        "packing": True,
        "loss_on": "all",
        "attention": case.attention,
        "torch_compile": case.compiles,
        "evaluation_strategy": "no",
        "save_strategy": "no",
        "optim": "adamw_torch_fused",
        **case.more,
    }
    manifest = {
        "name": "expert-benchmark",
        "version": "0.1.0",
        "schema_version": "2.0",
        "description": "Random documents.",
        "base_models": [{"name": case.base, "quantization": case.quantization, "prompt_template": "chatml"}],
        "training": {"dataset": {"path": "rows.jsonl", "format": "jsonl"}, "config": config},
    }
    # As long as the documents, which the estimate is for. Two epochs: the plan keeps micro-batches below an epoch.
    row = json.dumps({"instruction": "a", "response": "word " * min(MEAN_TOKENS, case.sequence_length)})
    rows_per_sequence = -(-case.sequence_length // MEAN_TOKENS)
    (folder / "rows.jsonl").write_text((row + "\n") * (2 * case.micro_batch_size * case.num_steps * rows_per_sequence))
    path = folder / "manifest.json"
    path.write_text(json.dumps(manifest))
    return path


class _SteadyPeak(MetricsWriter):
    """Resets the memory peak after the first steps, which compile."""

    def on_step(self, run: TrainingRun, metrics: StepMetrics) -> None:
        super().on_step(run, metrics)
        if metrics.step == WARMUP_STEPS - 1 and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()


def build(case: Case, folder: Path) -> tuple[TrainingRun, PackingCheck]:
    """Build a training in its own run directory, ready for the first step."""
    smoke = case.base == TINY_BASE_NAME
    request = Request(
        expert=str(make_manifest(case, folder)),
        random_weights=True,
        profile="smoke" if smoke else "full",
        overrides=(
            f"training.config.max_seq_length={case.sequence_length}",
            f"training.config.max_steps={case.num_steps}",
            f"training.config.batch_size={case.micro_batch_size}",
        )
        if smoke
        else (),
    )
    planned = plan_request(request)
    num_packs = case.micro_batch_size * case.num_steps
    store = write_random_store(
        folder,
        num_packs=num_packs,
        sequence_length=case.sequence_length,
        vocab_size=planned.plan.base.vocab_size,
        mean_tokens=MEAN_TOKENS,
    )
    paths = RunPaths(folder / "run")
    paths.logs.mkdir(parents=True)
    write_files(paths.root, input_texts(planned, paths))
    return build_run(planned.plan, paths, store, (), build_accelerator(planned.plan))


def measure_case(case: Case) -> dict[str, Any]:
    clean_up()
    with tempfile.TemporaryDirectory() as name:
        began, leftover = time.perf_counter(), read_leftover_gib()
        run, packing_check = build(case, Path(name))
        built = time.perf_counter() - began
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        train(run, _SteadyPeak(), meter=Meters([ThroughputMeter(run), MemoryMeter(run)]))
        rows = load_metrics(run.paths.metrics)
        return {
            **describe_plan(run.plan),
            "path": describe_path(run.engine.module.layers),
            "cuda_graph": run.engine.graphs is not None and run.engine.graphs.is_active,
            **summarize(rows, leftover),
            "built_seconds": round(built, 1),
            "proof": dataclasses.asdict(packing_check),
            "graphs": counters["stats"]["unique_graphs"],
            "breaks": sum(counters["graph_break"].values()),
            "first_step_seconds": round(rows[0].values[metrics.STEP_SECONDS], 1),
        }


def describe_plan(plan: Plan) -> dict[str, Any]:
    return {
        "micro_batch_size": plan.batch.micro_batch_size,
        "accumulation": plan.batch.gradient_accumulation_steps,
        "attention": plan.attention.backend,
        "checkpointing": plan.checkpointing,
        "compile": None if plan.compile is None else plan.compile.scope,
        "loss": plan.loss_kernel,
        "cuda_graph_planned": plan.cuda_graph,
        "predicted_gib": round(bytes_to_gib(plan.memory.allocated_bytes), 2),
        "predicted_tokens_per_second": plan.speed.tokens_per_second,
    }


def read_leftover_gib() -> float:
    """Return the memory that libraries still hold from earlier cases."""
    return bytes_to_gib(torch.cuda.memory_allocated()) if torch.cuda.is_available() else 0.0


def summarize(rows: list[metrics.StepMetrics], left_gib: float) -> dict[str, Any]:
    steady = rows[WARMUP_STEPS:] or rows[-1:]
    median = {name: statistics.median(row.values[name] for row in steady) for name in steady[0].values}
    peak = median.get(metrics.PEAK_ALLOCATED_GIB)
    return {
        "tokens_per_second": round(median[metrics.TOKENS_PER_SECOND]),
        "step_seconds": [round(row.values[metrics.STEP_SECONDS], 4) for row in steady],
        "mfu": median.get(metrics.DEVICE_MFU),
        "peak_gib": None if peak is None else round(peak - left_gib, 2),
        "left_gib": round(left_gib, 2),
        "first_peak_gib": rows[WARMUP_STEPS - 2].get(metrics.PEAK_ALLOCATED_GIB),
        "data_wait_seconds": round(median[metrics.DATA_WAIT_SECONDS], 5),
        "first_loss": rows[0].values[metrics.TRAIN_LOSS],
        "last_loss": rows[-1].values[metrics.TRAIN_LOSS],
    }


def clean_up() -> None:
    torch._dynamo.reset()
    counters.clear()
    AcceleratorState._reset_state(reset_partial_state=True)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run_measure(args: argparse.Namespace) -> None:
    cases = [case for name in args.cases for case in GROUPS.get(name, [])]
    cases += [case for group in GROUPS.values() for case in group if case.name in args.cases]
    measure_cases(cases, args, measure_case, ("tokens_per_second", "mfu", "peak_gib", "predicted_gib", "graphs"))


def run_table(args: argparse.Namespace) -> None:
    print("| case | tokens/s | MFU | peak GiB | predicted | error | micro-steps | first step |")
    print("|---|---|---|---|---|---|---|---|")
    for row in read_rows(args.rows):
        if "error" in row:
            print(f"| {row['case']} | {row['error'][:60]} | | | | | | |")
            continue
        error = (row["predicted_gib"] / row["peak_gib"] - 1) if row["peak_gib"] else None
        print(
            f"| {row['case']} | {row['tokens_per_second']:,} | {(row['mfu'] or 0) * 100:.1f} % | {row['peak_gib']} | "
            f"{row['predicted_gib']} | {'' if error is None else f'{error * 100:+.1f} %'} | "
            f"{row['accumulation']} of {row['micro_batch_size']} | {row['first_step_seconds']} s |"
        )


if __name__ == "__main__":
    run_subcommands(__doc__, ["main", "backends"], f"names, or: {', '.join(GROUPS)}", run_measure, run_table)
