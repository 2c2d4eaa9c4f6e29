"""Plots of characters, read back."""

from __future__ import annotations

from launcher.analysis.compare.text_plots import Curve, render_plot, render_sparkline


def line(ys: list[float | None], width: int, *, is_unicode: bool = True, last: float | None = None) -> str:
    xs = list(range(len(ys)))
    known = [y for y in ys if y is not None]
    x_range = (0.0, float(len(ys) - 1) if last is None else last)
    return render_sparkline(Curve(xs=xs, ys=ys), width, x_range, (min(known), max(known)), is_unicode=is_unicode)


def test_falling_loss_gives_a_falling_sparkline() -> None:
    assert line([7, 6, 5, 4, 3, 2, 1, 0], 8) == "█▇▆▅▄▃▂▁"
    assert line([7, 6, 5, 4, 3, 2, 1, 0], 8, is_unicode=False) == "#*+=:-._"


def test_a_shorter_run_is_a_shorter_line_and_gaps_are_filled() -> None:
    assert line([0, 1], 6, last=4) == "▁█    "
    assert line([0, 1], 6) == "▁▁▁▁▁█"
    assert line([0, None, 1], 3) == "▁▁█"


def test_flat_curve_is_in_the_middle() -> None:
    assert line([2, 2, 2], 3) == "▅▅▅"


def test_diagonal_is_drawn_as_dots() -> None:
    curve = Curve(xs=[0, 1], ys=[0.0, 1.0])
    field = render_plot([curve], 4, 2, (0, 1), (0, 1))
    assert ["".join(cell.sign for cell in row) for row in field] == ["  ⡠⠊", "⡠⠊  "]


def test_a_shared_character_belongs_to_the_later_curve() -> None:
    flat = [Curve(xs=[0, 1], ys=[y, y]) for y in (0.0, 0.0, 1.0)]
    field = render_plot(flat, 3, 2, (0, 1), (0, 1))
    assert [[cell.curve for cell in row] for row in field] == [[2, 2, 2], [1, 1, 1]]
