"""How a measuring process talks: a line of JSON on what was its stdout, and nothing else there."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TextIO

from launcher.errors import ExitCode, LauncherError
from launcher.training.guards import end_with_parents
from launcher.training.quiet import hide_secrets, silence_libraries
from launcher.values import Frozen

Tell = Callable[[Frozen], None]
# As launcher/train.py has it: threads that wait shall soon sleep, not spin while others compute.
_SPIN_VARIABLE, _SPINS = "GOMP_SPINCOUNT", "2000"


def run_measuring(action: Callable[[Tell], None]) -> int:
    os.environ.setdefault(_SPIN_VARIABLE, _SPINS)
    end_with_parents()
    hide_secrets()
    silence_libraries()
    lines = _take_stdout()

    def tell(said: Frozen) -> None:
        lines.write(said.model_dump_json(exclude_none=True) + "\n")
        lines.flush()

    try:
        action(tell)
    except LauncherError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return int(error.exit_code)
    except Exception as error:
        if type(error).__name__ != "OutOfMemoryError":  # by name: torch may be what is missing
            raise
        print(f"error: out of memory: {str(error).splitlines()[0][:300]}", file=sys.stderr, flush=True)
        return int(ExitCode.DOES_NOT_FIT)
    return int(ExitCode.DONE)


def _take_stdout() -> TextIO:
    """Libraries greet on stdout, and so do their compilers: from here on that is stderr."""
    kept = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(kept, "w", encoding="utf-8")
