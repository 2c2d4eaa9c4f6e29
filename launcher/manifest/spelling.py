"""Which known word was meant: the closest by edit distance, with swapped neighbours counted as one slip."""

from __future__ import annotations

from collections.abc import Iterable


def edit_distance(a: str, b: str) -> int:
    """Optimal string alignment: insert, delete, replace, swap neighbours; each costs one."""
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


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word nearest to `word`, unless even that one is too far to be what was meant."""
    furthest = max(1, len(word) // 3)
    near = (name for name in known if abs(len(name) - len(word)) <= furthest)  # the distance is never less than this
    ranked = sorted((edit_distance(word.lower(), name.lower()), name) for name in near)
    if not ranked or ranked[0][0] > furthest:
        return None
    return ranked[0][1]


def closest_slip(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` is one slip away from. Cheap for words that are none: maps may have many keys."""
    letters = set(word)
    return next(
        (
            name
            for name in known
            if abs(len(name) - len(word)) <= 1 and len(letters ^ set(name)) <= 2 and edit_distance(word, name) == 1
        ),
        None,
    )


def is_swap(word: str, known: str) -> bool:
    """Whether `word` is `known` with two neighbouring letters swapped."""
    differing = [i for i, (a, b) in enumerate(zip(word, known, strict=False)) if a != b]
    return len(word) == len(known) and len(differing) == 2 and edit_distance(word, known) == 1
