"""Does an expert learn from its answers? Each is trained twice in the smoke profile, the second time with the answers
of its training rows shuffled; the held-out rows stay. What it learned shows in the difference of held-out losses.

    python benchmarks/shuffled.py [EXPERT ...]     # two to four minutes an expert on two cores
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from launcher.metrics import EVAL_LOSS, load_metrics
from launcher.paths import RunPaths

ROOT = Path(__file__).resolve().parent.parent
EXPERTS = ("json", "neo4j", "sql", "typescript")


def shuffle_answers(expert: str, folder: Path) -> Path:
    """A copy of the expert whose training rows have other rows' answers."""
    copy = folder / expert
    shutil.copytree(ROOT / "experts" / expert, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    field = manifest["training"]["dataset"]["field_mapping"]["response"]
    file = copy / "sample" / "train.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    answers = [row[field] for row in rows]
    random.Random(0).shuffle(answers)
    changed = ({**row, field: answer} for row, answer in zip(rows, answers, strict=True))
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in changed))
    return copy / "manifest.json"


def train(manifest: Path, folder: Path, run_id: str) -> float:
    """The last held-out loss."""
    command = [sys.executable, "-m", "launcher", "train", str(manifest), "--profile", "smoke"]
    environment = {**os.environ, "LAUNCHER_DATA_DIR": str(folder / f"data-{run_id}")}
    where = ["--runs-dir", str(folder / "runs"), "--run-id", run_id]
    subprocess.run([*command, *where], cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    losses = [row.get(EVAL_LOSS) for row in load_metrics(RunPaths(folder / "runs" / run_id).metrics)]
    return [loss for loss in losses if loss is not None][-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experts", nargs="*", default=EXPERTS)
    for expert in parser.parse_args().experts:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            true = train(ROOT / "experts" / expert / "manifest.json", folder, "true")
            shuffled = train(shuffle_answers(expert, folder), folder, "shuffled")
        print(f"{expert}: held-out loss {true:.4f}, with shuffled answers {shuffled:.4f}", flush=True)


if __name__ == "__main__":
    main()
