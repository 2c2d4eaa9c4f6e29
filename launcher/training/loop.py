"""The loop. A feature is an observer, not an `if` in here."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from launcher.training.cadence import is_due
from launcher.training.clock import Lap, StepClock
from launcher.training.evaluation import Evaluator
from launcher.training.feeding import Feed, feed
from launcher.training.measures import Measure
from launcher.training.observers.base import Observer
from launcher.training.position import Position, find_position
from launcher.training.readback import Readback
from launcher.training.run import Run
from launcher.training.tasks import Tasks


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """Of one step, which may still run: `facts` is true only once the lap's seconds were read, which waits for it."""

    step: int  # done: counts from 1
    packs: tuple[int, ...]
    num_tokens: int
    facts: Tensor  # on the host: loss, ranks that were asked to stop, norm of the gradients, passed over or not
    asks_to_stop: bool  # this rank was asked to
    learning_rate: float
    lap: Lap


def train(
    run: Run,
    observer: Observer,
    position: Position | None = None,
    measure: Measure | None = None,
    tasks: Tasks | None = None,
) -> int:
    """From a position, or from the beginning. Returns how many steps are done."""
    position = position or find_position(run, 0)
    readback = Readback(run, observer, measure or Measure(), position.tokens_seen)
    observer.on_start(run, position.step)
    try:
        _train_from(run, observer, position, readback, Evaluator(run, tasks))
    except torch.OutOfMemoryError:
        readback.flush()  # the last whole step is told: the training may go on behind it
        raise
    readback.flush()
    run.pulse.beat("saving what was trained")
    observer.on_end(run, position.step)
    return position.step


def _train_from(run: Run, observer: Observer, position: Position, readback: Readback, evaluator: Evaluator) -> None:
    schedule = run.plan.schedule
    base = evaluator.ask(0) if position.step == 0 else {}
    if base:  # what it can do already
        readback.tell_evaluation(0, base)
    device = run.engine.device
    batches = feed(run.batches(), run.plan.loader, position.step, is_beside=device.type != "cpu")
    clock = StepClock(device)
    if position.owes_evaluation:
        position.owes_evaluation = False
        readback.tell_evaluation(position.step, evaluator.evaluate(position.step))
        observer.on_save(run, position)  # with what the evaluation has shown
        clock.restart()
    while position.step < run.num_steps and not observer.wants_to_stop():
        step = position.step + 1
        observer.before_step(run, step)
        result = train_step(run, step, batches, clock, asks_to_stop=observer.asks_to_stop())
        position.advance(result.packs, result.num_tokens)
        stops = readback.add(result) and step < run.num_steps  # behind the last step there is nothing to stop
        evaluates = is_due(run, step, schedule.evaluate_every_steps, schedule.evaluate_every_epochs)
        if stops:  # there may be little time: an evaluation is made when the run goes on
            position.owes_evaluation, evaluates = evaluates, False
        saves = is_due(run, step, schedule.save_every_steps, schedule.save_every_epochs) or stops
        if evaluates or saves:
            readback.flush()
        if evaluates:
            position.owes_evaluation = True
            saves |= readback.tell_evaluation(step, evaluator.evaluate(step))
            position.owes_evaluation = False
        if saves:
            run.pulse.beat("saving")
            observer.on_save(run, position)
        if stops:
            break
        if evaluates or saves:
            clock.restart()
    last = evaluator.ask(position.step, is_last=True) if observer.wants_to_stop() else {}
    if last:  # it ends before its time, and was not asked yet
        readback.tell_evaluation(position.step, last)


def train_step(run: Run, step: int, batches: Feed, clock: StepClock, *, asks_to_stop: bool = False) -> StepResult:
    """All micro-batches, one update. Nothing in here waits for the device."""
    engine = run.engine
    packs = run.order.packs_of(step - 1)
    num_trained = int(run.train.num_trained[list(packs)].sum())
    total = torch.zeros((), device=engine.device)
    num_micro_batches = run.count_micro_batches(step - 1)
    for index in range(num_micro_batches):
        run.pulse.beat("waiting for data", step)
        with clock.waiting():
            batch = next(batches)
        run.pulse.beat("training", step)
        total += engine.micro_step(batch.to(engine.device), num_trained, is_last=index == num_micro_batches - 1)
        with clock.waiting():
            batches.prepare()
    learning_rate = engine.learning_rate
    asked = torch.full((), float(asks_to_stop), device=engine.device)
    loss, num_asking = engine.add_up(torch.stack([total, asked])).unbind()
    grad_norm, skipped = engine.update(loss)
    facts = torch.stack([loss, num_asking, grad_norm.to(loss), skipped])
    return StepResult(
        step=step,
        packs=packs,
        num_tokens=int(run.train.num_tokens[list(packs)].sum()),
        # Copied beside the next step. Reading it from the device later would wait for all that was queued since.
        facts=facts.to("cpu", non_blocking=True),
        asks_to_stop=asks_to_stop,
        learning_rate=learning_rate,
        lap=clock.lap(),
    )
