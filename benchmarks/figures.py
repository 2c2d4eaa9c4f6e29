"""Every figure of docs/STATUS.md that needs a GPU, measured again by one command, in pieces that resume.

    export PYTORCH_ALLOC_CONF=expandable_segments:True
    python benchmarks/figures.py --out figures --minutes 10      # again until it returns 0; 75: the time is over
    python benchmarks/figures.py --out figures --only speed ladder
    python benchmarks/figures.py --list

Each figure is a command that a person could type; `figures/NAME.log` has what it said. What is done is not done again.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from pieces import TIME_IS_OVER  # type: ignore[import-not-found]  # beside this file

ROOT = Path(__file__).resolve().parent.parent
SPEED = "main small dropped published low"
LEAST_SECONDS = 60.0  # nothing is begun for less
SAMPLE = "--set training.dataset.path=sample/train.jsonl --set training.dataset.format=jsonl"
RANDOM = f"neo4j --profile full --random-weights {SAMPLE} --set training.config.torch_compile=true"
ONE_STEP = "--set training.config.batch_size=24 --set training.config.gradient_accumulation_steps=1"
TRACED = "--max-steps 24 --profile-steps 16:17 --wandb disabled --set evaluation.task_rows=0 --runs-dir {out}/runs"


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    name: str
    what: str
    command: str  # {out}: the folder; {minutes}: what is left; {manifest}: a published one


FIGURES = (
    Figure(
        name="speed",
        what="throughput and its prediction",
        command=f"benchmarks/training.py measure --cases {SPEED} --out {{out}}/training.jsonl --minutes {{minutes}}",
    ),
    Figure(
        name="attention",
        what="attention by itself, each backend",
        command="benchmarks/attention.py measure --out {out}/attention.jsonl --minutes {minutes}",
    ),
    Figure(
        name="limited",
        what="plans for 16, 24 and 32 GiB",
        command="benchmarks/limited.py measure --out {out}/limited.jsonl --minutes {minutes}",
    ),
    Figure(
        name="ladder",
        what="each optimisation, alone and together",
        command=f"-m launcher bench ladder {RANDOM} {ONE_STEP} --warm 1 --steps 3 --seconds 4 --out {{out}}/ladder",
    ),
    Figure(
        name="memory",
        what="memory against its prediction",
        command="-m launcher bench memory --out {out}/memory.jsonl --minutes {minutes}",
    ),
    Figure(
        name="before_after",
        what="a published manifest, as its trainer ran it and as the launcher does",
        command="benchmarks/before_after.py --manifest {manifest} --out {out}/before_after.json",
    ),
    Figure(name="trace", what="where a step's time goes", command=f"-m launcher train {RANDOM} {TRACED}"),
    Figure(
        name="observing",
        what="what looking at a run costs",
        command="benchmarks/observing.py --case 0.6B-lora-16 --steps 126 --out {out}/observing.jsonl",
    ),
    Figure(
        name="engines",
        what="the price of each engine",
        command="benchmarks/engines.py measure --cases lora full --out {out}/engines.jsonl",
    ),
)


def run_figure(figure: Figure, out: Path, manifest: Path | None, deadline: float) -> int:
    left = deadline - time.monotonic()
    words = figure.command.format(out=out, minutes=f"{max(0.5, left / 60 - 1):.1f}", manifest=manifest).split()
    environment = {**os.environ, "LAUNCHER_DATA_DIR": str(out / "data"), "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    print(f"{figure.name}: python {' '.join(words)}", flush=True)
    with (out / f"{figure.name}.log").open("ab") as log:
        try:
            return subprocess.run(
                [sys.executable, *words], cwd=ROOT, env=environment, stdout=log, stderr=log, timeout=left, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return TIME_IS_OVER


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("figures"))
    parser.add_argument("--minutes", type=float, default=1e4)
    parser.add_argument("--only", nargs="+", choices=[figure.name for figure in FIGURES], default=[])
    parser.add_argument("--manifest", type=Path, help="a published one, for before_after; without it that is left out")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    if args.list:
        print("\n".join(f"{figure.name:<14}{figure.what}: python {figure.command}" for figure in FIGURES))
        return 0
    out, deadline, failed = args.out.resolve(), time.monotonic() + 60 * args.minutes, []
    out.mkdir(parents=True, exist_ok=True)
    for figure in FIGURES:
        done = out / f"{figure.name}.done"
        is_wanted = not args.only or figure.name in args.only
        if not is_wanted or done.exists() or ("{manifest}" in figure.command and args.manifest is None):
            continue
        if deadline - time.monotonic() < LEAST_SECONDS:
            return TIME_IS_OVER
        code = run_figure(figure, out, args.manifest, deadline)
        print(f"{figure.name}: exit code {code}", flush=True)
        if code == TIME_IS_OVER:
            return code
        if code:
            failed.append(figure.name)
        else:
            done.touch()
    print(f"failed: {', '.join(failed)}" if failed else "all are done")
    return 4 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
