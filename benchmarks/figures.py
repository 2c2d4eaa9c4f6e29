"""Measures every figure of docs/STATUS.md and docs/PERFORMANCE.md that needs a GPU; can be interrupted and resumed.

    export PYTORCH_ALLOC_CONF=expandable_segments:True
    python benchmarks/figures.py --out figures --minutes 10      # repeat until it returns 0; 75: out of time
    python benchmarks/figures.py --out figures --only speed ablation
    python benchmarks/figures.py --out figures --base FOLDER --data FOLDER --manifest FILE
    python benchmarks/figures.py --list

Each figure is a plain command; its output goes to `figures/NAME.log`. Finished figures are skipped, and so are those
that need a pretrained base, rows or a published manifest that is not given.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from child_environment import ROOT, make_environment  # type: ignore[import-not-found]  # in this folder
from resumable_cases import OUT_OF_TIME  # type: ignore[import-not-found]  # in this folder

SPEED = "main small eager fp8 dropped published low"
MIN_SECONDS = 60.0  # start nothing with less time left
INPUTS = {
    "manifest": "a published manifest, for before_after",
    "base": "folder of a pretrained base, for quality, fp8_full and kill_during_save",
    "data": "folder with text2cypher.jsonl, wikisql.jsonl and json_instructions.jsonl, for the same",
}
SAMPLE = "--set training.dataset.path=sample/train.jsonl --set training.dataset.format=jsonl"
RANDOM = f"neo4j --profile full --random-weights {SAMPLE} --set training.config.torch_compile=true"
FP8 = "--set training.config.precision=fp8"
TIMED = "--warm 1 --steps 500 --seconds 11"
BATCH_4 = "--set training.config.batch_size=4 --set training.config.gradient_accumulation_steps=1"
TOOLS = "--tools base launcher launcher-fp8 launcher-qlora trl unsloth --one-at-a-time"
REAL = f"--base {{base}} --data {{data}} --experts cypher sql json typescript {TOOLS}"
TRACED = "--max-steps 24 --profile-steps 16:17 --wandb disabled --set evaluation.task_rows=0 --runs-dir {out}/runs"


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    name: str
    description: str
    command: str  # {out}: the folder; {minutes}: time left; {manifest}, {base}, {data}: the flags of these names


FIGURES = (
    Figure(
        name="speed",
        description="throughput, measured and estimated",
        command=f"benchmarks/training.py measure --cases {SPEED} --out {{out}}/training.jsonl --minutes {{minutes}}",
    ),
    Figure(
        name="peer_speed",
        description="throughput and memory compared with TRL and Unsloth",
        command="benchmarks/peer_speed.py measure --out {out}/peer_speed.jsonl --minutes {minutes}",
    ),
    Figure(
        name="attention",
        description="attention by itself, each backend",
        command="benchmarks/attention.py measure --out {out}/attention.jsonl --minutes {minutes}",
    ),
    Figure(
        name="matmuls",
        description="matmuls of a frozen base in BF16 and FP8",
        command="benchmarks/matmuls.py measure --out {out}/matmuls.jsonl --minutes {minutes}",
    ),
    Figure(
        name="vram_limit",
        description="plans for 16, 24 and 32 GiB",
        command="benchmarks/vram_limit.py measure --out {out}/vram_limit.jsonl --minutes {minutes}",
    ),
    Figure(
        name="ablation",
        description="each optimization, alone and cumulatively",
        command=f"-m launcher bench ablation {RANDOM} {FP8} {BATCH_4} {TIMED} --out {{out}}/ablation",
    ),
    Figure(
        name="memory",
        description="memory, measured and estimated",
        command="-m benchmarks.memory_grid --out {out}/memory.jsonl --minutes {minutes}",
    ),
    Figure(
        name="before_after",
        description="a published manifest in its original loop and in the launcher",
        command="benchmarks/before_after.py --manifest {manifest} --out {out}/before_after.json",
    ),
    Figure(name="trace", description="profile of a step", command=f"-m launcher train {RANDOM} {TRACED}"),
    Figure(
        name="tracking_overhead",
        description="overhead of metrics, console and W&B",
        command="benchmarks/tracking_overhead.py --case 0.6B-lora-16 --steps 126 --out {out}/overhead.jsonl",
    ),
    Figure(
        name="engines",
        description="cost of each distributed strategy on one GPU",
        command="benchmarks/engines.py measure --cases lora full qlora --out {out}/engines.jsonl",
    ),
    Figure(
        name="families",
        description="throughput and memory of other families",
        command="benchmarks/families.py measure --out {out}/families.jsonl --minutes {minutes}",
    ),
    Figure(
        name="generation",
        description="decode steps of launcher eval",
        command="benchmarks/generation.py --out {out}/generation.jsonl",
    ),
    Figure(
        name="quality",
        description="real weights: base, launcher, TRL and Unsloth",
        command=f"-m benchmarks.peers.quality run {REAL} --work {{out}}/quality --out {{out}}/quality.jsonl",
    ),
    Figure(
        name="fp8_full",
        description="full fine-tuning in FP8 and BF16 on real weights",
        command="benchmarks/stochastic_rounding.py --base {base} --kinds fp32 fp8 --out {out}/fp8_full.jsonl",
    ),
    Figure(
        name="kill_during_save",
        description="full fine-tuning, killed while it saves",
        command="benchmarks/kill_during_save.py --base {base} --data {data}/wikisql.jsonl --work {out}/killed",
    ),
)


def run_figure(figure: Figure, args: argparse.Namespace, out: Path, deadline: float) -> int:
    left = deadline - time.monotonic()
    inputs = {name: getattr(args, name) for name in INPUTS}
    words = figure.command.format(out=out, minutes=f"{max(0.5, left / 60 - 1):.1f}", **inputs).split()
    environment = make_environment(LAUNCHER_DATA_DIR=str(out / "data"), PYTHONUNBUFFERED="1")
    print(f"{figure.name}: python {' '.join(words)}", flush=True)
    with (out / f"{figure.name}.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            return process.wait(timeout=left)
        except subprocess.TimeoutExpired:
            return OUT_OF_TIME
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its trainings, too
            process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("figures"))
    parser.add_argument("--minutes", type=float, default=1e4)
    parser.add_argument("--only", nargs="+", choices=[figure.name for figure in FIGURES], default=[])
    for name, text in INPUTS.items():
        parser.add_argument(f"--{name}", type=Path, help=text)
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    if args.list:
        print("\n".join(f"{figure.name:<18}{figure.description}: python {figure.command}" for figure in FIGURES))
        return 0
    out, deadline, failed = args.out.resolve(), time.monotonic() + 60 * args.minutes, []
    out.mkdir(parents=True, exist_ok=True)
    for name in INPUTS:
        if getattr(args, name) is not None:
            setattr(args, name, getattr(args, name).resolve())
    for figure in FIGURES:
        done = out / f"{figure.name}.done"
        if (args.only and figure.name not in args.only) or done.exists():
            continue
        missing = [f"--{name}" for name in INPUTS if f"{{{name}}}" in figure.command and getattr(args, name) is None]
        if missing:
            print(f"{figure.name}: skipped, needs {' and '.join(missing)}", flush=True)
            continue
        if deadline - time.monotonic() < MIN_SECONDS:
            return OUT_OF_TIME
        code = run_figure(figure, args, out, deadline)
        print(f"{figure.name}: exit code {code}", flush=True)
        if code == OUT_OF_TIME:
            return code
        if code:
            failed.append(figure.name)
        else:
            done.touch()
    print(f"failed: {', '.join(failed)}" if failed else "done")
    return 4 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
