"""`make fuzz`: fuzz every target for FUZZ_SECONDS in all, and print the number of cases.

A case is determined by FUZZ_SEED, its target and its number: `python -m tests.fuzz TARGET NUMBER` runs one again.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.fuzz.run_directory import RunDirectoryFuzzer
from tests.fuzz.targets import CheckpointFuzzer, JudgesFuzzer, ManifestFuzzer, RowsFuzzer

TARGETS: dict[str, type[Any]] = {
    target.name: target for target in (ManifestFuzzer, RunDirectoryFuzzer, RowsFuzzer, JudgesFuzzer, CheckpointFuzzer)
}


@contextmanager
def opened(name: str) -> Iterator[Any]:
    """Set a target up in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="launcher-fuzz-") as folder:
        target = TARGETS[name](Path(folder))
        try:
            yield target
        finally:
            getattr(target, "close", lambda: None)()


def fuzz(name: str, seconds: float, seed: str) -> tuple[int, list[str]]:
    """Run cases of a target for some seconds, at least one; return their number and what was found."""
    found, number = [], 0
    with opened(name) as target:
        deadline = time.monotonic() + seconds
        while not number or time.monotonic() < deadline:
            problem = target.run_case(random.Random(f"{seed}-{name}-{number}"))
            if problem:
                found.append(f"{name!r} {number}: {problem}")
            number += 1
    return number, found


def main() -> int:
    """Fuzz all targets, or run one case again."""
    logging.disable(logging.CRITICAL)
    seed = os.environ.get("FUZZ_SEED", "0")
    if len(sys.argv) == 3:
        name, number = sys.argv[1], int(sys.argv[2])
        with opened(name) as target:
            problem = target.run_case(random.Random(f"{seed}-{name}-{number}"))
        print(problem or "nothing found")
        return int(bool(problem))
    seconds = float(os.environ.get("FUZZ_SECONDS", "60")) / len(TARGETS)
    failures = 0
    for name in TARGETS:
        number, found = fuzz(name, seconds, seed)
        print(f"{name:<14} {number:>8,} cases, {len(found)} problems", flush=True)
        for problem in found[:10]:
            print(problem)
        failures += len(found)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
