"""`launcher prepare`: tokenise, mask, audit and pack an expert's data, once."""

from __future__ import annotations

import argparse
import json
import sys

from launcher.arguments import add_request_arguments, make_request
from launcher.errors import ExitCode, InputError

HELP = "tokenise, audit and pack an expert's data; a second call finds it done"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_request_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the audit as JSON")


def run(arguments: argparse.Namespace) -> ExitCode:
    from launcher.cli.progress import RowProgress
    from launcher.inputs import plan_request

    try:
        from launcher.preparing import prepare_planned
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
            {"store": folder, "hit": prepared.was_there, "audit": audit.model_dump(mode="json")}, sys.stdout, indent=2
        )
        print()
        return ExitCode.DONE
    from launcher.cli.show_audit import print_audit

    print_audit(planned.plan.expert, audit)
    state = "found, nothing to do" if prepared.was_there else f"made in {prepared.seconds:.1f} s"
    print(f"\nPrepared data: {prepared.store.folder} ({state})")
    return ExitCode.DONE
