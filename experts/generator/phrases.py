"""Alternative phrasings of questions, shared by the query languages."""

from __future__ import annotations

from collections.abc import Sequence

from experts.generator.dice import Dice
from experts.generator.domains import Entity, Field
from experts.generator.naming import join_words

_FUNCTION_WORDS = {
    "avg": ("average", "mean"),
    "sum": ("total", "combined"),
    "max": ("highest", "maximum"),
    "min": ("lowest", "minimum"),
}


def function_words(function: str, index: int = 0) -> str:
    return _FUNCTION_WORDS[function][index]


def extreme_words(field: Field, is_highest: bool) -> str:
    if field.kind in ("date", "year"):
        return "latest" if is_highest else "earliest"
    return "highest" if is_highest else "lowest"


def ask_columns(dice: Dice, fields: Sequence[Field], rows: str) -> str:
    names = join_words([field.words for field in fields])
    return dice.choice(
        (
            "List the {0} of {1}.",
            "Show the {0} of all {1}.",
            "Tell me the {0} of {1}.",
            "Give me the {0} for {1}.",
            "I need the {0} of {1}.",
            "For {1}, return the {0}.",
        )
    ).format(names, rows)


def ask_names(dice: Dice, entity: Entity, rows: str) -> str:
    """Ask for the names of rows."""
    patterns = ("Return the {0} of {1}.", "List the {0} of {1}.", "Find the {0} of all {1}.", "Show the {0} of {1}.")
    return dice.choice(patterns).format(entity.key.words, rows)


def ask_count(dice: Dice, rows: str) -> str:
    patterns = ("How many {} are there?", "Count the {}.", "What is the number of {}?", "Tell me how many {} we have.")
    return dice.choice(patterns).format(rows)


def ask_figure(dice: Dice, function: str, field: Field, rows: str) -> str:
    word = function_words(function, dice.below(2))
    patterns = ("What is the {0} {1} of {2}?", "Compute the {0} {1} of {2}.", "Give the {0} {1} over all {2}.")
    return dice.choice(patterns).format(word, field.words, rows)


def ask_per(dice: Dice, group: str, function: str, field: Field, rows: str) -> str:
    """Ask for an aggregate of rows per value of a field."""
    if function == "count":
        patterns = ("For each {0}, count the {1}.", "How many {1} are there per {0}?", "Number of {1} by {0}.")
        return dice.choice(patterns).format(group, rows)
    figure = f"{function_words(function, dice.below(2))} {field.words}"
    patterns = ("What is the {2} of {1} per {0}?", "For each {0}, give the {2} of {1}.", "Show the {2} of {1} by {0}.")
    return dice.choice(patterns).format(group, rows, figure)


def ask_top(dice: Dice, entity: Entity, field: Field, descending: bool, limit: int, words: str) -> str:
    """Ask for the first rows in an order, with the field that orders them."""
    rows = f"{entity.plural} {words}".strip() if limit > 1 else f"{entity.words} {words}".strip()
    extreme = extreme_words(field, descending)
    number = f"{limit} " if limit > 1 else ""
    patterns = (
        "Show the {0} and {1} of the {2}{3} with the {4} {1}.",
        "Which {2}{3} have the {4} {1}? Return the {0} and {1}." if limit > 1 else
        "Which {3} has the {4} {1}? Return the {0} and {1}.",
        "Give the {0} and {1} of the {2}{3}, {4} {1} first.",
    )  # fmt: skip
    return dice.choice(patterns).format(entity.key.words, field.words, number, rows, extreme)
