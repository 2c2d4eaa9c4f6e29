"""Shared by the distributed tests: a base model, a few rows, a plan per case, `accelerate launch`."""

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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import pytest
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3MoeConfig

from launcher.core import metrics
from launcher.core.choices import Strategy
from launcher.core.metrics import StepMetrics, load_metrics
from launcher.core.processes import find_processes, send_signal
from launcher.core.run_paths import RunPaths
from launcher.launch.start import ACCELERATE
from launcher.launch.write_run import write_run
from launcher.render import Command, Rendezvous, render_command
from launcher.request.request import PlannedRun, Request, plan_request
from launcher.runs.record import Outcome, load_outcome
from launcher.train import train_planned
from launcher.training.checkpoint.resume import ResumeOptions
from launcher.training.runtime.run_record import RunRecorder
from tests.conftest import ROOT, find_parent, python_path
from tests.training.builders import make_config, reset_accelerate, vary, write_base

PLACEMENT_RECORDING_SCRIPT = str(ROOT / "tests/distributed/placement_recording_train.py")
NUM_STEPS = 3
NUM_HELD_OUT = 4
LIMIT_SECONDS = 300.0
_MARK = "LAUNCHER_TEST_MARK"

# ZeRO-3 does not shard parameters of less than 100,000 elements: embeddings and feed-forward weights have more.
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
    "max_grad_norm": 0.5,  # less than the gradient norms, so that clipping has an effect
    "evaluation_strategy": "steps",
    "eval_steps": NUM_STEPS,
    "save_strategy": "steps",
    "save_steps": NUM_STEPS,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingCase:
    """One configuration (strategy, ranks, adapter) of the same training."""

    strategy: Strategy
    adapter: str = "lora"
    ranks_per_node: int = 2
    nodes: int = 1
    changes: Mapping[str, Any] = field(default_factory=dict)  # of the plan, dotted
    config: Mapping[str, Any] = field(default_factory=dict)  # of the manifest's training.config
    num_rows: int = 13  # 8 packs of 256 tokens
    task_rows: int = 0  # rows of the task metrics at each evaluation
    global_batch: int = 5  # not divisible by two ranks
    micro_batch: int = 1
    base: str = "base"  # or "mixture", of experts

    @property
    def name(self) -> str:
        where = f"{self.nodes}x{self.ranks_per_node}" if self.nodes > 1 else str(self.ranks_per_node)
        return f"{self.strategy}-{where}-{self.adapter}" + ("" if self.base == "base" else f"-{self.base}")

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def single_process(self) -> TrainingCase:
        """The same training in one process, without the settings of distributed training."""
        kept = {name: value for name, value in self.changes.items() if name not in ("offload", "defer_gradient_sync")}
        return replace(self, strategy="single", ranks_per_node=1, nodes=1, changes=kept)

    @property
    def slots(self) -> dict[str, int]:
        """Plan changes for the number of micro-batches that the global batch needs."""
        at_once = self.micro_batch * self.num_ranks
        steps = -(-self.global_batch // at_once)
        return {
            "batch.micro_batch_size": self.micro_batch,
            "batch.gradient_accumulation_steps": steps,
            "batch.empty_slots": steps * at_once - self.global_batch,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessResult:
    returncode: int
    console: str
    seconds: float


@dataclass(frozen=True, slots=True)
class TrainedRun:
    """Reader of a run directory."""

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
        """Files of the run directory, without those that depend on the launch."""
        own = {"accelerate.yaml", "command.txt", "deepspeed.json", "slurm.sbatch"}
        found = (file.relative_to(self.paths.root) for file in self.paths.root.rglob("*") if file.is_file())
        return sorted(str(file) for file in found if file.parts[0] not in ("logs", ".lock") and str(file) not in own)

    def placement(self, rank: int) -> dict[str, int]:
        placement: dict[str, int] = json.loads((self.paths.logs / f"placement-{rank}.json").read_text())
        return placement


@dataclass(frozen=True, kw_only=True, slots=True)
class Harness:
    """A project in a temporary folder: base model, rows, manifests, runs."""

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

    def manifest(self, case: TrainingCase) -> Path:
        adapter, rows = case.adapter, f"rows-{case.num_rows}.jsonl"
        copy_lines("train.jsonl", self.folder / rows, case.num_rows)
        tree = json.loads((ROOT / "experts/neo4j/manifest.json").read_text())
        tree["evaluation"] = {"task_rows": case.task_rows, "judge": "json"}
        training = tree["training"]
        training["config"] |= {**_CONFIG, "batch_size": case.global_batch, **case.config, "adapter_type": adapter}
        training["dataset"] |= {"path": rows, "validation_path": "held_out.jsonl", "format": "jsonl"}
        training["dataset"].pop("splits")
        if adapter == "full":
            for name in ("rank", "alpha", "dropout", "target_modules"):
                training["config"].pop(name)
            tree["base_models"][0].pop("adapters")
        else:
            tree["base_models"][0]["adapters"][0] |= {"type": adapter, "r": 4, "alpha": 8}
        tree["base_models"][0]["name"] = str(self.folder / case.base)
        file = self.folder / f"manifest-{uuid.uuid4().hex[:8]}.json"
        file.write_text(json.dumps(tree))
        return file

    def plan(self, case: TrainingCase) -> PlannedRun:
        single_process = case.strategy == "single"
        request = Request(
            expert=str(self.manifest(case)),
            profile="full",
            strategy=None if single_process else case.strategy,
            cpu_ranks_per_node=None if single_process else case.ranks_per_node,
            nodes=case.nodes,
        )
        planned = plan_request(request)
        return replace(planned, plan=vary(planned.plan, {**case.slots, **case.changes}))

    def write(self, case: TrainingCase, run_id: str | None = None) -> tuple[PlannedRun, RunPaths]:
        planned = self.plan(case)
        return planned, write_run(planned, self.runs, run_id or f"{case.name}-{uuid.uuid4().hex[:6]}")

    def train(self, case: TrainingCase) -> tuple[ProcessResult, TrainedRun]:
        """Train with accelerate and the rendered files."""
        planned, paths = self.write(case)
        return self.launch(make_command(planned, paths)), TrainedRun(paths)

    def train_in_process(self, case: TrainingCase) -> TrainedRun:
        """Train the reference in this process: the same code without the start-up time."""
        planned, paths = self.write(case)
        reset_accelerate()
        with _restore_signal_handlers():
            code = train_planned(planned.plan, paths, RunRecorder(paths, is_main=True), ResumeOptions())
        reset_accelerate()
        assert code == 0
        return TrainedRun(paths)

    def launch(self, command: Command, **more: str) -> ProcessResult:
        with self.started(command, **more) as child:
            return child.wait(LIMIT_SECONDS)

    def launch_nodes(
        self, planned: PlannedRun, paths: RunPaths, backend: Literal["static", "c10d"] = "static", **options: str
    ) -> ProcessResult:
        """Start one agent per node on the loopback interface; return the worst exit code and all output."""
        port, children = get_free_port(), []
        with ExitStack() as stack:
            for node in range(planned.plan.hardware.nodes):
                is_host = None if backend == "static" else node == 0
                rendezvous = Rendezvous(host="127.0.0.1", port=port, backend=backend, is_host=is_host)
                command = make_command(planned, paths, rendezvous=rendezvous, machine_rank=node, **options)
                children.append(stack.enter_context(self.started(command)))
            ended = [child.wait(LIMIT_SECONDS) for child in children]
        return ProcessResult(
            returncode=max((one.returncode for one in ended), key=abs),
            console="\n".join(one.console for one in ended),
            seconds=max(one.seconds for one in ended),
        )

    @contextmanager
    def started(self, command: Command, **more: str) -> Iterator[Child]:
        child = Child(command, {**self.environment, **command.environment, "OMP_NUM_THREADS": "1", **more}, self.folder)
        try:
            yield child
        finally:
            child.clear()


class Child:
    """accelerate and all processes it starts, found by a mark in their environment."""

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

    def wait(self, seconds: float) -> ProcessResult:
        try:
            code = self.process.wait(max(0.1, seconds - (time.monotonic() - self._began)))
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {seconds:.0f} s:\n{self.console[-3000:]}")
        return ProcessResult(returncode=code, console=self.console, seconds=time.monotonic() - self._began)

    def wait_until(self, condition: Callable[[], bool], seconds: float = LIMIT_SECONDS) -> float:
        """Wait for a condition; return the seconds it took."""
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > seconds:
                pytest.fail(f"did not happen within {seconds:.0f} s:\n{self.console[-3000:]}")
            time.sleep(0.1)
        return time.monotonic() - began

    def clear(self) -> None:
        send_signal(self.pids(), signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(10)


def make_command(
    planned: PlannedRun,
    paths: RunPaths,
    *,
    rendezvous: Rendezvous | None = None,
    machine_rank: int = 0,
    script: str = PLACEMENT_RECORDING_SCRIPT,
) -> Command:
    return render_command(
        planned.plan,
        paths,
        rendezvous=rendezvous,
        machine_rank=machine_rank,
        script=script,
        accelerate=ACCELERATE,
    )


def make_harness(folder: Path) -> Harness:
    harness = Harness(folder=folder)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 192}
    mixture = Qwen3MoeConfig(**{**make_config(**_SIZES).to_dict(), "model_type": "qwen3_moe", **experts})
    for base, config in ((harness.base, make_config(**_SIZES)), (folder / "mixture", mixture)):
        write_base(base, config)
        for file in (ROOT / "launcher/base_models/tiny_base").glob("tokenizer*"):
            shutil.copyfile(file, base / file.name)
    copy_lines("validation.jsonl", folder / "held_out.jsonl", NUM_HELD_OUT)
    return harness


def copy_lines(name: str, target: Path, count: int) -> None:
    with (ROOT / "experts/neo4j/sample" / name).open() as lines:
        target.write_text("".join(islice(lines, count)))


def change_json(file: Path, changes: Mapping[str, Any]) -> None:
    tree = json.loads(file.read_text())
    for key, value in changes.items():
        parent, key = find_parent(tree, key)
        parent[key] = value
    file.write_text(json.dumps(tree))


@contextmanager
def _restore_signal_handlers() -> Iterator[None]:
    """Restore the signal handlers, which a training replaces for the lifetime of the process."""
    numbers: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def get_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
