"""Run the torch checks of `launcher doctor`: `python -m launcher.training.diagnostics.run_checks`.

Writes one line of JSON per check to stdout, and nothing else.
"""

from __future__ import annotations

import sys
from typing import TextIO

from launcher.analysis.doctor.packages import Check
from launcher.training.diagnostics.check import CheckFunction, Passed, run_check
from launcher.training.runtime.parent_watch import exit_with_parent
from launcher.training.runtime.process_output import redirect_stdout, silence_libraries


def main() -> int:
    """Run all checks; if torch cannot be imported, only the check of torch."""
    exit_with_parent()
    silence_libraries()
    report = redirect_stdout()
    _run(report, "torch", _check_torch)
    try:
        from launcher.training.diagnostics import device_checks, package_checks
    except ImportError:  # already reported: without torch nothing else can run
        return 0
    for name, check in (*device_checks.CHECKS, *package_checks.CHECKS):
        _run(report, name, check)
    return 0


def _check_torch() -> Passed:
    from launcher.training.diagnostics.device_checks import check_torch

    return check_torch()


def _run(report: TextIO, name: str, check: CheckFunction) -> None:
    """Write the name of a check, in case the process dies or hangs in it; then run it and write its result."""
    _write(report, Check(name=name, status="begun"))
    _write(report, run_check(name, check))


def _write(report: TextIO, check: Check) -> None:
    report.write(check.model_dump_json() + "\n")
    report.flush()


if __name__ == "__main__":
    sys.exit(main())
