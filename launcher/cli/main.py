"""`launcher VERB …`: picks the verb, and turns errors into messages and exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from launcher import __version__
from launcher.cli import data, plan, prepare, schema, train, validate
from launcher.errors import ExitCode, LauncherError

_VERBS = {"validate": validate, "plan": plan, "prepare": prepare, "data": data, "train": train, "schema": schema}

_DESCRIPTION = "Turns an expert manifest into a plan, and the plan into accelerate, DeepSpeed and FSDP2 files."
_EPILOG = """\
exit codes: 0 done, 1 a bug of ours, 2 wrong input, 3 does not fit the hardware
"""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="launcher",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"expert-launcher {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, module in _VERBS.items():
        verb = verbs.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(verb)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = make_parser().parse_args(argv)
    try:
        code = int(_VERBS[arguments.verb].run(arguments))
        sys.stdout.flush()
        return code
    except LauncherError as error:
        sys.stdout.flush()
        print(f"error: {error}", file=sys.stderr)
        return int(error.exit_code)
    except BrokenPipeError:
        # The reader (head, less) went away: not an error. Nothing may be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(ExitCode.DONE)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
