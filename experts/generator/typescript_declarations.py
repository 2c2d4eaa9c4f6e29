"""Instructions on types and single values: interfaces, guards, unions, enums, generics, mappers, async functions."""

from __future__ import annotations

from experts.generator.dice import Dice
from experts.generator.domains import Domain, Field
from experts.generator.naming import camel, join_words, pascal, with_article
from experts.generator.typescript_arrays import Answer, ask, render_function, where
from experts.generator.typescript_types import Shape, draw_any, draw_shape, quote, render_interface


def declare_interface(dice: Dice, domain: Domain) -> Answer:
    shape = draw_any(dice, domain)
    described = [f"{shape.property(field)} ({_describe_type(shape, field)})" for field in shape.fields]
    described.insert(0, f"id ({shape.id_type})")
    name = shape.name + dice.choice(("", "Record", "Data", "Dto"))
    ask_for = dice.choice(("Declare an interface {0} with {1}.", "Write the TypeScript interface {0}: {1}."))
    return ask_for.format(name, join_words(described)), "", render_interface(name, shape.members())


def _describe_type(shape: Shape, field: Field) -> str:
    kind = f"one of {', '.join(field.options)}" if field.kind == "one" else shape.type_of(field)
    if not field.optional:
        return kind
    return f"{kind}, or null" if shape.has_null else f"optional {kind}"


def declare_part(dice: Dice, domain: Domain) -> Answer:
    """Ask for Pick, Omit, Partial, Readonly or Required of an interface."""
    shape = draw_any(dice, domain)
    names = [shape.property(field) for field in dice.subset(shape.fields, dice.between(1, len(shape.fields) - 1))]
    union = " | ".join(f'"{name}"' for name in names)
    pattern, words, end = dice.choice(
        (
            ("Pick<{0}, {1}>", "has only {1} of {0}", "Preview"),
            ("Omit<{0}, {1}>", "is {0} without {1}", "Rest"),
            ('Partial<Omit<{0}, "id">>', "has every property of {0} except id, all optional", "Patch"),
            ("Readonly<Pick<{0}, {1}>>", "has only {1} of {0}, all read-only", "View"),
            ("Pick<{0}, {1}> & Partial<{0}>", "is {0} with only {1} required", "Draft"),
        )
    )
    name = shape.name + end
    instruction = f"Declare a type {name} that {words.format(shape.name, join_words(names))}."
    return instruction, shape.render(), f"type {name} = {pattern.format(shape.name, union)};"


def declare_enum(dice: Dice, domain: Domain) -> Answer | None:
    shape = draw_any(dice, domain)
    field = shape.draw(dice, lambda field: field.kind == "one")
    if field is None:
        return None
    options = dice.sample(field.options, dice.between(2, len(field.options)))
    name = pascal(shape.entity.name) + pascal(field.name)
    members = "\n".join(f"  {pascal(option)} = {quote(option)}," for option in options)
    checker = f"is{name}"
    code = (
        f"enum {name} {{\n{members}\n}}\n\n"
        f"function {checker}(text: string): text is {name} {{\n"
        f"  return Object.values<string>({name}).includes(text);\n}}"
    )
    instruction = dice.choice(
        ("Declare a string enum {0} with {1}, and a type guard {2} for strings.", "Write enum {0} ({1}) and guard {2}.")
    )
    return instruction.format(name, join_words(options), checker), "", code


def type_guard(dice: Dice, domain: Domain) -> Answer:
    drawn = draw_any(dice, domain)
    fields = tuple(field for field in drawn.fields if field.kind != "one" and not field.optional)[:3]
    shape = Shape(drawn.entity, fields, drawn.id_type, drawn.has_null)
    name = f"is{shape.name}"
    members = [("id", shape.id_type), *((shape.property(field), shape.type_of(field)) for field in fields)]
    tests = "\n  && ".join(f'typeof item.{prop} === "{kind}"' for prop, kind in members)
    lines = (
        'if (typeof value !== "object" || value === null) {\n  return false;\n}',
        "const item = value as Record<string, unknown>;",
        f"return (\n  {tests}\n);",
    )
    code = render_function(name, "value: unknown", f"value is {shape.name}", *lines)
    instruction = dice.choice(("Write a type guard {0} for {1}.", "Implement the type guard {0} that checks {1}."))
    return instruction.format(name, f"an unknown value against {shape.name}"), shape.render(), code


