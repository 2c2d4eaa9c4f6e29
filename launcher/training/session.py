"""One training, from a plan and prepared data to saved weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from accelerate import Accelerator

from launcher.corpus.preparation import Preparation
from launcher.corpus.store import Store
from launcher.errors import ExitCode, say
from launcher.metrics import StepMetrics, load_metrics
from launcher.paths import RunPaths
from launcher.plan.model import Plan
from launcher.training.assembly import assemble
from launcher.training.chronicle import Chronicle
from launcher.training.descending import free_memory, make_room, step_down
from launcher.training.guards import StopOnSignal
from launcher.training.ledger import Ledger, find_spent
from launcher.training.links import check_links
from launcher.training.loop import train
from launcher.training.measures import Measure, measured
from launcher.training.observed import Operations, count_graphs, observe, observe_operations
from launcher.training.observers.bad_steps import BadSteps
from launcher.training.observers.base import Observer, Observers
from launcher.training.observers.best import Best
from launcher.training.observers.console import Console
from launcher.training.observers.facts import Facts
from launcher.training.observers.pressure import Pressure
from launcher.training.observers.profiling import Profiling
from launcher.training.observers.replay import Replay
from launcher.training.observers.saving import Saving
from launcher.training.proof import lay_out, pick_documents
from launcher.training.resuming import Beginning, ResumeOptions, begin
from launcher.training.run import Run
from launcher.training.starting import start
from launcher.training.tasks import Tasks, open_tasks
from launcher.training.telling import start_teller
from launcher.training.topology import check_started
from launcher.training.warming import rehearse_step
from launcher.training.watchdog import Watchdog


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    steps_done: int
    was_cut: bool  # stopped by a signal, to this rank or another


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What is to be trained, and where it goes."""

    plan: Plan
    paths: RunPaths
    store: Store
    folders: tuple[Path, ...]  # where bases are looked for
    vocab_size: int  # the tokenizer's
    options: ResumeOptions
    preparation: Preparation | None = None  # of the store; None: there are no rows to ask


def run_training(task: Task, chronicle: Chronicle) -> Ending:
    """Where memory runs out and this process can help itself, it goes on one rung lower, with the same batch."""
    accelerator = start(task.plan)
    check_started(task.plan, accelerator)
    check_links(task.plan, accelerator, chronicle)
    stop, ledger = StopOnSignal(), Ledger()
    stop.install()
    chronicle.note()  # running: what an earlier attempt ended with is over
    chronicle.accompany(start_teller(task.plan, task.paths, accelerator))
    while True:
        try:
            return _train_once(task, chronicle, accelerator, stop, ledger)
        except torch.OutOfMemoryError as error:
            lower = step_down(task.plan, accelerator, error)
        # Behind the handler: the error's traceback would hold what is to be freed.
        free_memory(accelerator)
        chronicle.step_down(lower)
        task = replace(task, plan=lower)


def _train_once(
    task: Task, chronicle: Chronicle, accelerator: Accelerator, stop: StopOnSignal, ledger: Ledger
) -> Ending:
    plan = task.plan
    run, proof = assemble(plan, task.paths, task.store, task.folders, accelerator, task.vocab_size)
    compiled = rehearse_step(run)
    seen = observe(run, proof, _watch_operations(run), compiled)
    _show(run, seen)
    chronicle.note(data_key=run.data_key, num_steps=run.num_steps, observed=seen)
    spent = chronicle.note_spent(find_spent(_read_rows(run)))  # before rows are cut away
    beginning = begin(run, task.options)
    chronicle.begin(beginning.position.step)
    best, facts = Best(plan.schedule), Facts()
    if beginning.best is not None:
        best.restore(beginning.best)
    replay = Replay(beginning.told.rest, must_agree=task.options.verify_steps > 0)
    saving = Saving(best)
    observers: list[Observer] = [Console(), facts, BadSteps(), Pressure(), replay, best, saving, stop]
    observers += [Profiling(plan.profiled)] if plan.profiled is not None else []
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    graphs, _ = count_graphs()
    watchdog = _watch_over(run, chronicle)
    ledger.begin(run.pulse, beginning.told, spent)
    try:
        tasks = None if task.preparation is None else open_tasks(run, task.preparation, stop.asks_to_stop)
        with measured(run, ledger, beginning.told) as measure:
            steps_done = _train_saved(run, Observers(observers), beginning, saving, measure, tasks)
    finally:
        watchdog.stop()
    recompiled = count_graphs()[0] - graphs
    if compiled and recompiled:
        seen["torch.compile"] = f"{compiled}; {recompiled} more graphs while training (evaluation has its own)"
        run.say(f"torch.compile: {seen['torch.compile']}")
    if best.stopped_early:
        run.say(best.stopped_early)
    chronicle.note(
        steps_done=steps_done,
        best_step=best.step,
        best_metric=best.value,
        final_loss=facts.last_loss,
        ended_because=best.stopped_early,
        observed=seen,
        goodput=ledger.read(),
    )
    # Another rank may have been asked: all of them stopped, and this one does not know by what.
    return Ending(
        steps_done=steps_done,
        was_cut=steps_done < run.num_steps and not best.stopped_early,
    )


def _read_rows(run: Run) -> list[StepMetrics]:
    return load_metrics(run.paths.metrics) if run.engine.is_main and run.paths.metrics.is_file() else []


def _watch_over(run: Run, chronicle: Chronicle) -> Watchdog:
    def give_up(message: str) -> None:
        say(f"error: {message}")
        # The process ends behind this, and must not wait: a training that moves again meanwhile would go on.
        chronicle.end(waits=False, status="failed", exit_code=int(ExitCode.RUN_FAILED), error=message)

    rank = run.engine.rank
    watchdog = Watchdog(
        run.pulse,
        rank=rank,
        num_ranks=run.engine.num_ranks,
        limit_seconds=run.plan.guards.hang_seconds,
        stacks=run.paths.logs / f"stacks-rank-{rank}.txt",
        give_up=give_up,
    )
    watchdog.start()
    return watchdog


def _train_saved(
    run: Run, observer: Observer, beginning: Beginning, saving: Saving, measure: Measure, tasks: Tasks | None
) -> int:
    """An error leaves whole what was being written; where memory ran out, what was trained by then is saved first."""
    began = beginning.position.step
    try:
        return train(run, observer, beginning.position, measure, tasks)
    except torch.OutOfMemoryError as error:
        if beginning.position.step > began and make_room(run, error):
            saving.on_save(run, beginning.position)
        saving.close()
        raise
    except Exception:
        saving.close()
        raise


def _watch_operations(run: Run) -> Operations:
    documents = pick_documents(run.train.file, run.plan.batch.sequence_length)
    return observe_operations(run.engine.model, lay_out(documents[:1], run.plan).to(run.engine.device))


def _show(run: Run, seen: dict[str, str]) -> None:
    width = max(map(len, seen))
    for name, what in seen.items():
        run.say(f"  {name:<{width}}  {what}")
