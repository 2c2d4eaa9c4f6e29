"""Regression test of an expert: train it with conventional and with planned settings on the same rows, and compare.

Only execution settings differ. Everything that affects learning is the expert's own in both runs: adapter, learning
rate, schedule, seed, rows. The precision is also the same: nearly all published manifests use BF16, and without a GPU
there is only FP32. The exception is a base in FP8, which is compared with BF16.

The run with conventional settings is called old, the run with planned settings new. Some properties of a conventional
training loop have no manifest key: rows padded to the longest of a batch, micro-batches of two rows, full logits, a
host sync after every micro-step. The old run is therefore faster than such a loop, and the reported speedup is a lower
bound; benchmarks/before_after.py measures such a loop itself.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import FrameType

from launcher.bench.worker import ChildFailedError
from launcher.core import metrics
from launcher.core.errors import ExitCode, InputError, Problem
from launcher.core.metrics import find_values
from launcher.core.processes import make_child_environment
from launcher.core.run_paths import RunPaths
from launcher.core.worker import start_process
from launcher.corpus.audit import Audit
from launcher.judges.gate import GateVerdict, check_change
from launcher.judges.results import EvalResult, compare_results
from launcher.plan.model import Plan, SchedulePlan
from launcher.request.request import PlannedRun, Request, plan_request
from launcher.runs.record import RunRecord, load_outcome

_PREFIX = "training.config."
# Both are evaluated after training, on more rows than fit into a training. --set overrides this.
_NO_TASK_EVAL = ("evaluation.task_rows=0", f"{_PREFIX}metric_for_best_model=eval_loss")
_LENGTH_KEYS = frozenset(f"{_PREFIX}{key}" for key in ("epochs", "num_epochs", "max_steps"))
_REPLACED_KEYS = frozenset(f"{_PREFIX}{key}" for key in ("bf16", "fp16"))  # the old run has a precision
_MAX_ROW_DIFFERENCE = 0.05  # an incomplete last step and rounding make less
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@dataclass(frozen=True, kw_only=True, slots=True)
class _OldSetting:
    """A setting of the old configuration."""

    name: str
    key: str  # below training.config
    value: str
    describe: Callable[[Plan], str]  # the setting of a plan, as text
    reason: str


def _describe_rows(plan: Plan) -> str:
    batch = plan.batch
    if batch.packed:
        return f"packed, {batch.global_batch_size} sequences of {batch.sequence_length:,} tokens per step"
    return f"not packed, {batch.global_batch_size} per step"


_OLD_SETTINGS = (
    _OldSetting(
        name="rows",
        key="packing",
        value="false",
        describe=_describe_rows,
        reason="packed rows would attend to each other",
    ),
    _OldSetting(
        name="precision",
        key="precision",
        value="bf16",
        describe=lambda plan: plan.precision.name,
        reason="FP8 must be as good as BF16",
    ),
    _OldSetting(
        name="attention",
        key="attention",
        value="sdpa",
        describe=lambda plan: plan.attention.backend,
        reason="published manifests have use_sdpa: flash-attn had to be built",
    ),
    _OldSetting(
        name="torch.compile",
        key="torch_compile",
        value="false",
        describe=lambda plan: "off" if plan.compile is None else f"on, by {plan.compile.scope}",
        reason="published manifests disable it: every batch length was recompiled",
    ),
    _OldSetting(
        name="optimizer",
        key="optim",
        value="adamw_torch",
        describe=lambda plan: plan.optimizer.name,
        reason="PyTorch's default, which launches several kernels per step",
    ),
    _OldSetting(
        name="gradient checkpointing",
        key="gradient_checkpointing",
        value="true",
        describe=lambda plan: "off" if plan.checkpointing == "none" else plan.checkpointing,
        reason="without a memory estimate, it is always on to save memory",
    ),
    _OldSetting(
        name="loader workers",
        key="dataloader_num_workers",
        value="0",
        describe=lambda plan: f"{plan.loader.num_workers}",
        reason="published manifests have none: batches are built between steps",
    ),
    _OldSetting(
        name="pinned memory",
        key="dataloader_pin_memory",
        value="false",
        describe=lambda plan: "on" if plan.loader.pin_memory else "off",
        reason="published manifests do not pin memory",
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingChange:
    """One setting with its conventional (old) and its planned (new) value; equal if the hardware leaves no choice."""

    name: str
    override: str
    reason: str
    old: str
    new: str

    @property
    def has_effect(self) -> bool:
        """Whether the old and the new plan differ in this setting."""
        return self.old != self.new


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """An expert's training planned with conventional (old) and with planned (new) settings, and how these differ."""

    old: PlannedRun
    new: PlannedRun
    settings: tuple[SettingChange, ...]
    notes: tuple[str, ...]  # what limits the comparison


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Comparison of the runs with conventional (old) and planned (new) settings; in pairs, the old run comes first."""

    rows: tuple[float, float]  # trained
    speedup: float | None  # ratio of rows/s, which ignores padding
    gate: GateVerdict
    notes: tuple[str, ...]


def plan_pair(request: Request, prepare: Callable[[PlannedRun], Audit]) -> Pair:
    """Plan the old and the new training; `prepare` prepares the data, which shows how many rows are in a sequence."""
    without_task_eval = replace(request, overrides=(*_NO_TASK_EVAL, *request.overrides))
    complete = _use_complete_epochs(plan_request(without_task_eval))
    new = plan_request(complete)
    audit = prepare(new)
    if not any(audit.splits[name].num_documents for name in ("test", "validation") if name in audit.splits):
        raise InputError(
            f"{new.plan.expert} has no rows to evaluate on: neither a test nor a validation split",
            hint="set training.dataset.test_path to a file of such rows",
        )
    overrides = [f"{_PREFIX}{setting.key}={_choose_value(setting, new.plan)}" for setting in _OLD_SETTINGS]
    batch = (f"{_PREFIX}batch_size={match_rows(new.plan, audit)}", f"{_PREFIX}gradient_accumulation_steps=1")
    kept = (override for override in complete.overrides if override.partition("=")[0].strip() not in _REPLACED_KEYS)
    old = plan_request(replace(complete, overrides=(*kept, *overrides, *batch)))
    settings = tuple(
        SettingChange(
            name=setting.name,
            override=override,
            reason=setting.reason,
            old=setting.describe(old.plan),
            new=setting.describe(new.plan),
        )
        for setting, override in zip(_OLD_SETTINGS, overrides, strict=True)
    )
    return Pair(old=old, new=new, settings=settings, notes=tuple(list_caveats(new.plan.schedule)))


def _choose_value(setting: _OldSetting, new: Plan) -> str:
    """Return the value of a setting in the old run: the conventional one, with two exceptions.

    Attention is eager if SDPA is not supported. The precision is that of the new run, or BF16 if the new run uses
    FP8.
    """
    if setting.key == "precision" and not new.precision.uses_fp8:
        return new.precision.compute_dtype
    backends = (new.attention.backend, *new.attention.fallbacks)
    if setting.key == "attention" and "eager" in backends and "sdpa" not in backends:
        return "eager"
    return setting.value


def _use_complete_epochs(planned: PlannedRun) -> Request:
    """Return a request for one epoch instead of the smoke profile's 60 steps, so that both runs train the same rows.

    An epoch of the smoke sample has 58 to 78 of these steps: it takes about as long, and both runs train each row once.
    """
    is_smoke, has_length = planned.plan.profile == "smoke", bool(planned.loaded.overridden_keys & _LENGTH_KEYS)
    if not is_smoke or has_length:
        return planned.request
    config = planned.loaded.manifest.training.config
    settings = ["num_epochs=1" if config.num_epochs is not None else "epochs=1"]
    settings += ["max_steps=0"] if config.max_steps else []  # it would take precedence
    return replace(planned.request, overrides=(*planned.request.overrides, *(f"{_PREFIX}{each}" for each in settings)))


def match_rows(plan: Plan, audit: Audit) -> int:
    """Return the mean number of rows per step of this plan: sequences per global batch times rows per sequence."""
    train = audit.splits["train"]
    return max(1, round(plan.batch.global_batch_size * train.num_documents / max(1, train.num_packs)))


def list_caveats(schedule: SchedulePlan) -> Iterator[str]:
    """Yield a caveat if training ends within an epoch: the runs shuffle differently, so their rows would differ."""
    consequence = "within an epoch: both runs train the same number of rows, but different ones"
    if schedule.max_steps is not None:
        yield f"{schedule.max_steps:,} steps may end {consequence}"
    elif schedule.epochs % 1:
        yield f"{schedule.epochs:g} epochs end {consequence}"


def train(request: Request, paths: RunPaths) -> float:
    """Train a run and return the CPU seconds of its processes; raises ChildFailedError."""
    words = ["train", request.expert, "--json", f"--run-id={paths.run_id}", f"--runs-dir={paths.root.parent}"]
    words += [f"--profile={request.profile}", *(f"--set={override}" for override in request.overrides)]
    words += [] if request.base is None else [f"--base={request.base}"]
    words += [] if request.max_steps is None else [f"--max-steps={request.max_steps}"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = _run(words)
    if code != ExitCode.DONE:
        outcome = load_outcome(paths.outcome)
        error = [Problem(where="error", what=outcome.error)] if outcome is not None and outcome.error else []
        log = [Problem(where="log", what=str(paths.console_log))] if paths.console_log.is_file() else []
        raise ChildFailedError(f"training {paths.run_id} failed (exit code {code})", (*error, *log), code)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def evaluate(paths: RunPaths, flags: Sequence[str]) -> None:
    """Evaluate a run; the result is written to its directory. Raises ChildFailedError."""
    code = _run(["eval", f"--run={paths.root}", "--json", *flags])
    if code != ExitCode.DONE:
        raise ChildFailedError(
            f"evaluation of {paths.run_id} failed (exit code {code}); its error is printed above", (), code
        )


def _run(words: Sequence[str]) -> int:
    """Run a launcher subcommand with its log on our stderr, forward our signals to it, and return its exit code."""
    received: list[int] = []
    groups: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        for group in groups:
            with suppress(ProcessLookupError):
                os.killpg(group, number)

    sys.stdout.flush()
    # Signals that our parent ignores (nohup) stay ignored, here and in the child.
    caught = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    handlers = {number: signal.signal(number, forward) for number in caught}
    try:
        # -P: files in the working directory must not shadow packages of the same name.
        command = [sys.executable, "-P", "-m", "launcher", *words]
        process = start_process(command, environment=make_child_environment())
        groups.append(process.pid)
        for number in received:  # before the process had started
            os.killpg(process.pid, number)
        code = process.wait()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if received:
        name = signal.Signals(received[0]).name
        raise ChildFailedError(f"stopped by {name}: nothing was compared", (), ExitCode.PREEMPTED)
    return code if code >= 0 else 128 - code


def make_verdict(
    records: tuple[RunRecord, RunRecord], results: tuple[EvalResult, EvalResult], max_regression: float
) -> Verdict:
    """Compare an old and a new run; in every pair, the old run comes first."""
    change, warnings = compare_results(*results)
    old, new = (_count_rows(record) for record in records)
    notes = [
        f"{name}: {record.outcome.ended_because}"
        for name, record in zip(("old", "new"), records, strict=True)
        if record.outcome is not None and record.outcome.ended_because
    ]
    if old and new and abs(new / old - 1) > _MAX_ROW_DIFFERENCE:
        notes.append(f"the old run trained {old:,.0f} rows, the new one {new:,.0f}: their quality is not comparable")
    rates = [find_values(record.steps, metrics.SAMPLES_PER_SECOND) for record in records]
    return Verdict(
        rows=(old, new),
        speedup=statistics.median(rates[1]) / statistics.median(rates[0]) if all(rates) else None,
        gate=check_change(change, max_regression),
        notes=(*notes, *warnings),
    )


def _count_rows(record: RunRecord) -> float:
    """Return the number of rows that a run trained, from the samples/s and the duration of its steps."""
    pairs = ((row.get(metrics.SAMPLES_PER_SECOND), row.get(metrics.STEP_SECONDS)) for row in record.steps)
    counts = (rate * seconds for rate, seconds in pairs if rate is not None and seconds is not None)
    return float(sum(round(count) for count in counts if math.isfinite(count)))
