"""Suggestions for misspelled words, by edit distance."""

from __future__ import annotations

from collections.abc import Iterable


def edit_distance(a: str, b: str) -> int:
    """Return the optimal string alignment distance: insertions, deletions, substitutions, adjacent swaps."""
    before: list[int] = []
    last = list(range(len(b) + 1))
    for i, char_a in enumerate(a, 1):
        row = [i]
        for j, char_b in enumerate(b, 1):
            cost = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (char_a != char_b))
            if i > 1 and j > 1 and char_a == b[j - 2] and a[i - 2] == char_b:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        before, last = last, row
    return last[-1]


def find_closest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word closest to `word`, or None if all are too different."""
    limit, letters = max(1, len(word) // 3), set(word.lower())
    # Two lower bounds of the distance: an edit changes the length by one at most, and the set of letters by two.
    candidates = (
        name for name in known if abs(len(name) - len(word)) <= limit and len(letters ^ set(name.lower())) <= 2 * limit
    )
    ranked = sorted((edit_distance(word.lower(), name.lower()), name) for name in candidates)
    return ranked[0][1] if ranked and ranked[0][0] <= limit else None


def find_typo(word: str, known: Iterable[str]) -> str | None:
    """Return the known word at edit distance 1, or None; fast, because an object may have many keys."""
    letters = set(word)
    return next(
        (
            name
            for name in known
            if abs(len(name) - len(word)) <= 1 and len(letters ^ set(name)) <= 2 and edit_distance(word, name) == 1
        ),
        None,
    )
