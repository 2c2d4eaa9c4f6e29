"""Conditions on one field, as English text and as a value that each language renders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from experts.generator.dice import Dice
from experts.generator.domains import Field
from experts.generator.naming import join_words, with_article
from experts.generator.values import Value, draw_date, draw_number, draw_text, format_number

Op = Literal[
    "eq", "ne", "gt", "ge", "lt", "le", "between", "in", "contains", "starts", "ends", "year", "null", "not_null",
    "true", "false",
]  # fmt: skip
SIGNS: dict[str, str] = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


@dataclass(frozen=True, slots=True)
class Condition:
    field: Field
    op: Op
    values: tuple[Value, ...]
    words: str  # what follows the noun: "with a price above 20"


def list_ops(field: Field) -> tuple[Op, ...]:
    if field.optional:
        return ("null", "not_null")
    if field.kind == "bool":
        return ("true", "false")
    if field.kind == "date":
        return ("gt", "lt", "ge", "between", "year")
    if field.is_number:
        orders: tuple[Op, ...] = ("gt", "ge", "lt", "le", "between")
        return (
            (*orders, "eq") if field.kind == "year" or field.high <= 100 else orders
        )  # a question never asks for exactly 8612500
    if field.is_category:
        return ("eq", "eq", "ne", "in")
    return ("contains", "starts", "ends", "eq")


def make_condition(dice: Dice, field: Field, ops: Sequence[Op] | None = None) -> Condition:
    op = dice.choice(ops or list_ops(field))
    values = _draw_values(dice, field, op)
    return Condition(field, op, values, dice.choice(_phrases(field, op, values)))


def _draw_values(dice: Dice, field: Field, op: Op) -> tuple[Value, ...]:
    if op in ("null", "not_null", "true", "false"):
        return ()
    if op == "between":
        return _draw_range(dice, field)
    if op == "in":
        return tuple(_draw_distinct(dice, field, dice.between(2, 3)))
    if op == "year":
        return (dice.between(2005, 2025),)
    if op in ("contains", "starts", "ends"):
        return (_draw_part(dice, field, op),)
    return (draw_number(dice, field) if field.is_number else draw_text(dice, field),)


def _draw_range(dice: Dice, field: Field) -> tuple[Value, Value]:
    if field.kind == "date":
        first, second = sorted(_draw_distinct_dates(dice))
        return first, second
    low, high = sorted((draw_number(dice, field), draw_number(dice, field)))
    return low, high + (low == high)


def _draw_distinct_dates(dice: Dice) -> tuple[str, str]:
    first, second = draw_date(dice), draw_date(dice)
    return (first, second) if first != second else ("2010-01-01", second)


def _draw_distinct(dice: Dice, field: Field, count: int) -> list[str]:
    found: list[str] = []
    while len(found) < count:
        value = draw_text(dice, field)
        if value not in found:
            found.append(value)
    return found


def _draw_part(dice: Dice, field: Field, op: Op) -> str:
    """Draw a part of a value that a user might search for: a word, or a few letters at one end."""
    text = draw_text(dice, field)
    if op == "contains":
        return max(text.replace("-", " ").split(), key=len)
    size = dice.between(1, 4)
    return text[:size].rstrip() if op == "starts" else text[-size:].lstrip()


def show(value: Value) -> str:
    return format_number(value) if not isinstance(value, str) else value


def _phrases(field: Field, op: Op, values: tuple[Value, ...]) -> tuple[str, ...]:
    name, shown = field.words, [show(value) for value in values]
    if field.kind == "date":
        return _date_phrases(name, op, shown)
    if op == "between":
        return (f"with {name} between {shown[0]} and {shown[1]}", f"whose {name} lies from {shown[0]} to {shown[1]}")
    if op == "in":
        either = join_words(shown, "or")
        return (f"whose {name} is {either}", f"with {name} in {', '.join(shown)}")
    if not values:
        return _valueless_phrases(name, op)
    return tuple(phrase.format(name=name, value=shown[0]) for phrase in _PHRASES[op])


def _date_phrases(name: str, op: Op, shown: Sequence[str]) -> tuple[str, ...]:
    words = {"gt": "after", "lt": "before", "ge": "on or after", "year": "in", "between": "between"}[op]
    when = f"{words} {' and '.join(shown)}"
    if name.startswith("date "):  # date released: "released after ..."
        return (f"{name.removeprefix('date ')} {when}", f"whose {name} is {when}")
    return (f"with {name} {when}", f"whose {name} is {when}")


def _valueless_phrases(name: str, op: Op) -> tuple[str, ...]:
    return {
        "null": (f"without {with_article(name)}", f"that have no {name}", f"whose {name} is missing"),
        "not_null": (f"that have {with_article(name)}", f"whose {name} is known"),
        "true": (f"marked as {name}", f"where {name} is true"),
        "false": (f"not marked as {name}", f"where {name} is false"),
    }[op]


_PHRASES: dict[str, tuple[str, ...]] = {
    "eq": ("whose {name} is {value}", "with {name} {value}", "with {name} equal to {value}"),
    "ne": ("whose {name} is not {value}", "with {name} other than {value}"),
    "gt": ("with {name} above {value}", "whose {name} is greater than {value}", "with {name} over {value}"),
    "ge": ("with {name} of at least {value}", "whose {name} is {value} or more"),
    "lt": ("with {name} below {value}", "whose {name} is less than {value}", "with {name} under {value}"),
    "le": ("with {name} of at most {value}", "whose {name} is {value} or less"),
    "contains": ("whose {name} contains '{value}'", "with '{value}' in the {name}"),
    "starts": ("whose {name} starts with '{value}'", "with {name} beginning with '{value}'"),
    "ends": ("whose {name} ends with '{value}'", "with {name} ending in '{value}'"),
}