def discriminated_union(dice: Dice, domain: Domain) -> Answer:
    shapes = [draw_shape(dice, entity) for entity in dice.subset(domain.entities, dice.between(2, 3))]
    name = f"{pascal(domain.name)}{dice.choice(('Item', 'Entry', 'Event', 'Node'))}"
    function = dice.choice(("describe", "label", "title", "show")) + name
    variants, cases, words = [], [], []
    for shape in shapes:
        chosen = dice.choice([field for field in shape.fields[1:] if not field.optional] or [shape.entity.key])
        members = dict.fromkeys([shape.member(shape.entity.key), shape.member(chosen)])
        variants.append(f'  | {{ kind: "{shape.item}"; {"; ".join(members)} }}')
        text = f"${{item.{shape.key}}}: ${{item.{shape.property(chosen)}}}"
        cases.append(f'  case "{shape.item}":\n    return `{text}`;')
        words.append(f"{chosen.words} for {with_article(shape.entity.words)}")
    given = f"type {name} =\n" + "\n".join(variants) + ";"
    body = "switch (item.kind) {\n" + "\n".join(cases) + "\n}"
    keys = join_words(sorted({shape.entity.key.words for shape in shapes}), "or")
    what = f"takes any {name} and returns its {keys}, a colon and the {join_words(words)}"
    return ask(dice, function, what), given, render_function(function, f"item: {name}", "string", body)


def map_to_other(dice: Dice, domain: Domain) -> Answer:
    """Ask to convert one interface to another with different names."""
    shape = draw_any(dice, domain)
    fields = dice.subset([field for field in shape.fields if not field.optional], 2)
    targets = dice.sample(("label", "detail", "info", "value", "caption", "data"), len(fields))
    name, function = f"{shape.name}Row", f"to{shape.name}Row"
    row = render_interface(
        name, [f"{target}: {shape.type_of(field)}" for target, field in zip(targets, fields, strict=True)]
    )
    pairs = [f"{target}: {shape.item}.{shape.property(field)}" for target, field in zip(targets, fields, strict=True)]
    moves = [f"{field.words} to {target}" for target, field in zip(targets, fields, strict=True)]
    code = render_function(function, f"{shape.item}: {shape.name}", name, f"return {{ {', '.join(pairs)} }};")
    what = f"turns {with_article(shape.entity.words)} into a {name}: {join_words(moves)}"
    return ask(dice, function, what), f"{shape.render()}\n{row}", code


def update_item(dice: Dice, domain: Domain) -> Answer:
    shape = draw_any(dice, domain)
    field = dice.choice([field for field in shape.fields if not field.optional])
    prop = shape.property(field)
    name = f"{dice.choice(('with', 'set', 'change'))}{pascal(field.name)}"
    parameters = f'{shape.item}: {shape.name}, {prop}: {shape.name}["{prop}"]'
    what = f"returns a copy of {with_article(shape.entity.words)} with another {field.words}"
    code = render_function(name, parameters, shape.name, f"return {{ ...{shape.item}, {prop} }};")
    return ask(dice, name, what), shape.render(), code


def load_all(dice: Dice, domain: Domain) -> Answer:
    shape = draw_any(dice, domain)
    field = dice.choice([field for field in shape.fields if not field.optional])
    name = f"load{pascal(shape.entity.name)}{pascal(field.name)}List"
    loader = f"type {shape.name}Loader = (id: {shape.id_type}) => Promise<{shape.name}>;"
    result = f'Promise<{shape.name}["{shape.property(field)}"][]>'
    lines = (
        f"const {shape.items} = await Promise.all(ids.map((id) => load(id)));",
        f"return {shape.items}.map(({shape.item}) => {shape.item}.{shape.property(field)});",
    )
    code = "async " + render_function(name, f"ids: {shape.id_type}[], load: {shape.name}Loader", result, *lines)
    what = f"loads the {shape.entity.plural} of all ids in parallel and resolves to each {field.words}"
    return ask(dice, name, what).replace("a function", "an async function"), f"{shape.render()}\n{loader}", code


def load_or_default(dice: Dice, domain: Domain) -> Answer:
    shape = draw_any(dice, domain)
    words, code = where(dice, shape)
    name = f"{dice.choice(('fetch', 'load', 'request'))}{shape.plural}"
    lines = (
        f"try {{\n  const {shape.items} = await load();\n"
        f"  return {shape.items}.filter(({shape.item}) => {code});\n}} catch {{\n  return [];\n}}",
    )
    function = render_function(name, f"load: () => Promise<{shape.name}[]>", f"Promise<{shape.name}[]>", *lines)
    what = f"awaits load and resolves to the {shape.entity.plural} {words}, or to an empty array if it fails"
    return ask(dice, name, what).replace("a function", "an async function"), shape.render(), f"async {function}"


