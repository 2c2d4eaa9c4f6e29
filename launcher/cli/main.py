"""`launcher VERB …`: picks the verb, and turns errors into messages and exit codes."""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from launcher import __version__
from launcher.cli import (
    ask,
    bench,
    compare,
    completion,
    dashboard,
    data,
    doctor,
    eval,  # noqa: A004
    export,
    new,
    plan,
    prepare,
    regression,
    rehearse,
    report,
    schema,
    train,
    validate,
)
from launcher.cli.environment import apply_environment
from launcher.cli.output import drop_output
from launcher.errors import ExitCode, LauncherError
from launcher.redaction import redact_tree

_VERBS = {
    "new": new,
    "validate": validate,
    "plan": plan,
    "prepare": prepare,
    "data": data,
    "train": train,
    "rehearse": rehearse,
    "ask": ask,
    "eval": eval,
    "regression": regression,
    "export": export,
    "bench": bench,
    "doctor": doctor,
    "report": report,
    "dashboard": dashboard,
    "compare": compare,
    "schema": schema,
    "completion": completion,
}

_DESCRIPTION = "Turns an expert manifest into a plan, and the plan into accelerate, DeepSpeed and FSDP2 files."
_EPILOG = """\
exit codes: 0 done, 1 a bug of ours, 2 wrong input, 3 does not fit the hardware, 4 the run failed,
5 what was started is not what was planned, 6 the quality gate is closed, 7 doctor found something wrong,
75 stopped: it can be resumed, 130 interrupted

LAUNCHER_<FLAG> sets the default of a flag (LAUNCHER_RUNS_DIR, LAUNCHER_PROFILE, ...), and hardware.json in
~/.config/expert-launcher says what you know of your hardware: docs/CLI.md
"""


_OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


class _Parser(argparse.ArgumentParser):
    def _print_message(self, message: str, file: Any = None) -> None:
        """argparse passes over a stream that cannot be written."""
        if message:
            (file or sys.stderr).write(message)


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
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
    if not _has_streams():
        return int(ExitCode.WRONG_INPUT)
    try:
        code = _run(argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader (head, less) went away: not an error
        drop_output()
        return int(ExitCode.DONE)
    except OSError as error:
        if error.filename is not None or error.errno not in _OUTPUT_ERRORS:  # not of a stream: our bug
            raise
        drop_output()
        print(f"error: the output cannot be written: {error.strerror}", file=sys.stderr)
        return int(ExitCode.WRONG_INPUT)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _run(argv: Sequence[str] | None) -> int:
    words = bench.complete(sys.argv[1:] if argv is None else argv)
    parser = make_parser()
    try:
        apply_environment(parser, words, os.environ)
        arguments = parser.parse_args(words)
    except LauncherError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.exit_code)
    except SystemExit as end:  # after --help or a usage message, which may still lie in a buffer
        return end.code if isinstance(end.code, int) else int(ExitCode.WRONG_INPUT)
    try:
        return int(_VERBS[arguments.verb].run(arguments))
    except LauncherError as error:
        if getattr(arguments, "json", False):
            _print_json(arguments.verb, error)
        sys.stdout.flush()
        print(f"error: {error}", file=sys.stderr)
        return int(error.exit_code)


def _print_json(verb: str, error: LauncherError) -> None:
    """For programs, which read stdout: the same as people read on stderr."""
    verdict = {"valid": False} if verb == "validate" else {}
    problems = [{"where": problem.where, "what": problem.what} for problem in error.problems]
    told = {**verdict, "error": error.title, "problems": problems, "hint": error.hint}
    json.dump(redact_tree(told), sys.stdout, indent=2)
    print()


def _has_streams() -> bool:
    """Python sets a stream to None whose descriptor is closed. Text that cannot be encoded must not stop a plan."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123  (lives as long as the process)
    if sys.stdout is None:
        print("error: the output cannot be written: stdout is closed", file=sys.stderr)
        return False
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    return True
