"""A fake worker of the memory grid: replies at once, and dies, fails or hangs on request.

`python -m tests.unit.benchmarks.memory_grid.fake_worker SPEC`; FAKE_WORKER has the name and the action of each case, by
the line that asks for it. Actions: die, hang, fail (an error, then exit) and full (out of memory, then continue).
Imports nothing that takes time to start.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

CASES: dict[str, tuple[str, str]] = json.loads(os.environ["FAKE_WORKER"])


def measure(name: str, action: str) -> dict[str, Any]:
    if action == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "hang":
        time.sleep(600)
    row = {"case": name, "model": "tiny", "case_seconds": 1.0, "versions": {"pid": str(os.getpid())}, "gpu": "fake"}
    if action in ("fail", "full"):
        return {"row": {**row, "error": f"{action} on request"}, "can_continue": action == "full"}
    return {"row": {**row, "peak_allocated_bytes": 1 << 30, "predicted_bytes": 1 << 30}, "can_continue": True}


for line in sys.stdin:
    reply = measure(*CASES[line.strip()])
    print(json.dumps(reply), flush=True)
    if not reply["can_continue"]:
        break
