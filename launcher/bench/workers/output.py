"""Common main function of measuring processes: replies as lines of JSON on stdout, everything else on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from launcher.core.errors import ExitCode, LauncherError, first_line
from launcher.core.frozen_model import Frozen
from launcher.core.log import configure, get_logger
from launcher.training.runtime.parent_watch import exit_with_parent
from launcher.training.runtime.process_output import (
    limit_thread_spinning,
    redact_output,
    redirect_stdout,
    silence_libraries,
)

log = get_logger(__name__)

Send = Callable[[Frozen], None]
Spec = TypeVar("Spec", bound=Frozen)


def run_worker(spec_type: type[Spec], measure: Callable[[Spec, Send], None]) -> int:
    """Call `measure` with the specification named on the command line, and return the exit code."""
    spec = spec_type.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    limit_thread_spinning()
    exit_with_parent()
    redact_output()
    configure()
    silence_libraries()
    stdout = redirect_stdout()

    def send(reply: Frozen) -> None:
        stdout.write(reply.model_dump_json(exclude_none=True) + "\n")
        stdout.flush()

    try:
        measure(spec, send)
    except LauncherError as error:
        log.error(error)
        return int(error.exit_code)
    except Exception as error:
        if type(error).__name__ != "OutOfMemoryError":  # by name: torch may be the missing module
            raise
        log.error(f"out of memory: {first_line(error)}")
        return int(ExitCode.DOES_NOT_FIT)
    return int(ExitCode.DONE)
