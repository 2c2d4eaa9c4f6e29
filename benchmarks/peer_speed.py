"""Compares speed and memory of the launcher with TRL and Unsloth: same documents, same adapter, in the same minutes.

Cases are those of training.py: random weights, documents packed into sequences of 2,048, the loss on all tokens, LoRA
of rank 16. Every tool has a process of its own and its fastest settings: packing without mixing documents, no gradient
checkpointing. Reports the median step after the first ones, which compile. Tools that are not installed are skipped.

    export PYTORCH_ALLOC_CONF=expandable_segments:True
    python benchmarks/peer_speed.py measure --out peer_speed.jsonl                  # all cases
    python benchmarks/peer_speed.py measure --cases 0.6B-16 --out peer_speed.jsonl  # all tools
    python benchmarks/peer_speed.py table peer_speed.jsonl
    python benchmarks/peer_speed.py measure --cases tiny --out tiny.jsonl           # without a GPU
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from child_environment import ROOT, make_environment  # type: ignore[import-not-found]  # in this folder
from resumable_cases import measure_cases, read_rows, run_subcommands  # type: ignore[import-not-found]  # in this folder
from training import MEAN_TOKENS, TINY, Case, make_manifest, qwen  # type: ignore[import-not-found]  # in this folder
from transformers import AutoConfig, AutoModelForCausalLM

from launcher.base_models.catalogue import TINY_BASE_FOLDER, TINY_BASE_NAME, lookup_base
from launcher.bench.workers.documents import write_random_store
from launcher.request.request import Request, plan_request

LIMIT_SECONDS = 300
PEERS = ("trl", "unsloth")


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerCase:
    name: str
    size: str
    tool: str
    training: Case


CASES = [
    PeerCase(name=f"{size}-{rows}-{tool}", size=f"{size}-{rows}", tool=tool, training=qwen(size, rows, kind))
    for size, rows in (("0.6B", 16), ("0.6B", 2), ("8B", 4))
    for tool, kind in (("launcher", "lora"), ("launcher-fp8", "fp8"), ("trl", "lora"), ("unsloth", "lora"))
] + [
    PeerCase(name=f"tiny-{tool}", size="tiny", tool=tool, training=case)
    for case in TINY
    if case.name == "tiny-lora"
    for tool in ("launcher", *PEERS)
]


def measure(case: PeerCase, bases: Path) -> dict[str, Any]:
    """Train one case in a new process; return tokens per second, peak memory and the duration of the steps."""
    row: dict[str, Any] = {"size": case.size, "tool": case.tool}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        if case.tool in PEERS:
            plan, store = make_inputs(case.training, work, make_base(case.training, bases))
            words: list[str | Path] = ["-m", "benchmarks.peers.peer_training", case.tool, plan, store, work / "adapter"]
            row |= json.loads(run_python([*words, "--packed"]).splitlines()[-1])
            return row | {case.tool: importlib.metadata.version(case.tool)}
        out = work / "row.jsonl"
        run_python([ROOT / "benchmarks/training.py", "measure", "--cases", case.training.name, "--out", out])
        (measured,) = read_rows(out)
    if "error" in measured:
        raise RuntimeError(measured["error"])
    names = ("tokens_per_second", "peak_gib", "predicted_gib", "step_seconds")
    return row | {name: measured[name] for name in names}


def make_base(case: Case, bases: Path) -> Path:
    """Return a folder with random weights of a case's shape, and with some tokenizer: documents are tokens already."""
    if case.base == TINY_BASE_NAME:
        return TINY_BASE_FOLDER
    folder = bases / Path(case.base).name
    if not folder.exists():
        known = lookup_base(case.base)
        assert known is not None
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**dict(known)), dtype=torch.bfloat16)  # type: ignore[arg-type]
        model.save_pretrained(folder)
        for file in TINY_BASE_FOLDER.glob("*token*"):
            shutil.copy(file, folder)
    return folder


def make_inputs(case: Case, work: Path, base: Path) -> tuple[Path, Path]:
    """Write the plan that a peer follows, and the same documents as those of training.py; return both paths."""
    manifest = make_manifest(replace(case, base=str(base)), work)
    plan = plan_request(Request(expert=str(manifest), profile="full")).plan
    (work / "plan.json").write_text(plan.model_dump_json())
    num_packs = case.micro_batch_size * case.num_steps
    store = write_random_store(
        work,
        num_packs=num_packs,
        sequence_length=case.sequence_length,
        vocab_size=plan.base.vocab_size,
        mean_tokens=MEAN_TOKENS,
    )
    return work / "plan.json", store.folder


def run_python(words: list[str | Path]) -> str:
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(
        command, env=make_environment(), capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False, cwd=ROOT
    )
    if done.returncode != 0:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr[-400:]}")
    return done.stdout


def run_measure(args: argparse.Namespace) -> None:
    missing = {tool for tool in PEERS if importlib.util.find_spec(tool) is None}
    chosen = [case for case in CASES if case.size in args.cases or case.name in args.cases]
    for case in chosen:
        if case.tool in missing:
            print(f"{case.name}: {case.tool} is not installed", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as bases:
        measure_cases(
            [case for case in chosen if case.tool not in missing],
            args,
            lambda case: measure(case, Path(bases)),
            ("tokens_per_second", "peak_gib"),
        )


def run_table(args: argparse.Namespace) -> None:
    """Print tokens per second and peak memory, one line per size; the launcher's first, then the other tools'."""
    rows = {(row["size"], row["tool"]): row for row in read_rows(args.rows) if "error" not in row}
    tools = list(dict.fromkeys(tool for _, tool in rows))
    print(f"| tokens/s; peak GiB | {' | '.join(tools)} |\n|---|{'---|' * len(tools)}")
    for size in dict.fromkeys(size for size, _ in rows):
        cells = [rows.get((size, tool)) for tool in tools]
        shown = ["" if row is None else f"{row['tokens_per_second']:,}; {row['peak_gib']}" for row in cells]
        print(f"| {size} | {' | '.join(shown)} |")


if __name__ == "__main__":
    sizes = list(dict.fromkeys(case.size for case in CASES))
    run_subcommands(__doc__, sizes[:-1], f"names, or: {', '.join(sizes)}", run_measure, run_table)
