"""How a verb that needs torch ends: its result on stdout, an exit code, on a user's mistake a message alone."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from launcher.errors import DoesNotFitError, ExitCode, InputError, LauncherError
from launcher.training.quiet import silence_libraries

INTERRUPTED = 130


def run_verb(name: str, action: Callable[[], str], *, is_json: bool = False) -> int:
    """`action` returns what goes to stdout; nothing else ever does."""
    silence_libraries()
    try:
        with _stdout_kept():
            result = _act(name, action)
        if result:
            print(result, flush=True)
    except LauncherError as error:
        if is_json:
            _print_json(error)
        print(f"error: {error}", file=sys.stderr)
        return int(error.exit_code)
    except BrokenPipeError:  # the reader (head, less) went away: not an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return int(ExitCode.DONE)


@contextmanager
def _stdout_kept() -> Iterator[None]:
    """Libraries greet on stdout, some while they are imported: until we are done, that is stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _act(name: str, action: Callable[[], str]) -> str:
    try:
        return action()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "launcher":  # ours is missing: our bug
            raise
        raise InputError(
            f"{name} needs a package that is not installed: {error.name}", hint="pip install 'expert-launcher[train]'"
        ) from None
    except Exception as error:
        # By name: torch may be what is missing. The CPU allocator says the same in a plain RuntimeError.
        is_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
        if not is_memory and "can't allocate memory" not in str(error):
            raise
        raise DoesNotFitError(f"{name}: the model does not fit into memory", hint="use a machine with more") from None


def _print_json(error: LauncherError) -> None:
    """For programs, which read stdout: the same as people read on stderr."""
    problems = [{"where": problem.where, "what": problem.what} for problem in error.problems]
    print(json.dumps({"error": error.title, "problems": problems, "hint": error.hint}, indent=2))
