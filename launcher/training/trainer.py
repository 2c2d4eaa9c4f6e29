"""Run one training, from a plan and prepared data to saved weights."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from accelerate import Accelerator

from launcher.core.errors import ExitCode, LauncherError
from launcher.core.log import get_logger
from launcher.core.metrics import StepMetrics, load_metrics
from launcher.core.run_paths import RunPaths
from launcher.corpus.spec import PreparationSpec
from launcher.corpus.store import Store
from launcher.plan.model import Plan
from launcher.training.build import build_run
from launcher.training.checkpoint.resume import ResumeOptions, ResumePoint, resume_run
from launcher.training.cluster.bandwidth_check import check_bandwidth
from launcher.training.engine.accelerator import build_accelerator
from launcher.training.engine.run import TrainingRun
from launcher.training.evaluation.task_metrics import TaskEvaluator, build_task_evaluator
from launcher.training.loop import train
from launcher.training.monitoring.goodput import GoodputTracker, get_total_seconds
from launcher.training.monitoring.meters import Meter, open_meters
from launcher.training.monitoring.runtime_report import (
    CompileResult,
    collect_runtime_fields,
    count_compiled_graphs,
    describe_runtime,
    record_forward_ops,
)
from launcher.training.observers.base import Observer, Observers
from launcher.training.observers.best_checkpoint import BestCheckpoint
from launcher.training.observers.checkpointer import Checkpointer
from launcher.training.observers.console import Console
from launcher.training.observers.memory_pressure import MemoryPressure
from launcher.training.observers.metrics_writer import MetricsWriter
from launcher.training.observers.nonfinite_steps import NonfiniteSteps
from launcher.training.observers.profiler import Profiler
from launcher.training.observers.replay_check import ReplayCheck
from launcher.training.observers.stop_on_signal import StopOnSignal
from launcher.training.oom import fall_back, free_for_checkpoint, free_memory
from launcher.training.runtime.run_record import RunRecorder
from launcher.training.runtime.startup_timer import startup
from launcher.training.runtime.watchdog import Watchdog
from launcher.training.topology_check import check_accelerator
from launcher.training.tracking.tracker_process import start_trackers
from launcher.training.verify.packing import PackingCheck, collate_documents, select_documents
from launcher.training.warmup_step import run_warmup_step

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerInputs:
    """What to train, and where to save it."""

    plan: Plan
    paths: RunPaths
    store: Store
    folders: tuple[Path, ...]  # searched for base models
    vocab_size: int  # of the tokenizer
    options: ResumeOptions
    preparation: PreparationSpec | None = None  # of the store; None: no task metrics
    shared_system: str = ""  # system message of all training rows


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """Result of a training: the completed steps, and whether a signal interrupted it."""

    steps_done: int
    was_interrupted: bool  # by a signal to this rank or another


def run_training(inputs: TrainerInputs, recorder: RunRecorder) -> TrainResult:
    """Train, retrying with the plan's fallbacks when memory runs out and this process can retry by itself."""
    accelerator = build_accelerator(inputs.plan)
    check_accelerator(inputs.plan, accelerator)
    check_bandwidth(inputs.plan, accelerator, recorder)
    stop, goodput = StopOnSignal(), GoodputTracker()
    stop.install()
    # Status "running" replaces that of an earlier attempt.
    recorder.update(shared_system=inputs.shared_system)
    recorder.attach_trackers(start_trackers(inputs.plan, inputs.paths, accelerator))
    startup.end_phase("accelerate and trackers")
    while True:
        try:
            return _train_once(inputs, recorder, accelerator, stop, goodput)
        except torch.OutOfMemoryError as error:
            fallback = fall_back(inputs.plan, accelerator, error)
        # Outside of the handler, because the error's traceback keeps tensors alive.
        free_memory(accelerator)
        recorder.record_fallback(fallback)
        startup.end_phase("before out of memory")
        inputs = replace(inputs, plan=fallback)


def _train_once(
    inputs: TrainerInputs,
    recorder: RunRecorder,
    accelerator: Accelerator,
    stop: StopOnSignal,
    goodput: GoodputTracker,
) -> TrainResult:
    run, check = build_run(inputs.plan, inputs.paths, inputs.store, inputs.folders, accelerator, inputs.vocab_size)
    _stop_before_training(stop, accelerator)
    compiled = run_warmup_step(run)
    startup.end_phase("warm-up step")
    report = _report_runtime(run, check, compiled, recorder)
    spent = recorder.add_spent_seconds(get_total_seconds(_load_rows(run)))  # before rows are dropped
    _stop_before_training(stop, accelerator)
    resume_point = resume_run(run, inputs.options)
    observers = _build_observers(run, resume_point, inputs.options, stop)
    writer = observers.metrics_writer
    writer.last_loss = recorder.start_attempt(resume_point.progress.step, writer.last_loss)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    graphs, _ = count_compiled_graphs()
    watchdog = _start_watchdog(run, recorder)
    goodput.start(run.heartbeat, resume_point.metrics, spent)
    try:
        tasks = (
            None if inputs.preparation is None else build_task_evaluator(run, inputs.preparation, stop.stop_requested)
        )
        with open_meters(run, goodput, resume_point.metrics) as meter:
            steps_done = _train_and_save(run, observers, resume_point, meter, tasks)
    except BaseException:
        with suppress(LauncherError):  # the disk may be full; the end of the run is recorded again
            recorder.update(**observers.summarize())
        raise
    finally:
        watchdog.stop()
    recompiled = count_compiled_graphs()[0] - graphs
    if compiled.description and recompiled:
        report["torch.compile"] = f"{compiled.description}; {recompiled} more graphs while training and evaluating"
        run.log(f"torch.compile: {report['torch.compile']}")
    best = observers.best
    if best.stop_reason:
        run.log(best.stop_reason)
    recorder.update(
        **observers.summarize(),
        ended_because=best.stop_reason,
        observed=report,
        recompiled_graphs=recompiled,
        goodput=goodput.read(),
    )
    # Not by `stop`: the signal may have reached another rank only.
    is_unfinished = steps_done < run.num_steps or resume_point.progress.owes_evaluation
    return TrainResult(steps_done=steps_done, was_interrupted=is_unfinished and not best.stop_reason)


