"""Rejected rows are counted by reason, with some row numbers."""

from __future__ import annotations

from launcher.corpus.rows import BadRow, Rejections, RowFault


def test_reasons_are_counted_with_their_first_lines() -> None:
    rejections = Rejections()
    for number in range(1, 31):
        rejections.add(BadRow(number=number, reason="not an object"))
    rejections.add(BadRow(number=99, reason="not UTF-8"))
    assert rejections.counts == {"not an object": 30, "not UTF-8": 1}
    assert rejections.places["not an object"] == list(range(1, 21))
    assert rejections.places["not UTF-8"] == [99]
    assert rejections.total == 31


def test_reasons_that_quote_the_row_do_not_pile_up() -> None:
    rejections = Rejections()
    for number in range(1000):
        rejections.add(BadRow(number=number, reason=f"a message has an unknown role: {number}"))
    assert len(rejections.counts) == 51
    assert rejections.counts["other reasons"] == 950
    assert rejections.total == 1000


def test_faults_are_kept_however_many_reasons_there_are() -> None:
    rejections = Rejections()
    for number in range(1, 100):
        rejections.add(BadRow(number=number, reason=f"reason {number}"))
    rejections.add(BadRow(number=100, reason="one more", fault=RowFault.TOOL_CALLS))
    assert rejections.faults == {RowFault.OTHER, RowFault.TOOL_CALLS}
