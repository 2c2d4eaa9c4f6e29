"""Read step results from the device one step late, so that the host can run ahead."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from launcher.core import metrics
from launcher.core.metrics import StepMetrics
from launcher.training.engine.run import TrainingRun
from launcher.training.monitoring.meters import Meter, StepStats
from launcher.training.monitoring.step_timer import StepTiming
from launcher.training.observers.base import Observer


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """A step that may still run on the device; `values` are valid after `timing.seconds()`, which waits for it."""

    step: int  # counts from 1
    packs: tuple[int, ...]
    num_tokens: int
    values: Tensor  # on the host: loss, number of ranks with a stop request, gradient norm, skipped or not
    stop_requested: bool  # on this rank
    learning_rate: float
    timing: StepTiming


class DelayedResults:
    """Passes the results of each step to the observers when the next step has been queued."""

    def __init__(self, run: TrainingRun, observer: Observer, meter: Meter, tokens_seen: int = 0) -> None:
        self._run, self._observer, self._meter = run, observer, meter
        self._pending: StepResult | None = None
        self._tokens_seen = tokens_seen
        self._stop_agreed = False

    def add(self, result: StepResult) -> bool:
        """Queue a result and report the one before; return whether to stop, which all ranks decide at the same step."""
        before, self._pending = self._pending, result
        self._report(before)
        return result.stop_requested if self._run.engine.num_ranks == 1 else self._stop_agreed

    def flush(self) -> None:
        """Report the last queued step to the observers."""
        result, self._pending = self._pending, None
        self._report(result)

    def report_evaluation(self, step: int, values: dict[str, float]) -> bool:
        """Report an evaluation to the observers; return whether to save a checkpoint. `values` may be empty."""
        if values:
            values = {**values, metrics.TOKENS_SEEN: float(self._tokens_seen), **self._meter.read_totals()}
        row = StepMetrics(step=step, epoch=step / self._run.steps_per_epoch, values=values)
        return self._observer.on_evaluation(self._run, row)

    def _report(self, result: StepResult | None) -> None:
        if result is not None:
            self._observer.on_step(self._run, self._read(result))
            self._run.heartbeat.beat("training")

    def _read(self, result: StepResult) -> StepMetrics:
        seconds = result.timing.seconds()  # waits for the step, after which its values are valid
        starved = min(seconds, result.timing.starved_seconds())
        loss, num_stop_requests, grad_norm, skipped = result.values.tolist()
        self._stop_agreed = num_stop_requests > 0
        self._tokens_seen += result.num_tokens
        stats = StepStats(
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
            metrics.DATA_WAIT_SECONDS: result.timing.data_seconds,
            metrics.DATA_WAIT_SHARE: starved / max(1e-9, seconds),
            metrics.TOKENS_SEEN: float(self._tokens_seen),
            **self._meter.read(stats),
            **self._meter.read_totals(),
        }
        epoch = result.step / self._run.steps_per_epoch
        return StepMetrics(step=result.step, epoch=epoch, values=values, packs=result.packs)