def _stop_before_training(stop: StopOnSignal, accelerator: Accelerator) -> None:
    """Raise KeyboardInterrupt if a signal came before the first step. Several ranks stop after a step instead."""
    if stop.stop_requested() and accelerator.num_processes == 1:
        raise KeyboardInterrupt("stopped before the first step after this start")


@dataclass(frozen=True, kw_only=True, slots=True)
class _RunObservers:
    all: Observer
    best: BestCheckpoint
    checkpointer: Checkpointer
    metrics_writer: MetricsWriter

    def summarize(self) -> dict[str, object]:
        """Return what was trained, as fields of the outcome."""
        writer, best = self.metrics_writer, self.best
        return {
            "steps_done": writer.last_step,
            "final_loss": writer.last_loss,
            "best_step": best.step,
            "best_metric": best.value,
        }


def _build_observers(
    run: TrainingRun, resume_point: ResumePoint, options: ResumeOptions, stop: StopOnSignal
) -> _RunObservers:
    """Return the observers of a run, in the order in which they are called."""
    best = BestCheckpoint(run.plan.schedule)
    metrics_writer = MetricsWriter(resume_point.progress.step, resume_point.metrics.kept)
    if resume_point.best is not None:
        best.restore(resume_point.best)
    replay = ReplayCheck(resume_point.metrics.rest, must_agree=options.verify_steps > 0)
    checkpointer = Checkpointer(best)
    observers: list[Observer] = [
        *(stop, Console(), metrics_writer, NonfiniteSteps(), MemoryPressure(), replay, best, checkpointer),
        *([Profiler(run.plan.profile_steps)] if run.plan.profile_steps is not None else []),
    ]
    return _RunObservers(all=Observers(observers), best=best, checkpointer=checkpointer, metrics_writer=metrics_writer)


def _train_and_save(
    run: TrainingRun, observers: _RunObservers, resume_point: ResumePoint, meter: Meter, tasks: TaskEvaluator | None
) -> int:
    """Train; after an error finish the current checkpoint, and after out of memory save the completed steps first."""
    progress = resume_point.progress
    first = progress.step
    try:
        return train(run, observers.all, progress, meter, tasks)
    except torch.OutOfMemoryError as error:
        if progress.step > first and free_for_checkpoint(run, error):
            observers.checkpointer.on_save(run, progress)
        observers.checkpointer.close()
        raise
    except Exception:
        observers.checkpointer.close()
        raise


def _report_runtime(
    run: TrainingRun, check: PackingCheck, compiled: CompileResult, recorder: RunRecorder
) -> dict[str, str]:
    """Print and record which attention, dtypes, kernels and optimizer are active in this process."""
    document = select_documents(run.train.file, run.plan.batch.sequence_length)[:1]
    ops = record_forward_ops(run.engine.model, collate_documents(document, run.plan).to(run.engine.device))
    report = describe_runtime(run, check, ops, compiled.description)
    startup.end_phase("report")
    report["start-up"] = startup.describe()
    width = max(map(len, report))
    for name, description in report.items():
        run.log(f"  {name:<{width}}  {description}")
    fields = collect_runtime_fields(run, compiled)
    sizes = {"num_steps": run.num_steps, "train_sequences": len(run.train.file)}
    recorder.update(data_key=run.data_key, **sizes, observed=report, **fields)
    return report


def _load_rows(run: TrainingRun) -> list[StepMetrics]:
    has_rows = run.engine.is_main and run.paths.metrics.is_file()
    return load_metrics(run.paths.metrics, max_bytes=None) if has_rows else []


def _start_watchdog(run: TrainingRun, recorder: RunRecorder) -> Watchdog:
    def on_hang(message: str) -> None:
        log.error(message)
        # The process exits after this, and must not wait: the training could otherwise continue meanwhile.
        recorder.finish(waits=False, status="failed", exit_code=int(ExitCode.RUN_FAILED), error=message)

    rank = run.engine.rank
    watchdog = Watchdog(
        run.heartbeat,
        rank=rank,
        num_ranks=run.engine.num_ranks,
        limit_seconds=run.plan.guards.hang_seconds,
        stacks=run.paths.logs / f"stacks-rank-{rank}.txt",
        on_hang=on_hang,
    )
    watchdog.start()
    return watchdog
