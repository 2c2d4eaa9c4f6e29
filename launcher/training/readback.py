"""What a step did, read from the device one step late, so that the host runs ahead of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launcher import metrics
from launcher.metrics import StepMetrics
from launcher.training.measures import Done, Measure
from launcher.training.observers.base import Observer
from launcher.training.run import Run

if TYPE_CHECKING:
    from launcher.training.loop import StepResult


class Readback:
    def __init__(self, run: Run, observer: Observer, measure: Measure, tokens_seen: int = 0) -> None:
        self._run, self._observer, self._measure = run, observer, measure
        self._waiting: StepResult | None = None
        self._tokens_seen = tokens_seen
        self._stops = False

    def add(self, result: StepResult) -> bool:
        """Whether the run shall stop. All ranks get the same answer at the same step: one that was read back."""
        before, self._waiting = self._waiting, result
        self._tell(before)
        return result.asks_to_stop if self._run.engine.num_ranks == 1 else self._stops

    def flush(self) -> None:
        """Tells the observers about the step that is still waiting."""
        result, self._waiting = self._waiting, None
        self._tell(result)

    def tell_evaluation(self, step: int, values: dict[str, float]) -> bool:
        """Whether a checkpoint is asked for. No values: there is nothing held out."""
        told = {**values, metrics.TOKENS_SEEN: float(self._tokens_seen), **self._measure.read_now()} if values else {}
        row = StepMetrics(step=step, epoch=step / self._run.steps_per_epoch, values=told)
        return self._observer.on_evaluation(self._run, row)

    def _tell(self, result: StepResult | None) -> None:
        if result is not None:
            self._observer.on_step(self._run, self._read(result))
            self._run.pulse.beat("training")

    def _read(self, result: StepResult) -> StepMetrics:
        seconds = result.lap.seconds()  # waits for the step: from here on its facts are there
        starved = min(seconds, result.lap.starved_seconds())
        loss, num_asking, grad_norm, skipped = result.facts.tolist()
        self._stops = num_asking > 0
        self._tokens_seen += result.num_tokens
        done = Done(
            step=result.step,
            packs=list(result.packs),
            num_tokens=result.num_tokens,
            seconds=seconds,
            starved_seconds=starved,
            is_skipped=bool(skipped),
        )
        values = {
            metrics.TRAIN_LOSS: loss,
            metrics.GRAD_NORM: grad_norm,
            metrics.SKIPPED: skipped,
            metrics.LEARNING_RATE: result.learning_rate,
            metrics.STEP_SECONDS: seconds,
            metrics.DATA_WAIT_SECONDS: result.lap.data_seconds,
            metrics.DATA_WAIT_SHARE: starved / max(1e-9, seconds),
            metrics.TOKENS_SEEN: float(self._tokens_seen),
            **self._measure.read(done),
            **self._measure.read_now(),
        }
        epoch = result.step / self._run.steps_per_epoch
        return StepMetrics(step=result.step, epoch=epoch, values=values, packs=result.packs)
