"""Quality, time, memory and energy of real trainings, compared with TRL and Unsloth on a pretrained base.

For every data set some rows are kept for testing. `launcher new` makes an expert of the others, `launcher train` trains
it, and TRL and Unsloth train the same rows as often, with the same tokens, loss mask, LoRA settings and learning rates.
We pack documents; the others get as many rows per step as an average step of ours has, rounded. Held-out loss is
computed by plain transformers and PEFT for all adapters on the base in FP32; answers to the test rows are judged by
`launcher eval` on the base in BF16, also for adapters that were trained on a base in FP8. Those of QLoRA are used with
the base in NF4.

    python -m benchmarks.peers.quality run --base FOLDER --data FOLDER --out quality.jsonl --tools launcher trl --jobs 9
    python -m benchmarks.peers.quality table quality.jsonl

FOLDER of --data has text2cypher.jsonl, wikisql.jsonl and json_instructions.jsonl; rows of the expert typescript are
generated. A row of the result has the seconds from command to saved adapter and those of the training alone, torch's
peak of allocated memory, and the GPU's energy; time and energy compare only if nothing else runs (--one-at-a-time).
Tools that are not installed are skipped. The same command continues an interrupted one: what has a row in the output
is skipped, also if it is of another machine; adapters that exist are not trained again.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.util
import json
import math
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.child_environment import make_environment
from benchmarks.peers.quality_table import print_rows
from experts.generator.splits import make_splits, render_rows
from launcher.core import metrics
from launcher.core.metrics import load_metrics
from launcher.core.run_paths import RunPaths
from launcher.core.units import bytes_to_gib
from launcher.corpus.store import Store, find_stores
from launcher.hardware.probe import NvmlError, call_nvml
from launcher.judges.results import load_result
from launcher.plan import load_plan

DATA_SETS = {"cypher": "text2cypher", "sql": "wikisql", "json": "json_instructions"}
EXPERTS = (*DATA_SETS, "typescript")
TYPESCRIPT_ROWS = 4000
LOSS_BATCH_TOKENS = 4096  # with padding
LAUNCHER_OPTIONS: dict[str, tuple[str, ...]] = {
    "launcher": (),
    "launcher-fp8": ("--precision", "fp8"),
    "launcher-qlora": ("--set", "base_models.0.quantization=int4"),
}
PEERS = ("trl", "unsloth")
# cuDNN's attention of torch 2.11 has NaN gradients for some padded lengths on Hopper GPUs (pytorch issue 196678).
PEER_ENVIRONMENT = {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}
TOOLS = ("base", *LAUNCHER_OPTIONS, *PEERS)  # base: only judged


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="train and judge")
    run.add_argument("--base", type=Path, required=True, help="folder of a pretrained base")
    run.add_argument("--data", type=Path, required=True)
    run.add_argument("--work", type=Path, default=Path("quality_runs"))
    run.add_argument("--out", type=Path, required=True)
    run.add_argument("--experts", nargs="+", choices=EXPERTS, default=list(DATA_SETS))
    run.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    run.add_argument("--rows", type=int, default=None, help="use only the first rows of each data set")
    run.add_argument("--test-rows", type=int, default=200)
    run.add_argument("--tools", nargs="+", choices=TOOLS, default=["base", "launcher", "trl"])
    run.add_argument("--epochs", type=float, default=None, help="instead of what `launcher new` chooses")
    run.add_argument("--jobs", type=int, default=1, help="trainings by the launcher at the same time")
    run.add_argument("--peer-jobs", type=int, default=1, help="trainings by TRL or Unsloth at the same time")
    run.add_argument("--judge-jobs", type=int, help="evaluations at the same time; default: as many as --jobs")
    run.add_argument("--eval-batch-size", type=int, help="answers at a time; default: by free memory")
    run.add_argument("--peer-tokens", type=int, help="TRL's and Unsloth's tokens per micro-step, with padding")
    run.add_argument("--vram-limit", help="of a training by the launcher, so that several fit; the same global batch")
    run.add_argument("--max-steps", type=int, default=None, help="train only some steps, to try the command")
    run.add_argument("--one-at-a-time", action="store_true", help="one command at a time, so that durations compare")
    run.add_argument("--train-only", action="store_true", help="judge later, by the same command without this option")
    loss = commands.add_parser("loss", help="compute the held-out loss of a base or an adapter")
    loss.add_argument("base", type=Path)
    loss.add_argument("store", type=Path)
    loss.add_argument("adapter", nargs="?", type=Path)
    loss.add_argument("--nf4", action="store_true", help="quantize the base, as QLoRA does")
    table = commands.add_parser("table", help="summarize the rows of a file")
    table.add_argument("rows", type=Path)
    return parser


def main() -> None:
    args = make_parser().parse_args()
    {"run": measure, "loss": print_loss, "table": print_table}[args.command](args)


def measure(args: argparse.Namespace) -> None:
    """Train and judge everything, and append one row per adapter to the output."""
    args.base, args.work = args.base.resolve(), args.work.resolve()
    comparison = Comparison(args)
    with ThreadPoolExecutor(len(args.experts)) as pool:
        list(pool.map(comparison.make_expert, args.experts))
    jobs = [(expert, seed) for seed in args.seeds for expert in args.experts]
    with ThreadPoolExecutor(1 if args.one_at_a_time else len(jobs)) as pool:
        list(pool.map(lambda job: comparison.compare(*job), jobs))


class Cost:
    """What a training costs: seconds of the command, and energy of the first GPU if it reports it."""

    def __enter__(self) -> Cost:
        self._began, self._energy = time.monotonic(), read_kilojoules()
        return self

    def __exit__(self, *_: object) -> None:
        self.values = {"seconds": time.monotonic() - self._began}
        if self._energy is not None:
            self.values["kilojoules"] = (read_kilojoules() or 0.0) - self._energy

    def write(self, adapter: Path, *, ran_alone: bool) -> None:
        """Keep the values next to an adapter, for a command that continues this one."""
        rounded = {name: round(value, 2) for name, value in self.values.items()}
        cost = json.dumps({**rounded, "ran_alone": ran_alone})
        adapter.with_suffix(".cost.json").write_text(cost, encoding="utf-8")


class Comparison:
    """Trainings and evaluations that run side by side; what exists already is not repeated."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._lock = threading.Lock()
        lines = args.out.read_text(encoding="utf-8").splitlines() if args.out.exists() else []
        self._recorded = {make_key(json.loads(line)) for line in lines}
        self._slots, self._peer_slots = threading.Semaphore(args.jobs), threading.Semaphore(args.peer_jobs)
        self._judge_slots = threading.Semaphore(args.judge_jobs or args.jobs)
        if args.one_at_a_time:
            self._slots = self._peer_slots = self._judge_slots = threading.Semaphore(1)

    def make_expert(self, expert: str) -> None:
        """Make an expert unless it exists."""
        if not (self._args.work / expert / expert / "manifest.json").exists():
            make_expert(self._args, expert)

    def compare(self, expert: str, seed: int) -> None:
        """Train with each tool and judge the answers of its adapter; the base is judged with the first seed."""
        seeds = {tool: None if tool == "base" else seed for tool in self._args.tools}
        if seed != self._args.seeds[0]:
            seeds.pop("base", None)
        tasks = [pair for pair in seeds.items() if make_key(self._make_row(expert, *pair)) not in self._recorded]
        with ThreadPoolExecutor(max(1, len(tasks))) as pool:
            list(pool.map(lambda pair: self._train_and_judge(expert, *pair), tasks))

    def _make_row(self, expert: str, tool: str, seed: int | None) -> dict[str, Any]:
        manifest = json.loads((self._args.work / expert / expert / "manifest.json").read_text(encoding="utf-8"))
        epochs = None if tool == "base" else manifest["training"]["config"]["epochs"]
        return {"expert": expert, "tool": tool, "seed": seed, "base": self._args.base.name, "epochs": epochs}

    def _train_and_judge(self, expert: str, tool: str, seed: int | None) -> None:
        if seed is None:
            pass  # the base
        elif tool in LAUNCHER_OPTIONS:
            self._train_launcher(expert, tool, seed)
        elif importlib.util.find_spec(tool) is None:
            print(f"{tool} is not installed: skipped", flush=True)
            return
        else:
            self._train_peer(expert, tool, seed)
        if not self._args.train_only:
            self._judge(expert, tool, seed)

    def _train_launcher(self, expert: str, tool: str, seed: int) -> None:
        adapter = self._find_adapter(expert, tool, seed)
        if adapter.exists():
            return
        paths = RunPaths(adapter.parent)
        shutil.rmtree(paths.root, ignore_errors=True)  # of an interrupted command
        with self._slots, Cost() as cost:
            run_launcher(
                self._args.work / expert,
                *("train", expert, *self._make_options(seed), *LAUNCHER_OPTIONS[tool]),
                *("--run-id", paths.root.name, "--wandb", "disabled"),
                *(("--vram-limit", self._args.vram_limit) if self._args.vram_limit else ()),
            )
        steps = load_metrics(paths.metrics)
        cost.values |= {
            "train_seconds": sum(step.get(metrics.STEP_SECONDS) or 0.0 for step in steps),
            "peak_gib": max((step.get(metrics.PEAK_ALLOCATED_GIB) or 0.0 for step in steps), default=0.0),
            "predicted_gib": bytes_to_gib(load_plan(paths.plan).memory.allocated_bytes),
        }
        cost.write(adapter, ran_alone=self._args.one_at_a_time)

    def _train_peer(self, expert: str, tool: str, seed: int) -> None:
        """Train by the settings of the plan that the launcher would follow."""
        folder, adapter = self._args.work / expert, self._find_adapter(expert, tool, seed)
        if (adapter / "adapter_config.json").exists():
            return
        plan = folder / f"{tool}-{seed}.plan.json"
        plan.write_text(run_launcher(folder, "plan", expert, "--json", *self._make_options(seed)), encoding="utf-8")
        tokens = () if self._args.peer_tokens is None else ("--tokens", str(self._args.peer_tokens))
        command = ("-m", "benchmarks.peers.peer_training", tool, plan, prepare(self._args, expert).folder, adapter)
        with self._peer_slots, Cost() as cost:
            output = run_python(folder, *command, *tokens, **PEER_ENVIRONMENT)
        cost.values |= json.loads(output.splitlines()[-1])
        cost.write(adapter, ran_alone=self._args.one_at_a_time)

    def _make_options(self, seed: int) -> tuple[str, ...]:
        options = "--profile", "full", "--set", f"training.config.seed={seed}"
        return options if self._args.max_steps is None else (*options, "--max-steps", str(self._args.max_steps))

    def _judge(self, expert: str, tool: str, seed: int | None) -> None:
        folder, evaluation = self._args.work / expert, self._args.work / expert / f"{tool}-{seed}.json"
        adapter = None if seed is None else self._find_adapter(expert, tool, seed)
        is_nf4 = tool == "launcher-qlora"
        command: list[str | Path] = ["-m", "benchmarks.peers.quality", "loss", self._args.base]
        command += [prepare(self._args, expert).folder, *([] if adapter is None else [adapter])]
        with self._judge_slots:
            loss = float(run_python(folder, *command, *(["--nf4"] if is_nf4 else [])).splitlines()[-1])
            if not math.isfinite(loss):
                print(f"{expert}, {tool}, seed {seed}: the held-out loss is {loss}; not recorded", flush=True)
                return
            if not evaluation.exists():
                options: list[str | Path] = ["--profile", "full", "--base"]
                if adapter is not None:
                    options = ["--run", adapter.parent] if is_nf4 else ["--profile", "full", "--adapter", adapter]
                if self._args.eval_batch_size is not None:
                    options += ["--batch-size", str(self._args.eval_batch_size)]
                run_launcher(folder, "eval", expert, *options, "-o", evaluation)
        self._record(expert, tool, seed, loss, evaluation, {} if adapter is None else load_cost(adapter))

    def _find_adapter(self, expert: str, tool: str, seed: int) -> Path:
        folder = self._args.work / expert
        if tool in PEERS:
            return folder / f"{tool}-{seed}"
        return RunPaths(folder / "runs" / f"{expert}-{seed}{tool.removeprefix('launcher')}").adapter

    def _record(
        self, expert: str, tool: str, seed: int | None, loss: float, evaluation: Path, cost: dict[str, Any]
    ) -> None:
        result = load_result(evaluation)
        row = {
            **self._make_row(expert, tool, seed),
            "held_out_loss": loss,
            "main_check": result.main_check,
            "checks": {check.name: [check.num_passed, check.num_judged] for check in result.checks},
            **cost,
            "date": datetime.date.today().isoformat(),
        }
        with self._lock, self._args.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)


