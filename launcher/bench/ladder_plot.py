"""The ladder as a picture: on the left what all rungs up to each make together, on the right each alone."""

from __future__ import annotations

from launcher.bench.comparison_text import format_rate
from launcher.bench.drawing import Box, Drawing, Words
from launcher.bench.ladder_report import Ladder, Step, find_speed, make_steps
from launcher.units import format_percent

_GROUND, _INK, _QUIET, _GRID = (255, 255, 255), (26, 32, 41), (86, 96, 114), (232, 235, 240)
_TOGETHER, _OURS, _ALONE, _LESS = (29, 95, 208), (10, 112, 69), (125, 166, 226), (194, 87, 12)
_WIDTH, _TOP, _ROW, _BAR, _FOOT = 1560, 118, 44, 24, 44
_LEFT, _LEFT_WIDTH = 400, 300  # where the bars on the left begin, and how long the longest is
_RIGHT, _RIGHT_WIDTH, _RIGHT_WORDS = 1230, 210, 1452
_COLUMNS = {"MFU": 980, "busy": 1080, "memory": 1200}  # where each ends
_ROOM = 12


def draw_ladder(ladder: Ladder) -> Drawing:
    steps = make_steps(ladder)
    drawing = Drawing(width=_WIDTH, height=_TOP + _ROW * len(steps) + _FOOT, ground=_GROUND)
    _draw_head(drawing, ladder)
    fastest = max((find_speed(step.record) or 0.0 for step in steps), default=0.0) or 1.0
    largest = max([1.0, *(step.alone_gain for step in steps if step.alone_gain is not None)])
    for place, step in enumerate(steps):
        y = _TOP + _ROW * place + _ROW // 2
        drawing.boxes.append(Box(x=20, y=_TOP + _ROW * place, width=_WIDTH - 40, height=1, colour=_GRID))
        _draw_together(drawing, step, y, fastest)
        _draw_alone(drawing, step, y, largest)
    _draw_one(drawing, largest, len(steps))
    return drawing


def _draw_head(drawing: Drawing, ladder: Ladder) -> None:
    size = f"{ladder.sequences_per_step} sequences of {ladder.sequence_length:,} tokens a step, the same on every rung"
    drawing.words += [
        Words(x=20, y=26, text=f"From an unoptimised loop to the launcher: {ladder.expert}", colour=_INK, size=3),
        Words(x=20, y=58, text=f"{ladder.base} on {ladder.hardware}; {size}", colour=_QUIET),
        Words(x=_LEFT, y=96, text="with all above it: tokens/s, x before", colour=_INK),
        *(Words(x=x, y=96, text=title, colour=_INK, anchor="end") for title, x in _COLUMNS.items()),
        Words(x=_RIGHT, y=96, text="alone: x before", colour=_INK),
    ]


def _draw_together(drawing: Drawing, step: Step, y: int, fastest: float) -> None:
    is_missing = step.record.status == "not here"
    drawing.words.append(Words(x=20, y=y, text=_shorten(step.title, 32), colour=_QUIET if is_missing else _INK))
    speed, timing = find_speed(step.record), step.record.timing
    if speed is None or timing is None:
        reason = "not here" if is_missing else step.record.status
        drawing.words.append(Words(x=_LEFT, y=y, text=_shorten(f"{reason}: {step.record.reason}", 60), colour=_QUIET))
        return
    width = max(2, round(_LEFT_WIDTH * speed / fastest))
    colour = _OURS if step.record.setup is None else _TOGETHER
    drawing.boxes.append(Box(x=_LEFT, y=y - _BAR // 2, width=width, height=_BAR, colour=colour))
    gain = "" if step.gain is None else f"  x{step.gain:.2f}"
    drawing.words.append(Words(x=_LEFT + width + _ROOM, y=y, text=f"{format_rate(speed)}{gain}", colour=_INK))
    facts = (
        "" if timing.mfu is None else format_percent(timing.mfu),
        "" if timing.utilization is None else f"{100 * timing.utilization:.0f} %",
        "" if timing.peak_gib is None else f"{timing.peak_gib:.1f} GiB",
    )
    for x, fact in zip(_COLUMNS.values(), facts, strict=True):
        drawing.words.append(Words(x=x, y=y, text=fact, colour=_INK, anchor="end"))


def _draw_alone(drawing: Drawing, step: Step, y: int, largest: float) -> None:
    if step.alone is None or step.alone.status == "not here":
        return
    if step.alone_gain is None:
        drawing.words.append(Words(x=_RIGHT, y=y, text=_shorten(step.alone.status, 26), colour=_QUIET))
        return
    width = max(2, round(_RIGHT_WIDTH * step.alone_gain / largest))
    colour = _ALONE if step.alone_gain >= 1 else _LESS
    drawing.boxes.append(Box(x=_RIGHT, y=y - _BAR // 2, width=width, height=_BAR, colour=colour))
    drawing.words.append(Words(x=_RIGHT_WORDS, y=y, text=f"x{step.alone_gain:.2f}", colour=_INK))


def _draw_one(drawing: Drawing, largest: float, num_rows: int) -> None:
    """Where a rung alone changes nothing."""
    x = _RIGHT + round(_RIGHT_WIDTH / largest)
    drawing.boxes.append(Box(x=x, y=_TOP, width=1, height=_ROW * num_rows, colour=_QUIET))
    drawing.words.append(Words(x=x, y=_TOP + _ROW * num_rows + 16, text="as before", colour=_QUIET, anchor="end"))


def _shorten(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 3] + "..."
