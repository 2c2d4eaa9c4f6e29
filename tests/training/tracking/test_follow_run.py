"""The uploader reads new rows of a metrics file, each once."""

from __future__ import annotations

from pathlib import Path

from launcher.core.metrics import TOTAL_SECONDS, TRAIN_LOSS, StepMetrics, append_metrics, cut_metrics
from launcher.training.tracking.follow_run import MetricsTail


def write(file: Path, step: int, seconds: float) -> None:
    values = {TRAIN_LOSS: 1.0, TOTAL_SECONDS: seconds}
    append_metrics(file, StepMetrics(step=step, epoch=0.1, values=values, packs=(1, 2)))


def read_steps(tail: MetricsTail) -> list[int]:
    return [row.step for row in tail.read()]


def test_each_complete_row_is_read_once(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    tail = MetricsTail(file)
    assert read_steps(tail) == [], "the file does not exist yet"
    write(file, 1, 1.0)
    write(file, 2, 2.0)
    assert read_steps(tail) == [1, 2]
    assert read_steps(tail) == []
    complete = file.read_bytes()
    write(file, 3, 3.0)
    last = file.read_bytes()[len(complete) :]
    file.write_bytes(complete + last[:10])
    assert read_steps(tail) == [], "the line is incomplete"
    with file.open("ab") as stream:
        stream.write(last[10:])
    assert read_steps(tail) == [3]
    assert tail.logged_seconds == 3.0


def test_repeated_steps_are_read_again(tmp_path: Path) -> None:
    """After an OOM fallback the file is replaced by one with fewer rows."""
    file = tmp_path / "metrics.jsonl"
    for step in (1, 2, 3):
        write(file, step, float(step))
    tail = MetricsTail(file)
    assert read_steps(tail) == [1, 2, 3]
    cut_metrics(file, 2)
    assert read_steps(tail) == [], "the remaining rows are already logged"
    write(file, 3, 9.0)
    assert read_steps(tail) == [3]


def test_later_process_continues_after_the_logged_rows(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    for step in (1, 2, 3):
        write(file, step, float(step))
    assert read_steps(MetricsTail(file, logged_seconds=2.0)) == [3]


def test_damaged_line_is_skipped(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    write(file, 1, 1.0)
    with file.open("a") as stream:
        stream.write("nonsense\n")
    write(file, 2, 2.0)
    assert read_steps(MetricsTail(file)) == [1, 2]
