"""Measure where the time before the first step goes, from the start of the process."""

from __future__ import annotations

import time

import psutil


class StartupTimer:
    """Durations of consecutive start-up phases; those of a phase repeated after an out-of-memory fallback add up."""

    def __init__(self, start: float) -> None:
        self._last = start
        self.seconds: dict[str, float] = {}

    def end_phase(self, name: str) -> None:
        """Add the time since the end of the previous phase to the phase `name`."""
        now = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def describe(self) -> str:
        """Return the total and all phases of at least 0.1 s."""
        parts = [f"{name} {seconds:.1f}" for name, seconds in self.seconds.items() if round(seconds, 1)]
        return f"{sum(self.seconds.values()):.1f} s: {', '.join(parts)}"


def read_process_start() -> float:
    """Return when this process started, on the monotonic clock, so that imports count as start-up time."""
    return time.monotonic() - max(0.0, time.time() - psutil.Process().create_time())


startup = StartupTimer(read_process_start())
