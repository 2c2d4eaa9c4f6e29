"""A fake worker of the memory grid: replies at once, and dies, fails or hangs on request.

`python -m tests.unit.benchmarks.memory_grid.fake_worker SPEC`; FAKE_WORKER contains `case-name=action`, separated by
commas. Actions: die, hang, fail (an error, then exit) and full (out of memory, then continue).
"""

from __future__ import annotations

import os
import signal
import sys
import time

from benchmarks.memory_grid.cases import GridCase
from benchmarks.memory_grid.grid import CaseReply
from benchmarks.memory_grid.rows import GridRow

ACTIONS = dict(pair.split("=") for pair in os.environ.get("FAKE_WORKER", "").split(",") if pair)


def measure(case: GridCase) -> CaseReply:
    action = ACTIONS.get(case.name, "")
    if action == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "hang":
        time.sleep(600)
    row = GridRow(case=case.name, model=case.base, case_seconds=1.0, versions={"pid": str(os.getpid())}, gpu="fake")
    if action in ("fail", "full"):
        return CaseReply(row=row.model_copy(update={"error": f"{action} on request"}), can_continue=action == "full")
    return CaseReply(
        row=row.model_copy(update={"peak_allocated_bytes": 1 << 30, "predicted_bytes": 1 << 30}), can_continue=True
    )


for line in sys.stdin:
    reply = measure(GridCase.model_validate_json(line))
    print(reply.model_dump_json(), flush=True)
    if not reply.can_continue:
        break
