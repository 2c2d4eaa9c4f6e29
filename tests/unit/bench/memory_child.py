"""Stands in for the process that measures the memory grid: it answers at once, and dies, fails or hangs as it is told.

`python -m tests.unit.bench.memory_child SPEC`; MEMORY_CHILD has `case-name=what` with commas between, what being die,
hang, fail (an error, and the end of the process) or full (out of memory, and it goes on).
"""

from __future__ import annotations

import os
import signal
import sys
import time

from launcher.bench.memory_cases import GridCase
from launcher.bench.memory_grid import Answer
from launcher.bench.memory_rows import GridRow

WAYS = dict(pair.split("=") for pair in os.environ.get("MEMORY_CHILD", "").split(",") if pair)


def answer(case: GridCase) -> Answer:
    way = WAYS.get(case.name, "")
    if way == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "hang":
        time.sleep(600)
    row = GridRow(case=case.name, model=case.base, case_seconds=1.0, versions={"pid": str(os.getpid())}, gpu="made")
    if way in ("fail", "full"):
        return Answer(row=row.model_copy(update={"error": f"{way} as it was told"}), goes_on=way == "full")
    return Answer(
        row=row.model_copy(update={"peak_allocated_bytes": 1 << 30, "predicted_bytes": 1 << 30}), goes_on=True
    )


for line in sys.stdin:
    told = answer(GridCase.model_validate_json(line))
    print(told.model_dump_json(), flush=True)
    if not told.goes_on:
        break
