"""Step results are read one step late and reported completely."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from launcher.core import metrics
from launcher.core.errors import RunFailedError
from launcher.core.metrics import CutMetrics, StepMetrics, append_metrics, load_metrics
from launcher.corpus.store import Store
from launcher.plan.model import Plan
from launcher.training.engine.engine import Engine
from launcher.training.engine.run import TrainingRun
from launcher.training.loop import train
from launcher.training.monitoring.goodput import GoodputTracker
from launcher.training.monitoring.meters import Meter, open_meters
from launcher.training.monitoring.step_results import DelayedResults, StepResult
from launcher.training.monitoring.step_timer import StepTiming
from launcher.training.observers.base import Observer, Observers
from launcher.training.observers.metrics_writer import MetricsWriter
from tests.training.builders import (
    Recorder,
    build,
    make_documents,
    make_uneven_packs,
    pack_greedily,
    split,
    vary,
    with_engine,
    write_store,
)

happened: list[str] = []


class LoggingEngine(Engine):
    """Records when a step is queued on the device."""

    def update(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        happened.append("dispatched")
        return super().update(loss)


class Reader(Observer):
    def on_step(self, run: TrainingRun, metrics: StepMetrics) -> None:  # noqa: ARG002
        happened.append(f"reported {metrics.step}")

    def on_evaluation(self, run: TrainingRun, metrics: StepMetrics) -> bool:  # noqa: ARG002
        happened.append(f"evaluated {metrics.step}")
        return False


@pytest.fixture
def run(plan: Plan, store: Store, tmp_path: Path) -> TrainingRun:
    return build(vary(plan, {"schedule.max_steps": 4}), store, tmp_path)


def test_a_step_is_read_after_the_next_was_queued(run: TrainingRun) -> None:
    happened.clear()
    train(with_engine(run, LoggingEngine), Reader())
    assert happened == [
        *("dispatched", "dispatched", "reported 1", "dispatched", "reported 2", "dispatched", "reported 3"),
        "reported 4",  # nothing is missing
    ]


def test_the_pending_step_is_reported_before_an_evaluation(plan: Plan, store: Store, tmp_path: Path) -> None:
    run = build(vary(plan, {"schedule.max_steps": 4, "schedule.evaluate_every_steps": 2}), store, tmp_path)
    happened.clear()
    train(with_engine(run, LoggingEngine), Reader())
    assert happened == [
        *("dispatched", "dispatched", "reported 1", "reported 2", "evaluated 2"),
        *("dispatched", "dispatched", "reported 3", "reported 4", "evaluated 4"),
    ]


def make_result(step: int, loss: float, read: list[int]) -> StepResult:
    def seconds() -> float:
        read.append(step)
        return 0.5

    return StepResult(
        step=step,
        packs=(0, 1),
        num_tokens=100,
        values=torch.tensor([loss, 0.0, 1.0, 0.0]),
        stop_requested=False,
        learning_rate=1e-3,
        timing=StepTiming(seconds=seconds, data_seconds=0.1, starved_seconds=lambda: 0.05),
    )


def test_adding_a_step_does_not_wait_for_it(run: TrainingRun) -> None:
    read: list[int] = []
    results = DelayedResults(run, Recorder(), Meter())
    results.add(make_result(1, 2.0, read))
    assert read == []
    results.add(make_result(2, 2.0, read))
    assert read == [1]
    results.flush()
    results.flush()
    assert read == [1, 2], "each once"


# metrics.jsonl -------------------------------------------------------------------------------------------------------


@pytest.fixture
def written(plan: Plan, tmp_path: Path) -> tuple[TrainingRun, list[StepMetrics]]:
    store = write_store(tmp_path / "store", make_uneven_packs(), pack_greedily(make_documents(5, seed=2)))
    run = build(vary(plan, {"schedule.evaluate_every_steps": 4, **split(2, 2)}), store, tmp_path / "run")
    tracker = GoodputTracker()
    tracker.start(run.heartbeat, CutMetrics())
    with open_meters(run, tracker, CutMetrics()) as meter:
        train(run, Observers([MetricsWriter()]), meter=meter)
    return run, load_metrics(run.paths.metrics)


def test_every_step_has_its_metrics(written: tuple[TrainingRun, list[StepMetrics]]) -> None:
    run, rows = written
    steps = [row for row in rows if metrics.TRAIN_LOSS in row.values]
    assert [row.step for row in steps] == list(range(1, run.num_steps + 1)) == [1, 2, 3, 4, 5, 6]
    assert [row.packs for row in steps] == [run.order.packs_for_step(step) for step in range(run.num_steps)]
    assert [row.epoch for row in steps] == pytest.approx([step / 3 for step in range(1, 7)])
    assert all(math.isfinite(value) for row in rows for value in row.values.values())
    evaluations = [row for row in rows if metrics.EVAL_LOSS in row.values]
    assert [row.step for row in evaluations] == [4, 6]
    assert [row.packs for row in evaluations] == [(), ()]


def test_tokens_seen_is_the_sum_without_padding(written: tuple[TrainingRun, list[StepMetrics]]) -> None:
    """An epoch sees every token of the split once."""
    run, rows = written
    steps = [row for row in rows if metrics.TRAIN_LOSS in row.values]
    seen = [row.values[metrics.TOKENS_SEEN] for row in steps]
    tokens = [sum(len(run.train.file[pack].input_ids) for pack in row.packs) for row in steps]
    assert seen == [float(sum(tokens[: index + 1])) for index in range(6)]
    whole = sum(len(pack.input_ids) for pack in run.train.file)
    assert (seen[2], seen[5]) == (whole, 2 * whole)
    for row, count in zip(steps, tokens, strict=True):
        values = row.values
        assert values[metrics.TOKENS_PER_SECOND] * values[metrics.STEP_SECONDS] == pytest.approx(count)
        trained = sum(int(run.train.file[pack].trained.sum()) for pack in row.packs)
        assert values[metrics.TRAINED_TOKENS_PER_SECOND] * values[metrics.STEP_SECONDS] == pytest.approx(trained)
        documents = sum(len(run.train.file[pack].document_lengths) for pack in row.packs)
        assert values[metrics.SAMPLES_PER_SECOND] * values[metrics.STEP_SECONDS] == pytest.approx(documents)
        assert 0 <= values[metrics.DATA_WAIT_SECONDS] <= values[metrics.STEP_SECONDS]
        share = values[metrics.DATA_WAIT_SECONDS] / values[metrics.STEP_SECONDS]
        assert values[metrics.DATA_WAIT_SHARE] == pytest.approx(share, abs=0.05), "a CPU waits with its host"
        assert values[metrics.STEPS_PER_SECOND] == pytest.approx(1 / values[metrics.STEP_SECONDS])
        assert metrics.DEVICE_MFU not in values, "the peak of a CPU is unknown"


def test_every_metric_is_documented(written: tuple[TrainingRun, list[StepMetrics]]) -> None:
    _, rows = written
    assert {name for row in rows for name in row.values} <= set(metrics.METRICS_BY_NAME)


def test_packing_efficiency_counts_empty_positions(written: tuple[TrainingRun, list[StepMetrics]]) -> None:
    """The last step of an epoch fills only two packs of two ranks' slots."""
    run, rows = written
    batch = run.plan.batch
    for row in rows:
        if metrics.TRAIN_LOSS not in row.values:
            continue
        tokens = sum(len(run.train.file[pack].input_ids) for pack in row.packs)
        slots = batch.micro_batch_size * run.count_micro_batches(row.step - 1)
        positions = slots * batch.sequence_length
        assert row.values[metrics.PACKING_EFFICIENCY] == pytest.approx(tokens / positions)
        assert slots >= len(row.packs)


