"""Instructions on arrays of entities: filters, mappers, groups, orders, pipelines."""

from __future__ import annotations

from experts.generator.conditions import make_condition
from experts.generator.dice import Dice
from experts.generator.domains import Domain, Field
from experts.generator.naming import join_words, pascal
from experts.generator.phrases import extreme_words
from experts.generator.typescript_types import Shape, draw_any, draw_shape, render_condition

Answer = tuple[str, str, str]  # instruction, types given, code


def ask(dice: Dice, name: str, what: str) -> str:
    patterns = ("Write a function {0} that {1}.", "Implement {0}, which {1}.", "I need a function {0} that {1}.")
    return dice.choice((*patterns, "Create a TypeScript function {0} that {1}.")).format(name, what)


def render_function(name: str, parameters: str, result: str, *lines: str) -> str:
    body = "\n".join(f"  {line}" for text in lines for line in text.split("\n"))
    return f"function {name}({parameters}): {result} {{\n{body}\n}}"


def where(dice: Dice, shape: Shape) -> tuple[str, str]:
    """Draw a condition on the item, as text and in code."""
    field = dice.choice(shape.fields[1:] if dice.chance(0.7) else shape.fields)
    condition = make_condition(dice, field)
    return condition.words, render_condition(condition, shape, f"{shape.item}.{shape.property(field)}")


def _over(shape: Shape) -> str:
    return f"{shape.items}: {shape.name}[]"


def filter_items(dice: Dice, domain: Domain) -> Answer:
    shape = draw_any(dice, domain)
    words, code = where(dice, shape)
    name = dice.choice(("select", "filter", "keep", "only", "find")) + shape.plural
    body = f"return {shape.items}.filter(({shape.item}) => {code});"
    instruction = ask(dice, name, f"returns the {shape.entity.plural} {words}")
    return instruction, shape.render(), render_function(name, _over(shape), f"{shape.name}[]", body)


def count_items(dice: Dice, domain: Domain) -> Answer:
    shape = draw_any(dice, domain)
    words, code = where(dice, shape)
    name = dice.choice(("count", "tally")) + shape.plural
    body = f"return {shape.items}.filter(({shape.item}) => {code}).length;"
    instruction = ask(dice, name, f"counts the {shape.entity.plural} {words}")
    return instruction, shape.render(), render_function(name, _over(shape), "number", body)


def ask_any_or_all(dice: Dice, domain: Domain) -> Answer:
    shape = draw_any(dice, domain)
    words, code = where(dice, shape)
    method, start, said = dice.choice((("some", "has", "at least one"), ("every", "are", "every one")))
    name = f"{start}{dice.choice(('Such', 'Matching', 'Fitting'))}{shape.plural}"
    body = f"return {shape.items}.{method}(({shape.item}) => {code});"
    given = f"tells whether {said} of the given {shape.entity.plural} is among the {shape.entity.plural} {words}"
    return ask(dice, name, given), shape.render(), render_function(name, _over(shape), "boolean", body)


def map_items(dice: Dice, domain: Domain) -> Answer:
    """Ask for one property of the items that meet a condition."""
    shape = draw_any(dice, domain)
    field = dice.choice([field for field in shape.fields if not field.optional])
    words, code = where(dice, shape)
    name = f"{dice.choice(('list', 'collect', 'get'))}{pascal(field.name)}Values"
    body = (
        f"return {shape.items}\n  .filter(({shape.item}) => {code})\n"
        f"  .map(({shape.item}) => {shape.item}.{shape.property(field)});"
    )
    result = f'{shape.name}["{shape.property(field)}"][]'
    instruction = ask(dice, name, f"returns the {field.words} of each of the {shape.entity.plural} {words}")
    return instruction, shape.render(), render_function(name, _over(shape), result, body)


