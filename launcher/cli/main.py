"""`launcher VERB …`: picks the verb, and turns errors into messages and exit codes."""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

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
from launcher.cli.environment import apply_environment, find_misspelt
from launcher.cli.output import drop_output, lasting_streams
from launcher.errors import ExitCode, InputError, LauncherError, say
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


# What a file system or its owner forbids: no bug of ours, wherever it shows.
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG)
_OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


class _UsageError(SystemExit):
    """As argparse ends, with what it said."""

    def __init__(self, words: str, program: str) -> None:
        super().__init__(int(ExitCode.WRONG_INPUT))
        self.error = InputError(f"{program}: {words}", hint=f"{program} --help lists what it takes")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """In place of a usage message as long as the verb has flags."""
        raise _UsageError(message, self.prog)

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
        with lasting_streams():
            code = _run(argv)
            sys.stdout.flush()
        return code
    except OSError as error:
        if error.filename is not None and error.errno in _FORBIDDEN:
            print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
            return int(ExitCode.WRONG_INPUT)
        if error.filename is not None or error.errno not in _OUTPUT_ERRORS:  # not of a stream: our bug
            raise
        drop_output(sys.stdout)
        print(f"error: the output cannot be written: {error.strerror}", file=sys.stderr)
        return int(ExitCode.WRONG_INPUT)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _run(argv: Sequence[str] | None) -> int:
    words = bench.complete(sys.argv[1:] if argv is None else argv)
    parser = make_parser()
    try:
        for name, meant in find_misspelt(os.environ):
            say(f"warning: nothing reads the variable {name}; did you mean {meant}?")
        apply_environment(parser, words, os.environ)
        arguments = parser.parse_args(words)
    except LauncherError as error:
        return _refuse(error, words[:1], is_json="--json" in words)
    except _UsageError as end:
        return _refuse(end.error, words[:1], is_json="--json" in words)
    except SystemExit as end:  # after --help or a usage message, which may still lie in a buffer
        return end.code if isinstance(end.code, int) else int(ExitCode.WRONG_INPUT)
    try:
        return int(_VERBS[arguments.verb].run(arguments))
    except LauncherError as error:
        return _refuse(error, [arguments.verb], is_json=getattr(arguments, "json", False))


def _refuse(error: LauncherError, verb: Sequence[str], *, is_json: bool) -> int:
    if is_json:
        _print_json(verb, error)
    sys.stdout.flush()
    print(f"error: {error}", file=sys.stderr)
    return int(error.exit_code)


def _print_json(verb: Sequence[str], error: LauncherError) -> None:
    """For programs, which read stdout: the same as people read on stderr."""
    verdict = {"valid": False} if list(verb) == ["validate"] else {}
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
