"""A worker process that echoes its input and its specification: `python -m tests.unit.bench.echo_worker SPEC`."""

from __future__ import annotations

import sys
import time
from pathlib import Path


def main() -> int:
    print("a library's greeting", file=sys.stderr)
    for line in sys.stdin:
        command = line.strip()
        if command == "sleep":
            time.sleep(600)
        if command == "fail":
            print("error: out of memory: 3 GiB more\nhint: none", file=sys.stderr, flush=True)
            return 3
        print(f"{command} {Path(sys.argv[1]).read_text()}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
