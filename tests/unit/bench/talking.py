"""A process that is told what to do, as those that measure are: `python -m tests.unit.bench.talking SPEC`."""

from __future__ import annotations

import sys
import time
from pathlib import Path


def main() -> int:
    print("libraries greet", file=sys.stderr)
    for line in sys.stdin:
        word = line.strip()
        if word == "sleep":
            time.sleep(600)
        if word == "fail":
            print("error: out of memory: 3 GiB more\nhint: none", file=sys.stderr, flush=True)
            return 3
        print(f"{word} {Path(sys.argv[1]).read_text()}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
