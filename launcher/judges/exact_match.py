"""Judge of labels and short texts: compares an answer with the reference as text."""

from __future__ import annotations

import platform
import unicodedata
from collections.abc import Sequence

from launcher.judges.base import (
    MAX_ANSWER_CHARACTERS,
    Check,
    CloseOnExit,
    ReferenceRow,
    Verdict,
    fail_all,
    strip_code_fence,
)

# Ends of sentences, and quotes or emphasis around a text. Other signs have a meaning: -5, 50%, .5, A*.
_ENDS = ".,;:!?\u2026 "
_QUOTES = str.maketrans(dict.fromkeys("\u201c\u201d\u201e\u00ab\u00bb", '"') | dict.fromkeys("\u2018\u2019\u201a", "'"))
_AROUND, _MAX_AROUND = "\"'`*", 4
# Characters that NFKC would replace by others of another meaning: in x² and ½ by digits.
_KEPT = ("<super>", "<sub>", "<fraction>", "<circle>")


class ExactMatchJudge(CloseOnExit):
    """Compares texts. Nothing in an answer is executed or parsed."""

    main_check = "matches"

    def __init__(self) -> None:
        checker = f"Python {platform.python_version()}"
        self.checks = (
            Check(name="matches", title="equals the reference, except case, spaces, quotes", checker=checker),
            Check(name="equal", title="equals the reference", checker=checker),
        )

    def judge(self, rows: Sequence[ReferenceRow], answers: Sequence[str]) -> list[Verdict]:
        """Return the verdict on each answer."""
        return [self._compare(row.reference, answer) for row, answer in zip(rows, answers, strict=True)]

    def _compare(self, reference: str, answer: str) -> Verdict:
        if len(answer) > MAX_ANSWER_CHARACTERS:
            return fail_all(self.checks, f"{len(answer):,} characters: too long")
        answer = strip_code_fence(answer)
        checks = {
            "matches": normalize_text(answer) == normalize_text(reference),
            "equal": answer.strip() == reference.strip(),
        }
        return Verdict(checks=checks, reason="" if all(checks.values()) else f"expected {_shorten(reference)}")


def normalize_text(text: str) -> str:
    """Normalize case, whitespace, quotes and the punctuation at the end of a text; one of punctuation only is kept."""
    plain = " ".join("".join(map(_normalize_character, unicodedata.normalize("NFC", text))).casefold().split())
    bare = plain = plain.translate(_QUOTES)
    for _ in range(_MAX_AROUND):
        bare = bare.rstrip(_ENDS)
        if len(bare) > 2 and bare[0] == bare[-1] and bare[0] in _AROUND:
            bare = bare[1:-1].strip()
    return bare.rstrip(_ENDS) or plain


def _normalize_character(char: str) -> str:
    is_kept = char.isascii() or unicodedata.decomposition(char).startswith(_KEPT)
    return char if is_kept else unicodedata.normalize("NFKC", char)


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 80 else line[:77] + "..."
