"""Random values of fields, and their English text."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from experts.generator import domain_data as data
from experts.generator.dice import Dice
from experts.generator.domains import Field

Value = str | int | float | bool


def draw_value(dice: Dice, field: Field) -> Value:
    if field.kind == "bool":
        return dice.chance(0.5)
    if field.is_number:
        return draw_number(dice, field)
    return draw_text(dice, field)


def draw_number(dice: Dice, field: Field) -> int | float:
    if field.kind == "money":
        return dice.between(field.low * 20, field.high * 20) / 20  # steps of 0.05
    if field.kind == "rating":
        return dice.between(field.low * 10, field.high * 10) / 10
    number = dice.between(field.low, field.high)
    return number if field.kind == "year" else round_number(dice, number)


def round_number(dice: Dice, number: int) -> int:
    """Round a large number, as everyday speech mostly does."""
    if number >= 1000 and dice.chance(0.8):
        return number // 100 * 100
    if number >= 100 and dice.chance(0.6):
        return number // 10 * 10
    return number


def draw_text(dice: Dice, field: Field) -> str:
    if field.kind == "one":
        return dice.choice(field.options)
    if field.kind == "date":
        return draw_date(dice)
    return _TEXTS[field.kind](dice)


def draw_date(dice: Dice) -> str:
    return f"{dice.between(2005, 2025)}-{dice.between(1, 12):02}-{dice.between(1, 28):02}"


def _draw_person(dice: Dice) -> str:
    return f"{dice.choice(data.FIRST_NAMES)} {dice.choice(data.LAST_NAMES)}"


def _draw_title(dice: Dice) -> str:
    first, second = dice.choice(data.ADJECTIVES), dice.choice(data.NOUNS)
    return dice.choice((f"{first} {second}", f"{first} {second}", f"The {first} {second}", f"{second} of {first}"))


def _draw_company(dice: Dice) -> str:
    return f"{dice.choice(data.NOUNS)} {dice.choice(data.COMPANY_ENDINGS)}"


def _draw_code(dice: Dice) -> str:
    letters = "".join(dice.choice("ABCDEFGHKLMNPRSTVWXYZ") for _ in range(2))
    return f"{letters}-{dice.between(100, 9999)}" if dice.chance(0.5) else f"{letters}{dice.between(10, 999)}"


def _draw_email(dice: Dice) -> str:
    # example.org is reserved: these addresses do not exist.
    user = f"{dice.choice(data.ADJECTIVES)}.{dice.choice(data.NOUNS)}{dice.between(1, 99)}".lower()
    return f"{user}@example.{dice.choice(('org', 'com', 'net'))}"


_TEXTS: Mapping[str, Callable[[Dice], str]] = {
    "person": _draw_person,
    "title": _draw_title,
    "company": _draw_company,
    "code": _draw_code,
    "email": _draw_email,
    "city": lambda dice: dice.choice(data.CITIES),
    "country": lambda dice: dice.choice(data.COUNTRIES),
}


def format_long_date(iso: str) -> str:
    year, month, day = iso.split("-")
    return f"{int(day)} {data.MONTHS[int(month) - 1]} {year}"


def format_number(value: Value) -> str:
    """Format a number as a person would write it: two decimals for money, if any."""
    return str(int(value)) if isinstance(value, float) and value == int(value) else str(value)
