"""What a trace of some steps says, in words and a short table."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from launcher.units import format_percent

_SHOWN = 10
_LONGEST_NAME = 90
# Parts of a kernel's or an operation's name, in the order in which they are looked for.
_KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("fused pointwise", ("triton_",)),
    ("unpacking", ("_unpack", "dequantize")),  # of a base of 4 or 8 bits: packed_kernels.py, bitsandbytes
    ("attention", ("flash", "attention", "attn", "fmha", "attend")),
    ("loss", ("cross_entropy", "nll_loss", "log_softmax", "_sum_up", "_differentiate")),
    ("optimizer", ("adam", "multi_tensor", "foreach", "optimizer")),
    ("communication", ("nccl", "allreduce", "all_reduce", "reduce_scatter", "all_gather", "gloo", "c10d")),
    ("copies", ("memcpy", "memset", "copy_", "_to_copy")),
    ("matrix products", ("gemm", "addmm", "aten::mm", "aten::bmm", "cutlass", "cublas", "nvjet", "matmul", "linear")),
)
_OTHER = "others"
_OURS = frozenset(
    {
        *("_turn", "_turn_back", "_gate", "_gate_back"),  # layer_kernels.py
        *("_norm", "_norm_back", "_copy", "_drop", "_mix", "_scale", "_scale_back"),  # row_kernels.py
        *("_fill", "_measure", "_take_apart"),  # block_kernels.py
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A kernel on the GPU, or without one an operation's own time on the CPU. Seconds."""

    name: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    name: str
    seconds: float
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileSummary:
    first_step: int
    last_step: int
    seconds: float  # of a GPU: from its first kernel to the end of its last; else on the host's clock
    waited_seconds: float | None  # in which the GPU had nothing to do; None: there is none
    untraced_seconds: float | None  # of as many steps before, as a median: tracing makes steps longer
    costs: tuple[Cost, ...]  # the highest first
    kinds: tuple[Cost, ...]

    @property
    def busy_seconds(self) -> float:
        return sum(cost.seconds for cost in self.kinds)

    @property
    def waiting_share(self) -> float | None:
        """Against steps that nobody traced, where there are some: tracing makes launches longer, but not kernels."""
        if self.waited_seconds is None:
            return None
        kept_busy = self.seconds - self.waited_seconds
        whole = self.seconds if self.untraced_seconds is None else min(self.seconds, self.untraced_seconds)
        return max(0.0, 1.0 - kept_busy / max(1e-9, whole))


def sum_up(
    first_step: int,
    last_step: int,
    seconds: float,
    costs: Iterable[Cost],
    spans: Sequence[Span],
    untraced: Sequence[float] = (),
) -> ProfileSummary:
    """`spans` are those of the GPU; none: `costs` are the CPU's. `untraced`: seconds of steps before."""
    ordered = tuple(sorted(costs, key=lambda cost: cost.seconds, reverse=True))
    if spans:  # the queue was empty when tracing began, and is emptied when it ends: neither belongs to a step
        seconds = max(span.end for span in spans) - min(span.start for span in spans)
    return ProfileSummary(
        first_step=first_step,
        last_step=last_step,
        seconds=seconds,
        waited_seconds=max(0.0, seconds - _union(spans)) if spans else None,
        untraced_seconds=statistics.median(untraced) * (last_step - first_step + 1) if untraced else None,
        costs=ordered,
        kinds=_by_kind(ordered),
    )


def _union(spans: Sequence[Span]) -> float:
    """Streams overlap: a moment in which two kernels run counts once."""
    total, end = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, end))
        end = max(end, span.end)
    return total


def _by_kind(costs: Sequence[Cost]) -> tuple[Cost, ...]:
    seconds: dict[str, float] = {}
    counts: dict[str, int] = {}
    for cost in costs:
        kind = find_kind(cost.name)
        seconds[kind] = seconds.get(kind, 0.0) + cost.seconds
        counts[kind] = counts.get(kind, 0) + cost.count
    kinds = (Cost(name=kind, seconds=seconds[kind], count=counts[kind]) for kind in seconds)
    return tuple(sorted(kinds, key=lambda cost: cost.seconds, reverse=True))


def find_kind(name: str) -> str:
    if name in _OURS:
        return "fused pointwise"
    lowered = name.lower()
    return next((kind for kind, words in _KINDS if any(word in lowered for word in words)), _OTHER)


def render_summary(summary: ProfileSummary) -> str:
    steps = summary.last_step - summary.first_step + 1
    lines = [
        f"# Steps {summary.first_step} to {summary.last_step}",
        "",
        f"{summary.seconds * 1000 / steps:.1f} ms a step. {describe_waiting(summary)}",
        "",
        "| what | ms a step | share | calls a step |",
        "|---|---|---|---|",
        *(_render(cost, summary, steps) for cost in summary.kinds),
        "",
        f"The {min(_SHOWN, len(summary.costs))} costliest:",
        "",
        "| name | ms a step | share | calls a step |",
        "|---|---|---|---|",
        *(_render(cost, summary, steps) for cost in summary.costs[:_SHOWN]),
        "",
        "`trace.json.gz` opens in https://ui.perfetto.dev; `memory.pickle`, of a GPU, in https://docs.pytorch.org/memory_viz.",
    ]
    return "\n".join(lines) + "\n"


def describe_waiting(summary: ProfileSummary) -> str:
    if summary.waited_seconds is None:
        return "There is no GPU: these are operations of the CPU, each without those that it calls."
    share = summary.waiting_share or 0.0
    words = f"The GPU waited for {format_percent(share)} of it"
    if summary.untraced_seconds is not None:
        steps = summary.last_step - summary.first_step + 1
        before = f"{summary.untraced_seconds * 1000 / steps:.1f} ms"
        words = f"Untraced steps took {before}, of which the GPU waited for {format_percent(share)}"
    if share < 0.05:
        return f"{words}: it is the limit, so only less work, or faster kernels, make it faster."
    if share < 0.2:
        return f"{words}: the host keeps it waiting now and then; larger micro-batches help, or torch.compile."
    return f"{words}: the host is the limit. Larger micro-batches, torch.compile, or more loader workers."


def _render(cost: Cost, summary: ProfileSummary, steps: int) -> str:
    name = cost.name.replace("|", "\\|")[:_LONGEST_NAME]
    share = format_percent(cost.seconds / max(1e-9, summary.busy_seconds))
    return f"| `{name}` | {cost.seconds * 1000 / steps:.2f} | {share} | {cost.count / steps:.0f} |"