def generic_extreme(dice: Dice, domain: Domain) -> Answer | None:
    """Ask for a generic function over any type that has a property."""
    shape = draw_any(dice, domain)
    field = shape.draw(dice, lambda field: field.is_number or field.kind == "date")
    if field is None:
        return None
    prop, is_highest = shape.property(field), dice.chance(0.5)
    name = f"{'highest' if is_highest else 'lowest'}{pascal(field.name)}"
    better = f"best === undefined || item.{prop} {'>' if is_highest else '<'} best.{prop}"
    lines = (
        "let best: T | undefined;",
        f"for (const item of items) {{\n  if ({better}) {{\n    best = item;\n  }}\n}}",
        "return best;",
    )
    kind = f"<T extends {{ {prop}: {shape.type_of(field)} }}>"
    code = render_function(name + kind, "items: T[]", "T | undefined", *lines)
    word = "greatest" if is_highest else "smallest"
    what = f"returns the item with the {word} {prop} ({shape.type_of(field)}), or undefined"
    return f"Generic over any T with {prop}: {ask(dice, name, what)}", "", code


def generic_group(dice: Dice, domain: Domain) -> Answer:
    shape = draw_any(dice, domain)
    field = dice.choice([field for field in shape.fields if not field.optional and field.kind != "bool"])
    prop, kind = shape.property(field), shape.type_of(field) if field.kind != "one" else "string"
    name = f"{dice.choice(('group', 'bucket', 'split'))}By{pascal(field.name)}"
    lines = (
        f"const groups = new Map<{kind}, T[]>();",
        f"for (const item of items) {{\n  groups.set(item.{prop}, [...(groups.get(item.{prop}) ?? []), item]);\n}}",
        "return groups;",
    )
    code = render_function(f"{name}<T extends {{ {prop}: {kind} }}>", "items: T[]", f"Map<{kind}, T[]>", *lines)
    what = f"groups items of any type T that has {prop} ({kind}) by it, in a Map"
    return ask(dice, name, what).replace("a function", "a generic function"), "", code


def validate_item(dice: Dice, domain: Domain) -> Answer | None:
    shape = draw_any(dice, domain)
    field = shape.draw_quantity(dice)
    if field is None:
        return None
    limit, name = dice.between(max(1, field.low), field.high), f"validate{shape.name}"
    empty, large = f"{shape.entity.key.words} is empty", f"{field.words} is above {limit}"
    lines = (
        "const problems: string[] = [];",
        f'if ({shape.item}.{shape.key}.trim() === "") {{\n  problems.push("{empty}");\n}}',
        f'if ({shape.item}.{shape.property(field)} > {limit}) {{\n  problems.push("{large}");\n}}',
        "return problems;",
    )
    what = f'returns a list of problems: "{empty}" for a blank {shape.entity.key.words}, "{large}"'
    code = render_function(name, f"{shape.item}: {shape.name}", "string[]", *lines)
    return ask(dice, name, what), shape.render(), code


def store_class(dice: Dice, domain: Domain) -> Answer:
    shape = draw_any(dice, domain)
    name = shape.name + dice.choice(("Store", "Registry", "Repository", "Cache"))
    put, get = dice.choice((("add", "get"), ("save", "find"), ("put", "lookUp"), ("register", "byId")))
    code = (
        f"class {name} {{\n  private readonly items = new Map<{shape.id_type}, {shape.name}>();\n\n"
        f"  {put}({shape.item}: {shape.name}): void {{\n    this.items.set({shape.item}.id, {shape.item});\n  }}\n\n"
        f"  {get}(id: {shape.id_type}): {shape.name} | undefined {{\n    return this.items.get(id);\n  }}\n}}"
    )
    instruction = dice.choice(
        (
            "Write a class {0} that keeps {1} by id, with methods {2} and {3}.",
            "Implement class {0}: {2} stores one of the {1} under its id, {3} returns it or undefined.",
        )
    )
    return instruction.format(name, shape.entity.plural, put, get), shape.render(), code


def key_constants(dice: Dice, domain: Domain) -> Answer:
    """Ask for labels of some properties, type-checked by `Record<keyof ...>`."""
    shape = draw_any(dice, domain)
    fields = dice.subset(shape.fields, dice.between(2, 3))
    union = " | ".join(f'"{shape.property(field)}"' for field in fields)
    name = f"{camel(shape.entity.name)}Labels"
    lines = "\n".join(f'  {shape.property(field)}: "{field.words}",' for field in fields)
    code = f'const {name}: Record<keyof Pick<{shape.name}, {union}>, string> = {{\n{lines}\n}};'  # fmt: skip
    names = join_words([shape.property(field) for field in fields])
    instruction = f"Write a constant {name} that maps {names} of {shape.name} to their names in words."
    return instruction, shape.render(), code