def sum_items(dice: Dice, domain: Domain) -> Answer | None:
    shape = draw_any(dice, domain)
    field = shape.draw_quantity(dice)
    if field is None:
        return None
    words, code = where(dice, shape)
    value = f"{shape.item}.{shape.property(field)}"
    filtered = f"const matching = {shape.items}.filter(({shape.item}) => {code});"
    total = f"matching.reduce((sum, {shape.item}) => sum + {value}, 0)"
    if dice.chance(0.5):
        name, what, body = f"total{pascal(field.name)}", "sums", f"return {total};"
    else:
        name, what = f"average{pascal(field.name)}", "averages"
        body = f"return matching.length === 0 ? 0 : {total} / matching.length;"
    ending = " (0 if there are none)" if what == "averages" else ""
    instruction = ask(dice, name, f"{what} the {field.words} of {shape.entity.plural} {words}{ending}")
    return instruction, shape.render(), render_function(name, _over(shape), "number", filtered, body)


def count_groups(dice: Dice, domain: Domain) -> Answer | None:
    shape = draw_any(dice, domain)
    field = shape.draw_category(dice)
    if field is None:
        return None
    name = f"count{shape.plural}By{pascal(field.name)}"
    value = f"{shape.item}.{shape.property(field)}"
    lines = (
        "const counts: Record<string, number> = {};",
        f"for (const {shape.item} of {shape.items}) {{\n  counts[{value}] = (counts[{value}] ?? 0) + 1;\n}}",
        "return counts;",
    )
    instruction = ask(dice, name, f"counts {shape.entity.plural} per {field.words} in a record")
    return instruction, shape.render(), render_function(name, _over(shape), "Record<string, number>", *lines)


def group_items(dice: Dice, domain: Domain) -> Answer | None:
    shape = draw_any(dice, domain)
    field = shape.draw_category(dice)
    if field is None:
        return None
    name = f"group{shape.plural}By{pascal(field.name)}"
    lines = (
        f"const groups = new Map<string, {shape.name}[]>();",
        f"for (const {shape.item} of {shape.items}) {{\n"
        f"  const group = groups.get({shape.item}.{shape.property(field)}) ?? [];\n"
        f"  groups.set({shape.item}.{shape.property(field)}, [...group, {shape.item}]);\n}}",
        "return groups;",
    )
    instruction = ask(dice, name, f"groups {shape.entity.plural} by {field.words} in a Map")
    return instruction, shape.render(), render_function(name, _over(shape), f"Map<string, {shape.name}[]>", *lines)


def index_items(dice: Dice, domain: Domain) -> Answer:
    shape = draw_any(dice, domain)
    field = dice.choice(("id", shape.key))
    name = f"index{shape.plural}{'' if field == 'id' else 'By' + field[0].upper() + field[1:]}"
    body = f"return new Map({shape.items}.map(({shape.item}) => [{shape.item}.{field}, {shape.item}]));"
    kind = shape.id_type if field == "id" else "string"
    words = "id" if field == "id" else shape.entity.key.words
    instruction = ask(dice, name, f"makes a Map from {words} to {shape.entity.words}")
    return instruction, shape.render(), render_function(name, _over(shape), f"Map<{kind}, {shape.name}>", body)


def _comparison(shape: Shape, field: Field, descending: bool) -> str:
    first, second = ("b", "a") if descending else ("a", "b")
    name = shape.property(field)
    if field.is_number:
        return f"(a, b) => {first}.{name} - {second}.{name}"
    return f"(a, b) => {first}.{name}.localeCompare({second}.{name})"


def sort_items(dice: Dice, domain: Domain) -> Answer | None:
    shape = draw_any(dice, domain)
    field = shape.draw(dice, lambda field: field.is_number or field.kind == "date")
    if field is None:
        return None
    descending, limit = dice.chance(0.6), dice.between(2, 20)
    extreme = extreme_words(field, descending)
    name = f"{dice.choice(('top', 'first', 'rank'))}{shape.plural}"
    body = f"return [...{shape.items}].sort({_comparison(shape, field, descending)}).slice(0, {limit});"
    what = f"returns the {limit} {shape.entity.plural} with the {extreme} {field.words}, without changing the input"
    return ask(dice, name, what), shape.render(), render_function(name, _over(shape), f"{shape.name}[]", body)