def test_epochs_are_timed(written: tuple[TrainingRun, list[StepMetrics]]) -> None:
    _, rows = written
    steps = [row for row in rows if metrics.TRAIN_LOSS in row.values]
    assert [row.step for row in steps if metrics.EPOCH_SECONDS in row.values] == [3, 6]
    seconds = [row.values[metrics.STEP_SECONDS] for row in steps]
    assert steps[2].values[metrics.EPOCH_SECONDS] == pytest.approx(sum(seconds[:3]))
    assert steps[5].values[metrics.EPOCH_SECONDS] == pytest.approx(sum(seconds[3:]))


def test_evaluations_have_every_axis(written: tuple[TrainingRun, list[StepMetrics]]) -> None:
    _, rows = written
    by_step = {row.step: row for row in rows if metrics.TRAIN_LOSS in row.values}
    for row in rows:
        if metrics.EVAL_LOSS in row.values:
            assert row.values[metrics.TOKENS_SEEN] == by_step[row.step].values[metrics.TOKENS_SEEN]
    totals = [row.values[metrics.TOTAL_SECONDS] for row in rows]
    assert totals == sorted(set(totals)), "the wall-clock time only grows"


def test_a_torn_last_line_is_skipped(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    rows = [StepMetrics(step=step, epoch=step / 3, values={"train/loss": 0.1 * step}, packs=(step,)) for step in (1, 2)]
    for row in rows:
        append_metrics(file, row)
    whole = file.read_bytes()
    assert load_metrics(file) == rows
    last = whole.index(b"\n") + 1
    for end in range(last, len(whole)):
        file.write_bytes(whole[:end])
        assert load_metrics(file) == rows[:1]
    file.write_bytes(b"")
    assert load_metrics(file) == []


def test_numbers_are_read_back_bit_exact(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    row = StepMetrics(step=1, epoch=1 / 3, values={"train/loss": 4.868227005004883, "x": 1e-300}, packs=(7, 0))
    append_metrics(file, row)
    (read,) = load_metrics(file)
    assert read == row
    assert json.loads(file.read_text())["step"] == 1


def test_metrics_that_cannot_be_written_end_the_run(run: TrainingRun) -> None:
    run.paths.metrics.mkdir()
    with pytest.raises(RunFailedError, match=r"metrics.jsonl cannot be written: Is a directory"):
        MetricsWriter().on_step(run, StepMetrics(step=1, epoch=0.1, values={metrics.TRAIN_LOSS: 1.0}))


def test_half_a_line_does_not_break_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk may leave half a line."""
    file = tmp_path / "metrics.jsonl"
    row = StepMetrics(step=1, epoch=0.1, values={"train/loss": 0.5}, packs=(1,))
    append_metrics(file, row)
    real = os.fdopen

    class Full:
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self._stream.close()

        def write(self, data: bytes) -> int:
            return int(self._stream.write(data[:20]))

    monkeypatch.setattr(os, "fdopen", lambda *args, **more: Full(real(*args, **more)))
    with pytest.raises(OSError, match="No space"):
        append_metrics(file, row)
    monkeypatch.setattr(os, "fdopen", real)
    append_metrics(file, row)
    assert load_metrics(file) == [row, row]
