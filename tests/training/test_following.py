"""Rows of a metrics file, as they come, each once."""

from __future__ import annotations

from pathlib import Path

from launcher.metrics import TOTAL_SECONDS, TRAIN_LOSS, StepMetrics, append_metrics, cut_metrics
from launcher.training.following import Follower


def write(file: Path, step: int, seconds: float) -> None:
    values = {TRAIN_LOSS: 1.0, TOTAL_SECONDS: seconds}
    append_metrics(file, StepMetrics(step=step, epoch=0.1, values=values, packs=(1, 2)))


def steps(follower: Follower) -> list[int]:
    return [row.step for row in follower.read()]


def test_each_row_once_and_only_whole_ones(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    follower = Follower(file)
    assert steps(follower) == [], "it is not there yet"
    write(file, 1, 1.0)
    write(file, 2, 2.0)
    assert steps(follower) == [1, 2]
    assert steps(follower) == []
    whole = file.read_bytes()
    write(file, 3, 3.0)
    late = file.read_bytes()[len(whole) :]
    file.write_bytes(whole + late[:10])
    assert steps(follower) == [], "half a line is being written"
    with file.open("ab") as stream:
        stream.write(late[10:])
    assert steps(follower) == [3]
    assert follower.told_seconds == 3.0


def test_steps_that_are_trained_again_are_told_again(tmp_path: Path) -> None:
    """As where memory ran out: the file is another one, and holds fewer rows."""
    file = tmp_path / "metrics.jsonl"
    for step in (1, 2, 3):
        write(file, step, float(step))
    follower = Follower(file)
    assert steps(follower) == [1, 2, 3]
    cut_metrics(file, 2)
    assert steps(follower) == [], "what is kept was told"
    write(file, 3, 9.0)
    assert steps(follower) == [3]


def test_a_later_process_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    for step in (1, 2, 3):
        write(file, step, float(step))
    assert steps(Follower(file, told_seconds=2.0)) == [3]


def test_a_spoilt_line_costs_only_itself(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    write(file, 1, 1.0)
    with file.open("a") as stream:
        stream.write("nonsense\n")
    write(file, 2, 2.0)
    assert steps(Follower(file)) == [1, 2]
