"""`launcher doctor`: check this machine, an expert's plan on it, or a run."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from launcher.cli.environment import name_variable
from launcher.cli.run_lookup import add_runs_dir, find_run
from launcher.cli.tables import confirm, print_json
from launcher.core.errors import ExitCode, InputError, escape
from launcher.core.log import get_logger
from launcher.core.run_paths import expand_home

log = get_logger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `launcher doctor`."""
    parser.add_argument(
        "expert", type=expand_home, metavar="EXPERT", nargs="?", help="also check whether this expert can train here"
    )
    parser.add_argument("--run", type=expand_home, metavar="RUN", help="also check this run, by id or directory")
    add_runs_dir(parser)
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="override a manifest value"
    )
    parser.add_argument(
        "--profile", choices=("auto", "full", "smoke"), default="auto", help="auto: full with a GPU, smoke without"
    )
    parser.add_argument("--quick", action="store_true", help="skip the micro-benchmarks of torch, packages and disks")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--free", action="store_true", help="ask processes that hold GPU memory to end, no checks")
    parser.add_argument("--yes", action="store_true", help="with --free: do not prompt")


def run(arguments: argparse.Namespace) -> ExitCode:
    """Run the checks and print the report, or free GPU memory."""
    if arguments.free and arguments.json:
        raise InputError("--free and --json cannot be used together: --free runs no checks")
    if arguments.yes and not arguments.free:
        raise InputError("--yes requires --free: without it, doctor asks nothing")
    if arguments.free and (arguments.expert is not None or arguments.run is not None or arguments.quick):
        raise InputError("--free runs no checks: omit the expert, --run and --quick")
    if arguments.overrides and arguments.expert is None:
        raise InputError("--set requires an expert", hint="launcher doctor EXPERT --set KEY=VALUE")
    if arguments.profile != "auto" and arguments.expert is None and not os.environ.get(name_variable("--profile")):
        raise InputError("--profile requires an expert", hint=f"launcher doctor EXPERT --profile {arguments.profile}")
    if arguments.free:
        return _free_memory(ask=not arguments.yes)
    from launcher.analysis.doctor.run_doctor import run_doctor
    from launcher.core.processes import make_dependent_environment
    from launcher.request.request import Request

    request = None
    if arguments.expert is not None:
        request = Request(expert=arguments.expert, overrides=tuple(arguments.overrides), profile=arguments.profile)
    paths = find_run(arguments.run, Path(arguments.runs_dir)) if arguments.run is not None else None
    report = run_doctor(
        request,
        paths,
        Path(arguments.runs_dir) if paths is None else paths.root.parent,
        make_dependent_environment(),
        is_quick=arguments.quick,
        say=_log_progress,
    )
    if arguments.json:
        print_json(report)
    else:
        from launcher.cli.print_doctor import print_report

        print_report(report)
    return report.exit_code


def _free_memory(*, ask: bool) -> ExitCode:
    from launcher.analysis.doctor.free_memory import end_processes, find_holders
    from launcher.analysis.doctor.gpu_checks import probe_gpus

    facts = probe_gpus()
    if facts.error:
        raise InputError(f"--free cannot find the processes that use GPU memory: {facts.error}")
    holders, others = find_holders(facts)
    for text in others:
        print(f"not asked to end: {escape(text)}")
    if not holders:
        print("No process of yours holds GPU memory.")
        return ExitCode.DONE
    print("Processes that hold GPU memory:")
    for text in holders.values():
        print(f"  {escape(text)}")
    if not confirm("Ask them to end (SIGTERM)?", ask):
        return ExitCode.DONE
    alive = end_processes(holders)
    print(f"{len(holders) - len(alive)} of {len(holders)} processes ended.")
    for process in alive:
        print(f"still running: {escape(holders[process])}; end it with kill -9 {process.pid} if necessary")
    return ExitCode.DOCTOR_FOUND_SOMETHING if alive else ExitCode.DONE


def _log_progress(text: str) -> None:
    """Log a progress line, but only if stderr is a terminal."""
    if sys.stderr.isatty():
        log.info(text)
