"""Run a subcommand that needs torch: result on stdout, exit code, and user errors without a traceback."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from launcher.core.errors import DoesNotFitError, ExitCode, LauncherError
from launcher.core.installation import explain_missing_module
from launcher.core.log import configure, get_logger
from launcher.training.runtime.process_output import silence_libraries

log = get_logger(__name__)

INTERRUPTED = 130


def run_subcommand(name: str, action: Callable[[], str], *, is_json: bool = False) -> int:
    """Run `action`, print what it returns to stdout and nothing else, and return the exit code.

    SIGTERM and SIGHUP interrupt it like Ctrl-C, so that it removes its temporary files.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, signal.default_int_handler)
    configure()
    silence_libraries()
    try:
        with _stdout_to_stderr():
            result = _call(name, action)
        if result:
            print(result, flush=True)
    except LauncherError as error:
        if is_json:
            _print_json(error)
        log.error(error)
        return int(error.exit_code)
    except BrokenPipeError:  # the reader (head, less) is gone: not an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        log.info("interrupted")
        return INTERRUPTED
    return int(ExitCode.DONE)


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Send stdout to stderr: libraries print there, some on import."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


def _call(name: str, action: Callable[[], str]) -> str:
    try:
        return action()
    except ModuleNotFoundError as error:
        explained = explain_missing_module(error, name)
        if explained is None:
            raise
        raise explained from None
    except Exception as error:
        # By name, because torch may be missing. The CPU allocator raises a plain RuntimeError.
        is_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
        if not is_memory and "can't allocate memory" not in str(error):
            raise
        raise DoesNotFitError(
            f"{name}: the model does not fit into memory",
            hint="use a machine with more memory; `launcher doctor --free` lists processes that hold GPU memory",
        ) from None


def _print_json(error: LauncherError) -> None:
    """Print the error as JSON to stdout, for programs."""
    problems = [{"where": problem.where, "what": problem.what} for problem in error.problems]
    print(json.dumps({"error": error.title, "problems": problems, "hint": error.hint}, indent=2))