def pipeline(dice: Dice, domain: Domain) -> Answer | None:
    """Ask to filter, sort and map."""
    shape = draw_any(dice, domain)
    field = shape.draw(dice, lambda field: field.is_number or field.kind == "date")
    if field is None:
        return None
    words, code = where(dice, shape)
    descending = dice.chance(0.5)
    name = f"{shape.item}{pascal(shape.entity.key.name)}List"
    body = (
        f"return {shape.items}\n  .filter(({shape.item}) => {code})\n"
        f"  .sort({_comparison(shape, field, descending)})\n  .map(({shape.item}) => {shape.item}.{shape.key});"
    )
    what = (
        f"takes the {shape.entity.plural} {words}, orders them by {field.words} "
        f"({'descending' if descending else 'ascending'}) and returns each {shape.entity.key.words}"
    )
    return ask(dice, name, what), shape.render(), render_function(name, _over(shape), "string[]", body)


def distinct_values(dice: Dice, domain: Domain) -> Answer | None:
    shape = draw_any(dice, domain)
    field = shape.draw_category(dice)
    if field is None:
        return None
    name = f"{dice.choice(('distinct', 'unique', 'all'))}{pascal(field.name)}Values"
    body = f"return [...new Set({shape.items}.map(({shape.item}) => {shape.item}.{shape.property(field)}))].sort();"
    instruction = ask(dice, name, f"returns every {field.words} of {shape.entity.plural} once, sorted")
    result = f'{shape.name}["{shape.property(field)}"][]'
    return instruction, shape.render(), render_function(name, _over(shape), result, body)


def find_item(dice: Dice, domain: Domain) -> Answer:
    shape = draw_any(dice, domain)
    field = dice.choice([field for field in shape.fields if not field.optional and field.kind != "bool"])
    name = f"{dice.choice(('find', 'get', 'lookUp'))}{shape.name}By{pascal(field.name)}"
    prop = shape.property(field)
    body = f"return {shape.items}.find(({shape.item}) => {shape.item}.{prop} === {prop});"
    parameters = f'{_over(shape)}, {prop}: {shape.name}["{prop}"]'
    instruction = ask(dice, name, f"returns the {shape.entity.words} with a given {field.words}, or undefined")
    return instruction, shape.render(), render_function(name, parameters, f"{shape.name} | undefined", body)


def join_items(dice: Dice, domain: Domain) -> Answer:
    """Ask for the children of a parent, by its id."""
    parent = draw_shape(dice, domain.parent)
    drawn = draw_shape(dice, domain.child, owner=domain.parent)
    child = Shape(drawn.entity, drawn.fields, parent.id_type, drawn.has_null, drawn.owner)
    words, code = where(dice, child)
    name = f"{child.items}Of{parent.name}"
    matched = f"{child.item}.{parent.item}Id === {parent.item}.id && {code}"
    body = f"return {child.items}.filter(({child.item}) => {matched});"
    what = f"returns the {child.entity.plural} of one {parent.entity.words}: those {words}"
    parameters = f"{parent.item}: {parent.name}, {child.items}: {child.name}[]"
    given = f"{render_short(parent)}\n{child.render()}"
    return ask(dice, name, what), given, render_function(name, parameters, f"{child.name}[]", body)


def render_short(shape: Shape) -> str:
    return Shape(shape.entity, shape.fields[:2], shape.id_type, shape.has_null).render()


def describe_item(dice: Dice, domain: Domain) -> Answer | None:
    """Ask for a template string, with a word for missing values."""
    shape = draw_any(dice, domain)
    field = shape.draw(dice, lambda field: field.optional)
    if field is None:
        return None
    other = shape.draw_quantity(dice) or shape.draw_category(dice)
    if other is None:
        return None
    name, blank = f"{dice.choice(('describe', 'format', 'label'))}{shape.name}", dice.choice(("none", "-", "unknown"))
    missing = f'{shape.item}.{shape.property(field)} ?? "{blank}"'
    text = f"${{{shape.item}.{shape.key}}} (${{{shape.item}.{shape.property(other)}}}): ${{{missing}}}"
    parts = join_words([shape.entity.key.words, f"{other.words} in parentheses", f"{field.words} after a colon"])
    what = f'formats {shape.entity.words} as text: {parts} ("{blank}" if missing)'
    code = render_function(name, f"{shape.item}: {shape.name}", "string", f"return `{text}`;")
    return ask(dice, name, what), shape.render(), code
