"""`python -m launcher.training.examining`: tries out what a training will use, each thing by a small test of its own.

A line of JSON for each check goes to stdout, and nothing else does.
"""

from __future__ import annotations

import sys
from typing import TextIO

from launcher.examination import Check
from launcher.training.guards import end_with_parents
from launcher.training.quiet import silence_libraries, take_stdout
from launcher.training.trying import CheckFunction, Found, run_check


def main() -> int:
    end_with_parents()
    silence_libraries()
    report = take_stdout()
    _try_out(report, "torch", _check_torch)
    try:
        from launcher.training import checks_device, checks_packages
    except ImportError:  # told above: without torch there is nothing more to try
        return 0
    for name, check in (*checks_device.CHECKS, *checks_packages.CHECKS):
        _try_out(report, name, check)
    return 0


def _check_torch() -> Found:
    from launcher.training.checks_device import check_torch

    return check_torch()


def _try_out(report: TextIO, name: str, check: CheckFunction) -> None:
    """Announced first: where the process dies or hangs in it, the announcement is what is left."""
    _write(report, Check(name=name, status="begun"))
    _write(report, run_check(name, check))


def _write(report: TextIO, check: Check) -> None:
    report.write(check.model_dump_json() + "\n")
    report.flush()


if __name__ == "__main__":
    sys.exit(main())
