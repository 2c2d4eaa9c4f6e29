"""Progress lines: rate, time left, and a line every ten seconds without a terminal."""

from __future__ import annotations

import logging

import pytest

from launcher.core import progress as module
from launcher.core.progress import Progress


@pytest.mark.parametrize(
    ("total", "done", "shown"),
    [
        (None, 500, "500 rows, 250 rows/s"),
        (1000, 500, "500 of 1,000 rows, 250 rows/s, about 2 s left"),
        (100, 500, "500 rows, 250 rows/s"),
        (40, 1, "1 of 40 rows, 0.5 rows/s, about 78 s left"),
        (40, 0, "0 of 40 rows"),
    ],
)
def test_rate_and_time_left(total: int | None, done: int, shown: str) -> None:
    progress = Progress(total)
    progress.advance(done)
    assert progress._format(2.0) == shown


def test_lines_without_terminal(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(module.log, "propagate", True)
    with caplog.at_level(logging.INFO, logger=module.log.name), Progress(40) as progress:
        for _second in range(25):
            now[0] += 1
            progress.advance(0, "token 7 of at most 512")
        progress.advance(8)
        now[0] += 10
        progress.advance(8)
    assert [record.getMessage() for record in caplog.records] == [
        "0 of 40 rows, token 7 of at most 512",
        "0 of 40 rows, token 7 of at most 512",
        "16 of 40 rows, 0.46 rows/s, about 52 s left",
    ]