def make_key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("base", "expert", "tool", "seed", "epochs"))


def make_expert(args: argparse.Namespace, expert: str) -> None:
    """Keep rows for testing and let `launcher new` make an expert of the others."""
    folder = args.work / expert
    folder.mkdir(parents=True, exist_ok=True)
    rows, test = split_rows(args, expert)
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    (folder / "test.jsonl").write_text("\n".join(test) + "\n", encoding="utf-8")
    run_launcher(folder, "new", expert, "--force", "--data", folder / "rows.jsonl", "--base", args.base)
    path = folder / expert / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    manifest["training"]["dataset"]["test_path"] = str(folder / "test.jsonl")
    manifest["training"]["config"] |= {"load_best_model_at_end": False, "save_strategy": "no"}
    if args.epochs is not None:
        manifest["training"]["config"]["epochs"] = args.epochs
    path.write_text(json.dumps(manifest, indent=2), encoding="utf-8")
    prepare(args, expert)


def split_rows(args: argparse.Namespace, expert: str) -> tuple[list[str], list[str]]:
    """Return rows to train and rows to test. TypeScript is generated; a third of its test rows has unseen domains."""
    if expert == "typescript":
        splits = make_splits(expert, args.rows or TYPESCRIPT_ROWS)
        rows = render_rows([*splits["train"], *splits["validation"]]).splitlines()
        return rows, render_rows(splits["test"][: args.test_rows]).splitlines()
    lines = (args.data / f"{DATA_SETS[expert]}.jsonl").read_text(encoding="utf-8").splitlines()[: args.rows]
    order = sorted(dict.fromkeys(lines), key=lambda line: hashlib.sha256(line.encode()).digest())
    return order[args.test_rows :], order[: args.test_rows]


