"""Plot of an ablation: cumulative speed of each stage on the left, its gain alone on the right."""

from __future__ import annotations

from importlib.util import find_spec
from io import BytesIO

from launcher.bench.ablation_report import Ablation, StageGain, compute_gains, describe, get_speed
from launcher.bench.result import format_rate

INSTALL_HINT = "no plot: matplotlib is not installed; pip install 'expert-launcher[plot]'"
_CUMULATIVE, _LAUNCHER, _ALONE, _SLOWER = "#1d5fd0", "#0a7045", "#7da6e2", "#c2570c"


def can_plot() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def render_png(ablation: Ablation) -> bytes:
    """Render the plot; needs matplotlib."""
    from matplotlib.figure import Figure

    gains = compute_gains(ablation)
    figure = Figure(figsize=(13, 1.6 + 0.42 * len(gains)), layout="constrained")
    figure.suptitle(f"Ablation: {ablation.expert}\n{describe(ablation)}", fontsize=10)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(2, 1))
    rows = range(len(gains))
    speeds = [get_speed(gain.record) or 0.0 for gain in gains]
    left.barh(rows, speeds, color=[_LAUNCHER if gain.record.config is None else _CUMULATIVE for gain in gains])
    left.set_yticks(rows, [gain.title for gain in gains])
    left.invert_yaxis()
    left.set_xlabel("tokens/s with all stages above")
    alone = [gain.alone_gain or 0.0 for gain in gains]
    right.barh(rows, alone, color=[_ALONE if gain >= 1 else _SLOWER for gain in alone])
    right.axvline(1.0, color="gray", linewidth=1)
    right.set_xlabel("alone: speed relative to the baseline")
    for row, gain in enumerate(gains):
        left.annotate(_label(gain), (speeds[row], row), (4, 0), textcoords="offset points", va="center", fontsize=8)
        if gain.alone is not None and gain.alone.status != "unavailable":
            text = gain.alone.status if gain.alone_gain is None else f"x{gain.alone_gain:.2f}"
            right.annotate(text, (alone[row], row), (4, 0), textcoords="offset points", va="center", fontsize=8)
    for axes in (left, right):
        axes.margins(x=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def _label(gain: StageGain) -> str:
    speed, timing = get_speed(gain.record), gain.record.timing
    if speed is None or timing is None:
        return gain.record.status
    ratio = "" if gain.gain is None else f"  x{gain.gain:.2f}"
    memory = "" if timing.peak_gib is None else f"  {timing.peak_gib:.1f} GiB"
    return f"{format_rate(speed)}{ratio}{memory}"
