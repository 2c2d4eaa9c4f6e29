"""kill -9 during saves of a full fine-tuning: the resumed run has the weights of an uninterrupted one, bit for bit.

Trains twice with `launcher train`. The second run is killed in three saves, after different delays, and resumed.

    python benchmarks/kill_during_save.py --base FOLDER --data rows.jsonl --work FOLDER
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from child_environment import make_environment  # type: ignore[import-not-found]  # in this folder

from launcher.core.processes import find_processes, send_signal

DELAYS = (0.0, 0.25, 0.6)  # seconds after a save has begun
SETTINGS = {
    "adapter_type": "full",
    "save_strategy": "steps",
    "save_steps": 4,
    "save_total_limit": 2,
    "evaluation_strategy": "no",
    "load_best_model_at_end": "false",
}
MARK = "LAUNCHER_BENCHMARK_MARK"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, help="folder of a base model")
    parser.add_argument("--data", type=Path, required=True, help="rows, as for `launcher new`")
    parser.add_argument("--work", type=Path, required=True, help="new folder for the runs")
    parser.add_argument("--steps", type=int, default=16)
    args = parser.parse_args()
    args.work.mkdir(parents=True)
    data = args.data.resolve()
    os.chdir(args.work)
    os.environ |= make_environment(LAUNCHER_DATA_DIR=str(Path.cwd() / "data"), **{MARK: "1"})
    launcher = [sys.executable, "-m", "launcher"]
    subprocess.run([*launcher, "new", "killed", "--data", str(data), "--base", args.base], check=True)
    train = [*launcher, "train", "killed", "--profile", "full", "--wandb", "disabled", "--max-steps", str(args.steps)]
    for key, value in SETTINGS.items():
        train += ["--set", f"training.config.{key}={value}"]
    subprocess.run([*train, "--run-id", "whole"], check=True)
    for number, delay in enumerate(DELAYS):
        print(kill_in_save([*train, *(("--resume", "cut") if number else ("--run-id", "cut"))], delay), flush=True)
    subprocess.run([*train, "--resume", "cut"], check=True)
    whole, cut = (digest(Path("runs") / run / "adapter") for run in ("whole", "cut"))
    print(json.dumps({"whole": whole, "cut": cut, "equal": whole == cut, "kills": len(DELAYS)}))
    sys.exit(whole != cut)


def kill_in_save(command: list[str], delay: float) -> str:
    """Start a training, kill all its processes some time after its next save has begun, and return what was on disk."""
    folder = Path("runs/cut/checkpoints")
    before = {path.name for path in folder.glob("*")}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not any(path.name not in before for path in folder.glob("*")):
        if process.poll() is not None:
            sys.exit(f"the training ended with {process.returncode} before it saved")
        time.sleep(0.002)
    time.sleep(delay)
    send_signal(find_processes(f"{MARK}=1"), signal.SIGKILL)
    process.wait()
    left = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.parent.name not in before]
    found = [f"{path.relative_to(folder)}: {path.stat().st_size:,} bytes" for path in left]
    return f"killed {delay} s after the save began: {'; '.join(found) or 'no file'}"


def digest(folder: Path) -> str:
    """Return the SHA-256 of all weights in a folder."""
    joined = b"".join(path.read_bytes() for path in sorted(folder.glob("*.safetensors")))
    return hashlib.sha256(joined).hexdigest()


if __name__ == "__main__":
    main()