def prepare(args: argparse.Namespace, expert: str) -> Store:
    """Return the tokens that the launcher trains."""
    folder = args.work / expert
    if not find_stores(folder / "data" / "datasets_optimized" / expert):
        run_launcher(folder, "prepare", expert, "--profile", "full")
    (store,) = find_stores(folder / "data" / "datasets_optimized" / expert)
    return store


def load_cost(adapter: Path) -> dict[str, Any]:
    """Return what a training cost; empty if it was interrupted after the adapter was saved."""
    path = adapter.with_suffix(".cost.json")
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def read_kilojoules() -> float | None:
    """Return the energy that the first GPU has used since its driver was loaded, or None without such a counter."""
    try:
        return (
            call_nvml(lambda nvml: nvml.nvmlDeviceGetTotalEnergyConsumption(nvml.nvmlDeviceGetHandleByIndex(0))) / 1e6
        )
    except NvmlError:
        return None


def run_launcher(folder: Path, *words: str | Path) -> str:
    return run_python(folder, "-m", "launcher", *words)


def run_python(folder: Path, *words: str | Path, **variables: str) -> str:
    """Run a Python command in a folder and return its output; end this program if it fails."""
    environment = make_environment(LAUNCHER_DATA_DIR=str(folder / "data"), **variables)
    completed = subprocess.run(
        [sys.executable, *map(str, words)], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if completed.returncode != 0:
        print(f"{' '.join(map(str, words))}: exit code {completed.returncode}\n{completed.stderr[-3000:]}", flush=True)
        raise SystemExit(1)
    return completed.stdout


def iterate_documents(store: Store, split: str) -> Iterator[dict[str, list[int]]]:
    """Yield the tokens and the loss mask of every document, as TRL expects them."""
    for pack in store.open_split(split):
        begin = 0
        for length in pack.document_lengths.tolist():
            part = slice(begin, begin + length)
            yield {"input_ids": pack.input_ids[part].tolist(), "completion_mask": pack.trained[part].tolist()}
            begin += length


def open_store(folder: Path) -> Store:
    return next(store for store in find_stores(folder.parent) if store.folder == folder)


def print_loss(args: argparse.Namespace) -> None:
    """Print the held-out loss of the base or of an adapter, by plain transformers and PEFT in FP32."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    model: Any = AutoModelForCausalLM.from_pretrained(
        args.base, dtype=torch.float32, device_map=device, quantization_config=nf4 if args.nf4 else None
    )
    if args.adapter is not None:
        model = PeftModel.from_pretrained(model, str(args.adapter))
    model.eval()
    total = count = 0.0
    with torch.no_grad():
        for batch in make_batches(list(iterate_documents(open_store(args.store), "validation"))):
            longest = len(batch[-1]["input_ids"])  # causal attention: no token sees the padding on its right
            ids, trained = (
                torch.tensor([row[name] + [0] * (longest - len(row[name])) for row in batch], device=device)
                for name in ("input_ids", "completion_mask")
            )
            targets = trained[:, 1:].bool()
            logits = model(input_ids=ids).logits[:, :-1][targets].float()
            total += float(torch.nn.functional.cross_entropy(logits, ids[:, 1:][targets], reduction="sum"))
            count += int(targets.sum())
    print(total / count)


def make_batches(documents: list[dict[str, list[int]]]) -> list[list[dict[str, list[int]]]]:
    """Batch documents of similar lengths, shortest first."""
    batches: list[list[dict[str, list[int]]]] = [[]]
    for document in sorted(documents, key=lambda document: len(document["input_ids"])):
        if (len(batches[-1]) + 1) * len(document["input_ids"]) > LOSS_BATCH_TOKENS and batches[-1]:
            batches.append([])
        batches[-1].append(document)
    return batches


def print_table(args: argparse.Namespace) -> None:
    """Print mean and standard deviation over the seeds, as Markdown."""
    rows = [json.loads(line) for line in args.rows.read_text(encoding="utf-8").splitlines()]
    print_rows(rows, TOOLS)


if __name__ == "__main__":
    main()
