"""Texts that describe an object in several styles; the object holds the same facts as values."""

from __future__ import annotations

from collections.abc import Sequence

from experts.generator.dice import Dice
from experts.generator.domains import Field
from experts.generator.json_objects import Item, Json, Record, Whole
from experts.generator.naming import join_words, with_article
from experts.generator.values import draw_date, draw_text, draw_value, format_long_date, format_number


def write_text(dice: Dice, whole: Whole) -> str:
    style = dice.choice((_write_sentences, _write_form, _write_log, _write_mail, _write_form, _write_sentences))
    return style(dice, whole)


def _spell(value: Json, field: Field, is_long: bool) -> str:
    """Format a value as people write it: long dates, thousands separators, two decimals for money."""
    if field.kind == "bool":
        return "yes" if value else "no"
    if field.kind == "date":
        return format_long_date(value) if is_long else str(value)
    if field.kind == "money":
        return f"{value:.2f}"
    if field.kind == "int" and is_long and value >= 1000:
        return f"{value:,}"
    return value if isinstance(value, str) else format_number(value)


def _extra_line(dice: Dice, record: Record) -> list[tuple[str, str]]:
    """Draw a field that is not in the schema, and so must not appear in the object."""
    used = {item.field.name for item in record.items}
    spare = [field for field in record.entity.fields if field.name not in used]
    if not spare or dice.chance(0.6):
        return []
    field = dice.choice(spare)
    return [(field.words, _spell(draw_value(dice, field), field, False))]


def _write_sentences(dice: Dice, whole: Whole) -> str:
    first, *rest = whole.record.items
    name = whole.record.entity.words
    facts = [_state(dice, item) for item in dice.shuffle(rest)]
    opening = dice.choice(("The {0} {1} is on file.", "This is about the {0} {1}.", "We have {2} called {1}."))
    sentences = [opening.format(name, first.value, with_article(name)), *(f"{fact}." for fact in facts if fact)]
    sentences += [f"Its {words} is {value}." for words, value in _extra_line(dice, whole.record)]
    return " ".join([*sentences, *_state_parts(whole)])


def _state(dice: Dice, item: Item) -> str:
    words = item.field.words
    if item.is_missing:
        return dice.choice((f"There is no {words}", f"The {words} is unknown", f"Nobody knows the {words}"))
    if item.field.kind == "bool":
        return f"It is {'' if item.value else 'not '}marked as {words}"
    value = _spell(item.value, item.field, True)
    return dice.choice((f"The {words} is {value}", f"It has {value} as {words}", f"Its {words} is {value}"))


def _state_parts(whole: Whole) -> list[str]:
    if not whole.parts:
        return []
    entity = whole.parts[0].entity
    if whole.is_names:
        return [f"The {entity.plural} are {join_words([part.items[0].value for part in whole.parts])}."]
    if not whole.is_list:
        return [f"The {entity.words} has {_list_items(whole.parts[0].items, ' ', ' and ', True)}."]
    listed = "; ".join(_list_items(part.items, " ", ", ", True) for part in whole.parts)
    return [f"There are {len(whole.parts)} {entity.plural}: {listed}."]


def _list_items(items: Sequence[Item], colon: str, comma: str, is_long: bool) -> str:
    return comma.join(
        f"{item.field.words}{colon}{_spell(item.value, item.field, is_long)}" for item in items if not item.is_missing
    )


def _write_form(dice: Dice, whole: Whole) -> str:
    is_long, blank = dice.chance(0.5), dice.choice(("-", "n/a", "unknown", ""))
    lines = [
        (item.field.words, blank if item.is_missing else _spell(item.value, item.field, is_long))
        for item in whole.record.items
    ]
    lines = dice.shuffle(lines + _extra_line(dice, whole.record))
    mark = dice.choice((": ", " = ", ": "))
    text = [f"{words.capitalize()}{mark}{value}".rstrip() for words, value in lines]
    return "\n".join(text + _form_parts(whole, mark))


def _form_parts(whole: Whole, mark: str) -> list[str]:
    if not whole.parts:
        return []
    entity = whole.parts[0].entity
    if whole.is_names:
        return [f"{entity.plural.capitalize()}{mark}{'; '.join(part.items[0].value for part in whole.parts)}"]
    if not whole.is_list:
        return [f"{entity.words.capitalize()}{mark}{_list_items(whole.parts[0].items, ' ', ', ', False)}"]
    listed = [f"- {_list_items(part.items, ' ', ', ', False)}" for part in whole.parts]
    return [f"{entity.plural.capitalize()}{mark.rstrip()}", *listed]


def _write_log(dice: Dice, whole: Whole) -> str:
    name = whole.record.entity.name
    stamp = f"{draw_date(dice)}T{dice.below(24):02}:{dice.below(60):02}:{dice.below(60):02}Z"
    pairs = [f"{item.field.name}={_log_value(item)}" for item in dice.shuffle(whole.record.items)]
    for number, part in enumerate(whole.parts):
        prefix = f"{part.entity.name}[{number}]" if whole.is_list else part.entity.name
        pairs += [f"{prefix}.{item.field.name}={_log_value(item)}" for item in part.items if not item.is_missing]
    verb = dice.choice(("created", "updated", "imported"))
    return f"{stamp} {dice.choice(('INFO', 'DEBUG', 'NOTICE'))} {name}.{verb} {' '.join(pairs)}"


def _log_value(item: Item) -> str:
    if item.is_missing:
        return "none"
    if item.field.kind == "bool":
        return "true" if item.value else "false"
    return f'"{item.value}"' if isinstance(item.value, str) else format_number(item.value)


def _write_mail(dice: Dice, whole: Whole) -> str:
    sender, receiver = (draw_text(dice, Field("name", "person")).split()[0] for _ in range(2))
    name = whole.record.entity.words
    opening = dice.choice(
        (
            f"please add {with_article(name)} to the list",
            f"here is the {name} you asked for",
            f"can you file this {name}",
        )
    )
    said = _list_items(whole.record.items, " ", ", ", True)
    missing = [f"I do not know the {item.field.words}." for item in whole.record.items if item.is_missing]
    parts = [f"{opening}: {said}.", *missing, *_state_parts(whole)]
    return f"Hi {receiver},\n{' '.join(parts)}\n{dice.choice(('Thanks', 'Best', 'Cheers'))}, {sender}"
