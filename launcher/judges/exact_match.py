"""Judge of labels and short texts: compares an answer with the reference as text."""

from __future__ import annotations

import platform
import unicodedata
from collections.abc import Sequence

from launcher.judges.base import MAX_ANSWER_CHARACTERS, Check, CloseOnExit, ReferenceRow, Verdict, fail_all

# Ends of sentences and quotes; signs and units such as - and % have a meaning.
_PUNCTUATION = ".,;:!?\"'`*\u2018\u2019\u201c\u201d\u201e\u2026\u00ab\u00bb"


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
        checks = {
            "matches": normalize_text(answer) == normalize_text(reference),
            "equal": answer.strip() == reference.strip(),
        }
        return Verdict(checks=checks, reason="" if all(checks.values()) else f"expected {_shorten(reference)}")


def normalize_text(text: str) -> str:
    """Normalize case, whitespace and outer punctuation of a text; a text of punctuation only is kept."""
    plain = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return plain.strip(_PUNCTUATION + " ") or plain


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 80 else line[:77] + "..."
