"""Messages between `launcher bench` and its worker processes: what to measure, and the results."""

from __future__ import annotations

from statistics import median

from launcher.core.choices import AttentionBackend
from launcher.core.frozen_model import Frozen
from launcher.plan.calibration import AttentionShape
from launcher.plan.model import Plan


class VariantSpec(Frozen):
    """One variant of an A/B test: a plan as a training would run it, and the length of a block."""

    plan: Plan
    store: str  # folder of the prepared data
    warmup_steps: int
    timed_steps: int


class AttentionSpec(Frozen):
    """One attention backend, and a micro-batch of packed documents."""

    backend: AttentionBackend
    shape: AttentionShape
    num_sequences: int
    sequence_length: int
    mean_tokens: int  # per document


class AttentionTiming(Frozen):
    """Milliseconds of one layer's attention, and how it differs from FP32."""

    forward_ms: float
    backward_ms: float
    difference: float  # relative, the largest of output and gradients
    is_deterministic: bool

    @property
    def milliseconds(self) -> float:
        """Forward and backward."""
        return self.forward_ms + self.backward_ms


class Ready(Frozen):
    """First message of an A/B worker, sent once its model is built: what is active in the live process."""

    seconds: float  # taken to build
    attention: str
    compiled: str  # description; empty: nothing is compiled


class Timing(Frozen):
    """Timed steps of one block and the GPU's state meanwhile."""

    seconds: tuple[float, ...]
    tokens: tuple[int, ...]  # per step, without padding
    num_skipped: int = 0  # steps with non-finite loss or gradients
    data_wait_share: float | None = None
    mfu: float | None = None  # None: no GPU, or its peak is unknown
    peak_gib: float | None = None  # allocated by torch on the GPU; without a GPU, the process's peak RSS
    utilization: float | None = None  # GPU utilization reported by the driver, 0 to 1
    watts: float | None = None
    note: str = ""  # how the measurement deviates from the requested one

    @property
    def tokens_per_second(self) -> float:
        """Median over the steps, so that one stall does not hide the speed."""
        return median(tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True))

    @property
    def step_seconds(self) -> float:
        """Median step time."""
        return median(self.seconds)


class Reply(Frozen):
    """A line that a worker writes: either field is set."""

    ready: Ready | None = None
    timing: Timing | None = None


class Block(Frozen):
    """A timing with its position in an A/B test."""

    round: int
    variant: int
    timing: Timing
