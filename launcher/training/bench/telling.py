"""How a measuring process talks: a line of JSON on what was its stdout, and nothing else there."""

from __future__ import annotations

from collections.abc import Callable

from launcher.errors import ExitCode, LauncherError, first_line, say
from launcher.training.guards import end_with_parents
from launcher.training.quiet import calm_threads, hide_secrets, silence_libraries, take_stdout
from launcher.values import Frozen

Tell = Callable[[Frozen], None]


def run_measuring(action: Callable[[Tell], None]) -> int:
    calm_threads()
    end_with_parents()
    hide_secrets()
    silence_libraries()
    lines = take_stdout()

    def tell(said: Frozen) -> None:
        lines.write(said.model_dump_json(exclude_none=True) + "\n")
        lines.flush()

    try:
        action(tell)
    except LauncherError as error:
        say(f"error: {error}")
        return int(error.exit_code)
    except Exception as error:
        if type(error).__name__ != "OutOfMemoryError":  # by name: torch may be what is missing
            raise
        say(f"error: out of memory: {first_line(error)}")
        return int(ExitCode.DOES_NOT_FIT)
    return int(ExitCode.DONE)
