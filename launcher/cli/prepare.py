"""`launcher prepare`: tokenize, mask, audit and pack an expert's data, once."""

from __future__ import annotations

import argparse
import json
import sys

from launcher.core.errors import ExitCode, InputError
from launcher.request.arguments import add_request_arguments, make_request


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `launcher prepare`."""
    add_request_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the audit as JSON")


def run(arguments: argparse.Namespace) -> ExitCode:
    """Run `launcher prepare`."""
    from launcher.cli.progress import RowProgress
    from launcher.request.request import plan_request

    try:
        from launcher.launch.prepare_data import prepare_planned
    except ModuleNotFoundError as error:
        raise InputError(
            f"preparing data needs the package {error.name}", hint="pip install 'expert-launcher[data]'"
        ) from None

    planned = plan_request(make_request(arguments))
    with RowProgress(planned.plan.data.num_rows) as progress:
        prepared = prepare_planned(planned, progress.report, progress.advance)
    audit = prepared.store.audit
    if arguments.json:
        folder = str(prepared.store.folder)
        json.dump(
            {"store": folder, "hit": prepared.was_cached, "audit": audit.model_dump(mode="json")}, sys.stdout, indent=2
        )
        print()
        return ExitCode.DONE
    from launcher.cli.print_audit import print_audit

    print_audit(planned.plan.expert, audit)
    state = "cached" if prepared.was_cached else f"built in {prepared.seconds:.1f} s"
    print(f"\nPrepared data: {prepared.store.folder} ({state})")
    return ExitCode.DONE
