"""What the distributed tests share: a base with weights, a few rows, a plan per cell, `accelerate launch`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from launcher import metrics
from launcher.choices import Strategy
from launcher.inputs import PlannedRun, Request, plan_request
from launcher.launch import ACCELERATE, write_run
from launcher.metrics import StepMetrics, load_metrics
from launcher.paths import RunPaths
from launcher.processes import find_processes, send_signal
from launcher.record import Outcome, load_outcome
from launcher.render import Command, Rendezvous, render_command
from launcher.train import train_planned
from launcher.training.chronicle import Chronicle
from launcher.training.resuming import ResumeOptions
from tests.conftest import ROOT, find_parent, python_path
from tests.training.builders import make_config, reset_accelerate, vary, write_base

WATCHED = str(ROOT / "tests/distributed/watched_train.py")
NUM_STEPS = 3
NUM_HELD_OUT = 4
LIMIT_SECONDS = 300.0
_MARK = "LAUNCHER_TEST_MARK"

# ZeRO-3 leaves parameters of less than 100,000 elements whole: embeddings and feed-forward weights have more.
_SIZES = {"vocab_size": 4096, "hidden_size": 192, "intermediate_size": 768, "num_attention_heads": 4}

_CONFIG: dict[str, Any] = {
    "max_seq_length": 256,
    "gradient_accumulation_steps": 1,
    "max_steps": NUM_STEPS,
    "rank": 4,
    "alpha": 8,
    "learning_rate": 2e-3,
    "warmup_ratio": 0.0,
    "weight_decay": 0.01,
    "max_grad_norm": 0.5,  # less than the gradients are: clipping counts
    "evaluation_strategy": "steps",
    "eval_steps": NUM_STEPS,
    "save_strategy": "steps",
    "save_steps": NUM_STEPS,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One way to run the same training."""

    strategy: Strategy
    adapter: str = "lora"
    ranks_per_node: int = 2
    nodes: int = 1
    changes: Mapping[str, Any] = field(default_factory=dict)  # of the plan, dotted
    config: Mapping[str, Any] = field(default_factory=dict)  # of the manifest's training.config
    num_rows: int = 13  # 8 packs of 256 tokens
    task_rows: int = 0  # answered and judged at each evaluation
    global_batch: int = 5  # two ranks do not divide it
    micro_batch: int = 1

    @property
    def name(self) -> str:
        where = f"{self.nodes}x{self.ranks_per_node}" if self.nodes > 1 else str(self.ranks_per_node)
        return f"{self.strategy}-{where}-{self.adapter}"

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def alone(self) -> Cell:
        """The same training in one process: only what belongs to ranks is left out."""
        kept = {name: value for name, value in self.changes.items() if name not in ("offload", "adds_up_behind")}
        return replace(self, strategy="single", ranks_per_node=1, nodes=1, changes=kept)

    @property
    def slots(self) -> dict[str, int]:
        """As many micro-batches as it takes."""
        at_once = self.micro_batch * self.num_ranks
        steps = -(-self.global_batch // at_once)
        return {
            "batch.micro_batch_size": self.micro_batch,
            "batch.gradient_accumulation_steps": steps,
            "batch.empty_slots": steps * at_once - self.global_batch,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    returncode: int
    console: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Trained:
    """A run's directory, read."""

    paths: RunPaths

    @property
    def steps(self) -> list[StepMetrics]:
        return [row for row in load_metrics(self.paths.metrics) if metrics.TRAIN_LOSS in row.values]

    @property
    def packs(self) -> list[tuple[int, ...]]:
        return [row.packs for row in self.steps]

    def values(self, name: str) -> list[float]:
        return [row.values[name] for row in load_metrics(self.paths.metrics) if name in row.values]

    @property
    def outcome(self) -> Outcome:
        outcome = load_outcome(self.paths.outcome)
        assert outcome is not None
        return outcome

    @property
    def weights(self) -> dict[str, Tensor]:
        (file,) = self.paths.adapter.glob("*.safetensors")
        return load_file(file)

    @property
    def files(self) -> list[str]:
        """But for those that tell how it was started, and by whom."""
        own = {"accelerate.yaml", "command.txt", "deepspeed.json", "slurm.sbatch"}
        found = (file.relative_to(self.paths.root) for file in self.paths.root.rglob("*") if file.is_file())
        return sorted(str(file) for file in found if file.parts[0] not in ("logs", ".lock") and str(file) not in own)

    def placement(self, rank: int) -> dict[str, int]:
        placement: dict[str, int] = json.loads((self.paths.logs / f"placement-{rank}.json").read_text())
        return placement


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """A project in a scratch folder: base, rows, manifests, runs."""

    folder: Path

    @property
    def base(self) -> Path:
        return self.folder / "base"

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
        return {
            **inherited,
            "PYTHONPATH": python_path(),
            "PYTHONUNBUFFERED": "1",
            "LAUNCHER_DATA_DIR": str(self.data),
        }

    def manifest(self, cell: Cell) -> Path:
        adapter, rows = cell.adapter, f"rows-{cell.num_rows}.jsonl"
        copy_lines("train.jsonl", self.folder / rows, cell.num_rows)
        tree = json.loads((ROOT / "experts/neo4j/manifest.json").read_text())
        tree["evaluation"] = {"task_rows": cell.task_rows, "judge": "json"}
        training = tree["training"]
        training["config"] |= {**_CONFIG, "batch_size": cell.global_batch, **cell.config, "adapter_type": adapter}
        training["dataset"] |= {"path": rows, "validation_path": "held_out.jsonl", "format": "jsonl"}
        training["dataset"].pop("splits")
        if adapter == "full":
            for name in ("rank", "alpha", "dropout", "target_modules"):
                training["config"].pop(name)
            tree["base_models"][0].pop("adapters")
        else:
            tree["base_models"][0]["adapters"][0] |= {"type": adapter, "r": 4, "alpha": 8}
        tree["base_models"][0]["name"] = str(self.base)
        file = self.folder / f"manifest-{uuid.uuid4().hex[:8]}.json"
        file.write_text(json.dumps(tree))
        return file

    def plan(self, cell: Cell) -> PlannedRun:
        alone = cell.strategy == "single"
        request = Request(
            expert=str(self.manifest(cell)),
            profile="full",
            strategy=None if alone else cell.strategy,
            cpu_ranks_per_node=None if alone else cell.ranks_per_node,
            nodes=cell.nodes,
        )
        planned = plan_request(request)
        return replace(planned, plan=vary(planned.plan, {**cell.slots, **cell.changes}))

    def write(self, cell: Cell, run_id: str | None = None) -> tuple[PlannedRun, RunPaths]:
        planned = self.plan(cell)
        return planned, write_run(planned, self.runs, run_id or f"{cell.name}-{uuid.uuid4().hex[:6]}")

    def train(self, cell: Cell) -> tuple[Ended, Trained]:
        """By accelerate and the rendered files."""
        planned, paths = self.write(cell)
        return self.launch(make_command(planned, paths)), Trained(paths)

    def train_here(self, cell: Cell) -> Trained:
        """The reference, in this process: the same code, without the seconds of starting it."""
        planned, paths = self.write(cell)
        reset_accelerate()
        with _signals_kept():
            code = train_planned(planned.plan, paths, Chronicle(paths, is_main=True), ResumeOptions())
        reset_accelerate()
        assert code == 0
        return Trained(paths)

    def launch(self, command: Command, **more: str) -> Ended:
        with self.started(command, **more) as child:
            return child.wait(LIMIT_SECONDS)

    @contextmanager
    def started(self, command: Command, **more: str) -> Iterator[Child]:
        child = Child(command, {**self.environment, **command.environment, "OMP_NUM_THREADS": "1", **more}, self.folder)
        try:
            yield child
        finally:
            child.clear()


class Child:
    """accelerate and all that it starts, found by a mark in their environment."""

    def __init__(self, command: Command, environment: Mapping[str, str], folder: Path) -> None:
        mark = uuid.uuid4().hex
        self._mark = f"{_MARK}={mark}"
        self._console = folder / f"console-{mark}.txt"
        self._began = time.monotonic()
        with self._console.open("wb") as console:
            self.process = subprocess.Popen(
                command.argv,
                cwd=ROOT,
                env={**environment, _MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def console(self) -> str:
        return self._console.read_text(errors="replace")

    def pids(self) -> tuple[int, ...]:
        return find_processes(self._mark)

    def wait(self, seconds: float) -> Ended:
        try:
            code = self.process.wait(max(0.1, seconds - (time.monotonic() - self._began)))
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {seconds:.0f} s:\n{self.console[-3000:]}")
        return Ended(returncode=code, console=self.console, seconds=time.monotonic() - self._began)

    def wait_until(self, happened: Callable[[], bool], seconds: float = LIMIT_SECONDS) -> float:
        """How long it took."""
        began = time.monotonic()
        while not happened():
            if time.monotonic() - began > seconds:
                pytest.fail(f"did not happen within {seconds:.0f} s:\n{self.console[-3000:]}")
            time.sleep(0.1)
        return time.monotonic() - began

    def clear(self) -> None:
        send_signal(self.pids(), signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(10)


def make_command(
    planned: PlannedRun, paths: RunPaths, *, rendezvous: Rendezvous | None = None, machine_rank: int = 0
) -> Command:
    return render_command(
        planned.plan, paths, rendezvous=rendezvous, machine_rank=machine_rank, script=WATCHED, accelerate=ACCELERATE
    )


def write_bench(folder: Path) -> Bench:
    bench = Bench(folder=folder)
    write_base(bench.base, make_config(**_SIZES))
    for file in (ROOT / "launcher/tiny").glob("tokenizer*"):
        shutil.copyfile(file, bench.base / file.name)
    copy_lines("validation.jsonl", folder / "held_out.jsonl", NUM_HELD_OUT)
    return bench


def copy_lines(name: str, target: Path, count: int) -> None:
    with (ROOT / "experts/neo4j/sample" / name).open() as lines:
        target.write_text("".join(islice(lines, count)))


def change_json(file: Path, changes: Mapping[str, Any]) -> None:
    tree = json.loads(file.read_text())
    for place, value in changes.items():
        parent, key = find_parent(tree, place)
        parent[key] = value
    file.write_text(json.dumps(tree))


@contextmanager
def _signals_kept() -> Iterator[None]:
    """A training takes them over, for the process's life."""
    numbers: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def find_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
