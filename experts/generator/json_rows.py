"""Rows of a text, a JSON Schema and the object that the text describes; sometimes broken JSON and its repair."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from experts.generator.dice import Dice
from experts.generator.domains import Domain
from experts.generator.json_objects import Json, Whole, draw_whole, dump
from experts.generator.json_texts import write_text

Row = dict[str, str]
_REPAIR_SHARE = 0.15
_ORDERS = (
    "Repair this JSON:",
    "Fix the JSON so that it fits the schema:",
    "This JSON is broken:",
    "Correct this JSON:",
)


def make_rows(dice: Dice, domains: Sequence[Domain]) -> Iterator[Row]:
    """Yield rows endlessly."""
    while True:
        whole = draw_whole(dice, dice.choice(domains))
        is_repair = dice.chance(_REPAIR_SHARE)
        text = f"{dice.choice(_ORDERS)}\n{_break(dice, whole)}" if is_repair else write_text(dice, whole)
        yield {"text": text, "schema": dump(whole.schema()), "object": dump(whole.value())}


def is_repair(row: Row) -> bool:
    return row["text"].startswith(_ORDERS)


def _break(dice: Dice, whole: Whole) -> str:
    """Return the object with one or two typical syntax errors."""
    tree = whole.value()
    faults = dice.sample([fault for fault in _FAULTS if fault(dice, dump(tree), tree) != dump(tree)], 2)
    text = faults[0](dice, dump(tree), tree)
    if dice.chance(0.4) and _SPELLING.isdisjoint(faults):
        return faults[1](dice, text, tree)
    return text


def _trailing_comma(_dice: Dice, text: str, _tree: Json) -> str:
    return text[:-1] + ",}"


def _missing_end(dice: Dice, text: str, _tree: Json) -> str:
    ends = len(text) - len(text.rstrip("}]"))
    return text[: -dice.between(1, ends)]


def _missing_comma(dice: Dice, text: str, tree: Json) -> str:
    """Remove the comma before a key: `"a":1 "b":2`."""
    key = dice.choice(list(tree)[1:])
    return text.replace(f',"{key}":', f' "{key}":', 1)


def _equals_sign(dice: Dice, text: str, tree: Json) -> str:
    key = dice.choice(list(tree))
    return text.replace(f'"{key}":', f'"{key}"=', 1)


def _unquoted_key(dice: Dice, text: str, tree: Json) -> str:
    key = dice.choice(list(tree))
    return text.replace(f'"{key}":', f"{key}:", 1)


def _comment(dice: Dice, text: str, tree: Json) -> str:
    key = dice.choice(list(tree)[1:])
    note = dice.choice(("/* checked */", "/* todo */", "// see above\n"))
    return text.replace(f'"{key}":', f'{note}"{key}":', 1)


def _python_words(_dice: Dice, text: str, _tree: Json) -> str:
    for word, python in ((":true", ":True"), (":false", ":False"), (":null", ":None")):
        text = text.replace(word, python)
    return text


def _single_quotes(_dice: Dice, text: str, _tree: Json) -> str:
    return text if "'" in text else text.replace('"', "'")


def _unclosed_string(dice: Dice, text: str, tree: Json) -> str:
    """Remove the quotation mark after a key."""
    key = dice.choice(list(tree))
    return text.replace(f'"{key}":', f'"{key}:', 1)


_FAULTS: tuple[Callable[[Dice, str, Json], str], ...] = (
    _trailing_comma, _missing_end, _missing_comma, _equals_sign, _unquoted_key, _comment, _python_words,
    _single_quotes, _unclosed_string,
)  # fmt: skip
_SPELLING = frozenset({_single_quotes})  # changes the text that the others search for
