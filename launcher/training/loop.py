"""The training loop. A feature is an observer, not an `if` in here."""

from __future__ import annotations

import torch

from launcher.core.errors import LauncherError, first_line
from launcher.training.checkpoint.progress import TrainProgress, compute_progress
from launcher.training.data.loader import PrefetchIterator, build_loader
from launcher.training.engine.run import TrainingRun
from launcher.training.evaluation.heldout_loss import Evaluator
from launcher.training.evaluation.task_metrics import TaskEvaluator
from launcher.training.monitoring.meters import Meter
from launcher.training.monitoring.step_results import DelayedResults, StepResult
from launcher.training.monitoring.step_timer import StepTimer
from launcher.training.observers.base import Observer


def train(
    run: TrainingRun,
    observer: Observer,
    progress: TrainProgress | None = None,
    meter: Meter | None = None,
    tasks: TaskEvaluator | None = None,
) -> int:
    """Train all remaining steps, from `progress` or from the first step; return the number of completed steps."""
    progress = progress or compute_progress(run, 0)
    results = DelayedResults(run, observer, meter or Meter(), progress.tokens_seen)
    observer.on_start(run, progress.step)
    try:
        _train_from(run, observer, progress, results, Evaluator(run, tasks))
        results.flush()
    except torch.OutOfMemoryError:
        results.flush()  # report the last complete step: the training may continue after it
        raise
    except LauncherError:
        raise
    except Exception as error:  # for example of a judge or of a checkpoint
        if progress.step >= run.num_steps and run.engine.num_ranks == 1:  # other ranks may not be here
            run.warn(f"saving what was trained, although the run failed after its last step: {first_line(error)}")
            observer.on_end(run, progress.step)
        raise
    run.heartbeat.beat("saving what was trained")
    observer.on_end(run, progress.step)
    return progress.step


def _train_from(
    run: TrainingRun, observer: Observer, progress: TrainProgress, results: DelayedResults, evaluator: Evaluator
) -> None:
    schedule = run.plan.schedule
    base_values = evaluator.evaluate_tasks(0) if progress.step == 0 else {}
    if base_values:
        results.report_evaluation(0, base_values)
    device = run.engine.device
    batches = build_loader(run.batches(), run.plan.loader, progress.step, prefetch=device.type != "cpu")
    timer = StepTimer(device)
    if progress.owes_evaluation:
        values = evaluator.evaluate(progress.step)
        if evaluator.must_repeat:
            return
        progress.owes_evaluation = False
        results.report_evaluation(progress.step, values)
        observer.on_save(run, progress)  # again, with the result of the evaluation
        timer.restart()
    while progress.step < run.num_steps and not observer.should_stop():
        step = progress.step + 1
        observer.before_step(run, step)
        result = train_step(run, step, batches, timer, stop_requested=observer.stop_requested())
        progress.advance(result.packs, result.num_tokens)
        stops = results.add(result) and step < run.num_steps
        evaluates = run.is_due(step, schedule.evaluate_every_steps, schedule.evaluate_every_epochs)
        if stops:  # there may be little time left, so the evaluation is postponed until the run resumes
            progress.owes_evaluation, evaluates = evaluates, False
        saves = run.is_due(step, schedule.save_every_steps, schedule.save_every_epochs) or stops
        if evaluates or saves:
            results.flush()
        if evaluates:
            progress.owes_evaluation = True
            values = evaluator.evaluate(step)
            if evaluator.must_repeat:  # a signal interrupted it; the resumed run repeats it before it continues
                saves = stops = True
            else:
                saves |= results.report_evaluation(step, values)
                progress.owes_evaluation = False
        if saves:
            run.heartbeat.beat("saving")
            observer.on_save(run, progress)
        if stops:
            break
        if evaluates or saves:
            timer.restart()
    last_values = evaluator.evaluate_tasks(progress.step, is_last=True) if observer.should_stop() else {}
    if last_values:  # stopped early, between two task evaluations
        results.report_evaluation(progress.step, last_values)


def train_step(
    run: TrainingRun, step: int, batches: PrefetchIterator, timer: StepTimer, *, stop_requested: bool = False
) -> StepResult:
    """Run all micro-batches and one optimizer update, without waiting for the device."""
    engine = run.engine
    packs = run.order.packs_for_step(step - 1)
    num_trained = int(run.train.num_trained[list(packs)].sum())
    total = torch.zeros((), device=engine.device)
    num_micro_batches = run.count_micro_batches(step - 1)
    for index in range(num_micro_batches):
        run.heartbeat.beat("waiting for data", step)
        with timer.waiting_for_data():
            batch = next(batches)
        run.heartbeat.beat("training", step)
        total += engine.micro_step(batch.to(engine.device), num_trained, is_last=index == num_micro_batches - 1)
        with timer.waiting_for_data():
            batches.prefetch_next()
    learning_rate = engine.learning_rate
    request = torch.full((), float(stop_requested), device=engine.device)
    loss, num_stop_requests = engine.all_reduce_sum(torch.stack([total, request])).unbind()
    grad_norm, skipped = engine.update(loss)
    values = torch.stack([loss, num_stop_requests, grad_norm.to(loss), skipped])
    return StepResult(
        step=step,
        packs=packs,
        num_tokens=int(run.train.num_tokens[list(packs)].sum()),
        # Copied during the next step; reading it from the device later would wait for everything queued since.
        values=values.to("cpu", non_blocking=True),
        stop_requested=stop_requested,
        learning_rate=learning_rate,
        timing=timer.finish_step(),
    )
