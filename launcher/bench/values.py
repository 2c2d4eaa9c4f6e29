"""What crosses between the bench and the processes that measure: what to run, and what was seen."""

from __future__ import annotations

from statistics import median

from launcher.plan.model import Plan
from launcher.values import Frozen


class SideSpec(Frozen):
    """One side of a comparison: a plan as a training would run it, and what a block of it is."""

    plan: Plan
    store: str  # the folder of the prepared data
    warm_steps: int
    timed_steps: int


class Ready(Frozen):
    """What a process said once its model stood: what is really active in it."""

    seconds: float  # it took to get there
    attention: str
    compiled: str  # in words; empty: nothing is


class Timing(Frozen):
    """Steps that were timed, one after another, and what the machine showed meanwhile."""

    seconds: tuple[float, ...]
    tokens: tuple[int, ...]  # real ones of each step: padding is no work that counts
    num_skipped: int = 0  # whose numbers were no numbers
    data_wait_share: float | None = None
    mfu: float | None = None  # None: no GPU, or its peak is unknown
    peak_gib: float | None = None  # that torch allocated on the GPU; without one, all that the process held
    utilization: float | None = None  # by the driver, 0 to 1
    watts: float | None = None
    note: str = ""  # what is not as it was asked for

    @property
    def tokens_per_second(self) -> float:
        """Of the median step, so that one stall does not hide the speed."""
        return median(tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True))

    @property
    def step_seconds(self) -> float:
        return median(self.seconds)


class Said(Frozen):
    """A line of a measuring process: one of these."""

    ready: Ready | None = None
    timing: Timing | None = None


class Block(Frozen):
    """Where a timing stands in a comparison."""

    round: int
    side: int
    timing: Timing
