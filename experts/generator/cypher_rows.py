"""Questions on a graph and their Cypher."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from experts.generator.conditions import SIGNS, Condition, make_condition
from experts.generator.cypher_graph import Node, Subject, draw_graph
from experts.generator.dice import Dice
from experts.generator.domains import Domain, Entity, Field, Link
from experts.generator.naming import join_words
from experts.generator.phrases import (
    ask_columns,
    ask_count,
    ask_figure,
    ask_names,
    ask_per,
    ask_top,
    function_words,
)
from experts.generator.values import Value, draw_value, format_number

Row = dict[str, str]
Answer = tuple[str, str]  # question, Cypher


Intent = Callable[[Dice, Subject], Answer | None]  # None: not possible for this graph


def make_rows(dice: Dice, domains: Sequence[Domain]) -> Iterator[Row]:
    """Yield rows endlessly. Intents alternate, so that difficult ones are as frequent as easy ones."""
    while True:
        for intent in _INTENTS:
            subject = _draw_subject(dice, dice.choice(domains), intent)
            answer = intent(dice, subject)
            if answer:
                yield {"question": answer[0], "schema": subject.graph.render(), "cypher": answer[1]}


def _draw_subject(dice: Dice, domain: Domain, intent: Intent) -> Subject:
    if intent in _LOOPS:
        wanted: tuple[Link, ...] = (domain.loop,)
    elif intent in _RECORDS:
        wanted = (domain.meets,)
    else:
        wanted = (domain.owns, domain.meets)
    link = dice.choice(wanted)
    rest = [other for other in domain.links if other is not link]
    graph = draw_graph(dice, domain, [link, *dice.sample(rest, dice.choice((0, 1, 1)))])
    edge = graph.edge_of(link)
    near, far = (edge.source, edge.target) if dice.chance(0.5) else (edge.target, edge.source)
    return Subject(graph, edge, near, far)


def quote(value: Value) -> str:
    if isinstance(value, str):
        return f'"{value}"' if "'" in value else f"'{value}'"
    return str(value).lower() if isinstance(value, bool) else format_number(value)


def render_condition(condition: Condition, name: str) -> str:
    op, field = condition.op, condition.field
    values = [f"date({quote(value)})" if field.kind == "date" else quote(value) for value in condition.values]
    if op in SIGNS:
        return f"{name} {SIGNS[op]} {values[0]}"
    if op == "year":
        return f"{name}.year = {condition.values[0]}"
    return f"{name} IN [{', '.join(values)}]" if op == "in" else _CONDITIONS[op].format(name, *values)


_CONDITIONS: dict[str, str] = {
    "eq": "{0} = {1}",
    "ne": "{0} <> {1}",
    "between": "{0} >= {1} AND {0} <= {2}",
    "contains": "{0} CONTAINS {1}",
    "starts": "{0} STARTS WITH {1}",
    "ends": "{0} ENDS WITH {1}",
    "null": "{0} IS NULL",
    "not_null": "{0} IS NOT NULL",
    "true": "{0} = true",
    "false": "{0} = false",
}


def _where(dice: Dice, node: Node, variable: str) -> tuple[str, str]:
    """Draw a condition on a property of the node, as text and in Cypher."""
    field = dice.choice(node.fields[1:] if dice.chance(0.7) else node.fields)
    condition = make_condition(dice, field)
    return condition.words, render_condition(condition, f"{variable}.{node.property(field)}")


def _draw(dice: Dice, fields: Sequence[Field], test: Callable[[Field], bool]) -> Field | None:
    fitting = [field for field in fields if test(field)]
    return dice.choice(fitting) if fitting else None


def _is_quantity(field: Field) -> bool:
    return field.is_quantity


def _named(dice: Dice, entity: Entity) -> Value:
    return draw_value(dice, entity.key)


def _returns(node: Node, variable: str, fields: Sequence[Field]) -> str:
    return ", ".join(f"{variable}.{node.property(field)}" for field in fields)


def _list_nodes(dice: Dice, subject: Subject) -> Answer:
    node, name = subject.near, subject.near.variable
    fields = dice.subset(node.fields, dice.choice((1, 2, 2, 3)))
    words, where = _where(dice, node, name)
    question = ask_columns(dice, fields, f"{node.entity.plural} {words}")
    return question, f"MATCH ({name}:{node.label}) WHERE {where} RETURN {_returns(node, name, fields)}"


def _list_with_two_conditions(dice: Dice, subject: Subject) -> Answer | None:
    node, name = subject.near, subject.near.variable
    (first_words, first), (second_words, second) = _where(dice, node, name), _where(dice, node, name)
    if first.split()[0] == second.split()[0] or " AND " in first + second:
        return None
    joined = dice.choice(("and", "and", "or"))
    question = ask_names(dice, node.entity, f"{node.entity.plural} {first_words} {joined} {second_words}")
    where = f"{first} {joined.upper()} {second}"
    return question, f"MATCH ({name}:{node.label}) WHERE {where} RETURN {name}.{node.key}"


def _list_by_text(dice: Dice, subject: Subject) -> Answer:
    node, name = subject.near, subject.near.variable
    condition = make_condition(dice, node.entity.key, ("contains", "starts", "ends"))
    fields = dice.subset(node.fields, dice.choice((1, 2)))
    question = ask_columns(dice, fields, f"{node.entity.plural} {condition.words}")
    where = render_condition(condition, f"{name}.{node.key}")
    return question, f"MATCH ({name}:{node.label}) WHERE {where} RETURN {_returns(node, name, fields)}"


def _list_sorted(dice: Dice, subject: Subject) -> Answer | None:
    node, name = subject.near, subject.near.variable
    field = _draw(dice, node.fields, lambda field: field.is_number or field.kind == "date")
    if field is None:
        return None
    descending, limit = dice.chance(0.6), dice.between(1, 20)
    words, where = _where(dice, node, name) if dice.chance(0.4) else ("", "")
    question = ask_top(dice, node.entity, field, descending, limit, words)
    filtered, ordered = f" WHERE {where}" if where else "", f"{name}.{node.property(field)}"
    order = f"ORDER BY {ordered}{' DESC' if descending else ''} LIMIT {limit}"
    return question, f"MATCH ({name}:{node.label}){filtered} RETURN {name}.{node.key}, {ordered} {order}"


def _count_nodes(dice: Dice, subject: Subject) -> Answer:
    node, name = subject.near, subject.near.variable
    words, where = _where(dice, node, name)
    question = ask_count(dice, f"{node.entity.plural} {words}")
    return question, f"MATCH ({name}:{node.label}) WHERE {where} RETURN count({name})"


def _count_distinct(dice: Dice, subject: Subject) -> Answer | None:
    near, far = subject.names
    field = _draw(dice, subject.near.fields[1:], lambda field: field.is_text)
    if field is None:
        return None
    words, where = _where(dice, subject.far, far)
    rows = f"{subject.near.entity.plural} {subject.verb} {subject.far.entity.plural} {words}"
    question = dice.choice(("How many different {0} values do {1} have?", "Count the distinct {0} of {1}."))
    counted = f"count(DISTINCT {near}.{subject.near.property(field)})"
    return question.format(field.words, rows), f"MATCH {subject.full_pattern()} WHERE {where} RETURN {counted}"


def _figure(dice: Dice, subject: Subject) -> Answer | None:
    node, name = subject.near, subject.near.variable
    field = _draw(dice, node.fields, _is_quantity)
    if field is None:
        return None
    function, (words, where) = dice.choice(_FUNCTIONS), _where(dice, node, name)
    question = ask_figure(dice, function, field, f"{node.entity.plural} {words}")
    figure = f"{function}({name}.{node.property(field)})"
    return question, f"MATCH ({name}:{node.label}) WHERE {where} RETURN {figure}"


_FUNCTIONS = ("avg", "sum", "max", "min")


def _group(dice: Dice, subject: Subject) -> Answer | None:
    node, name = subject.near, subject.near.variable
    group = _draw(dice, node.fields, lambda field: field.is_category)
    field = _draw(dice, node.fields, _is_quantity)
    if group is None or field is None:
        return None
    function = dice.choice(("count", *_FUNCTIONS))
    figure = f"count({name})" if function == "count" else f"{function}({name}.{node.property(field)})"
    words, where = _where(dice, node, name) if dice.chance(0.5) else ("", "")
    if group.words in words:
        return None
    question = ask_per(dice, group.words, function, field, f"{node.entity.plural} {words}".strip())
    filtered = f" WHERE {where}" if where else ""
    return question, f"MATCH ({name}:{node.label}){filtered} RETURN {name}.{node.property(group)}, {figure}"


def _above_average(dice: Dice, subject: Subject) -> Answer | None:
    node, name = subject.near, subject.near.variable
    field = _draw(dice, node.fields, _is_quantity)
    if field is None:
        return None
    word, sign = dice.choice((("above", ">"), ("below", "<")))
    fields = dice.subset(node.fields, dice.choice((1, 2)))
    question = ask_columns(dice, fields, f"{node.entity.plural} with {field.words} {word} the average")
    match, ordered = f"MATCH ({name}:{node.label})", f"{name}.{node.property(field)}"
    return question, (
        f"{match} WITH avg({ordered}) AS mean {match} WHERE {ordered} {sign} mean RETURN {_returns(node, name, fields)}"
    )


def _neighbours(dice: Dice, subject: Subject) -> Answer:
    """Ask for the neighbours of a node given by name."""
    near, far = subject.names
    fields = dice.subset(subject.near.fields, dice.choice((1, 2)))
    called = _named(dice, subject.far.entity)
    rows = f"{subject.near.entity.plural} {subject.verb} the {subject.far.entity.words} {called}"
    selected = f"{far}:{subject.far.label} {{{subject.far.key}: {quote(called)}}}"
    pattern = subject.pattern(f"{near}:{subject.near.label}", selected)
    return ask_columns(dice, fields, rows), f"MATCH {pattern} RETURN {_returns(subject.near, near, fields)}"


def _joined(dice: Dice, subject: Subject) -> Answer:
    near, far = subject.names
    words, where = _where(dice, subject.far, far)
    rows = f"{subject.near.entity.plural} {subject.verb} {subject.far.entity.plural} {words}"
    cypher = f"MATCH {subject.full_pattern()} WHERE {where} RETURN DISTINCT {near}.{subject.near.key}"
    return ask_names(dice, subject.near.entity, rows), cypher


def _pairs(dice: Dice, subject: Subject) -> Answer:
    near, far = subject.names
    words, where = _where(dice, subject.near, near)
    rows = f"{subject.near.entity.plural} {words}"
    keys = join_words([subject.near.entity.key.words, subject.far.entity.key_words])
    question = dice.choice(("List the {0} of {1}.", "For {1}, show the {0}.")).format(keys, rows)
    returned = f"{near}.{subject.near.key}, {far}.{subject.far.key}"
    return question, f"MATCH {subject.full_pattern()} WHERE {where} RETURN {returned}"


def _per_neighbour(dice: Dice, subject: Subject) -> Answer | None:
    near, far = subject.names
    field = _draw(dice, subject.far.fields, _is_quantity)
    if field is None or not subject.has_many:
        return None
    function = dice.choice(("count", *_FUNCTIONS))
    figure = f"count({far})" if function == "count" else f"{function}({far}.{subject.far.property(field)})"
    question = ask_per(dice, subject.near.entity.key_words, function, field, subject.far.entity.plural)
    words, where = _where(dice, subject.near, near)
    question = f"{question} Only {subject.near.entity.plural} {words}."
    return question, f"MATCH {subject.full_pattern()} WHERE {where} RETURN {near}.{subject.near.key}, {figure}"


def _busy(dice: Dice, subject: Subject) -> Answer | None:
    """Ask for nodes by their number of neighbours: WITH and a condition on the count."""
    if not subject.has_many:
        return None
    near, far = subject.names
    sign = dice.choice((("more than", ">"), ("at least", ">="), ("fewer than", "<"), ("exactly", "=")))
    number = dice.between(2, 30)
    rows = f"{subject.near.entity.plural} {subject.verb} {sign[0]} {number} {subject.far.entity.plural}"
    counted = f"WITH {near}, count({far}) AS total WHERE total {sign[1]} {number}"
    if sign[1] == "=" or dice.chance(0.5):
        cypher = f"MATCH {subject.full_pattern()} {counted} RETURN {near}.{subject.near.key}"
        return ask_names(dice, subject.near.entity, rows), cypher
    question = ask_names(dice, subject.near.entity, rows).rstrip(".") + ", largest number first."
    cypher = f"MATCH {subject.full_pattern()} {counted} RETURN {near}.{subject.near.key}, total ORDER BY total DESC"
    return question, cypher


def _optional(dice: Dice, subject: Subject) -> Answer | None:
    """Count neighbours, with zero for nodes that have none."""
    if not subject.has_many:
        return None
    near, far = subject.names
    words, where = _where(dice, subject.near, near)
    question = dice.choice(
        (
            "For {0} {1}, count the {2} of each, also where there are none.",
            "How many {2} does each of the {0} {1} have, including zero?",
        )
    ).format(subject.near.entity.plural, words, subject.far.entity.plural)
    optional = subject.pattern(near, f"{far}:{subject.far.label}")
    return question, (
        f"MATCH ({near}:{subject.near.label}) WHERE {where} OPTIONAL MATCH {optional} "
        f"RETURN {near}.{subject.near.key}, count({far})"
    )


def _without(dice: Dice, subject: Subject) -> Answer:
    near, _ = subject.names
    words, where = _where(dice, subject.near, near)
    rows = f"{subject.near.entity.plural} {words} {subject.verb} no {subject.far.entity.plural}"
    absent = subject.pattern(near, f":{subject.far.label}")
    cypher = f"MATCH ({near}:{subject.near.label}) WHERE {where} AND NOT {absent} RETURN {near}.{subject.near.key}"
    return ask_names(dice, subject.near.entity, rows), cypher


def _exists(dice: Dice, subject: Subject) -> Answer:
    near, far = subject.names
    words, where = _where(dice, subject.far, far)
    rows = f"{subject.near.entity.plural} {subject.verb} at least one of the {subject.far.entity.plural} {words}"
    inner = f"EXISTS {{ MATCH {subject.pattern(near, f'{far}:{subject.far.label}')} WHERE {where} }}"
    cypher = f"MATCH ({near}:{subject.near.label}) WHERE {inner} RETURN {near}.{subject.near.key}"
    return ask_names(dice, subject.near.entity, rows), cypher


def _collect(dice: Dice, subject: Subject) -> Answer | None:
    if not subject.has_many:
        return None
    near, far = subject.names
    words, where = _where(dice, subject.near, near)
    question = dice.choice(
        ("For each of the {0} {1}, collect the {2} into a list.", "Show {0} {1} with a list of each one's {2}.")
    ).format(subject.near.entity.plural, words, f"{subject.far.entity.key_words} values")
    returned = f"{near}.{subject.near.key}, collect({far}.{subject.far.key})"
    return question, f"MATCH {subject.full_pattern()} WHERE {where} RETURN {returned}"


def _relation_condition(dice: Dice, subject: Subject) -> Answer:
    near, _ = subject.names
    record = subject.edge.link.record
    assert record is not None
    field = dice.choice(record.fields)
    condition = make_condition(dice, field)
    rows = f"{subject.near.entity.plural} that have {record.plural} {condition.words}"
    where = render_condition(condition, f"rel.{subject.near.property(field)}")
    cypher = f"MATCH {subject.full_pattern('rel')} WHERE {where} RETURN DISTINCT {near}.{subject.near.key}"
    return ask_names(dice, subject.near.entity, rows), cypher


def _relation_figure(dice: Dice, subject: Subject) -> Answer | None:
    near, _ = subject.names
    record = subject.edge.link.record
    field = _draw(dice, record.fields, _is_quantity) if record else None
    if field is None or record is None:
        return None
    function, (words, where) = dice.choice(_FUNCTIONS), _where(dice, subject.near, near)
    question = (
        f"What is the {function_words(function, dice.below(2))} {field.words} of {record.plural} "
        f"of {subject.near.entity.plural} {words}?"
    )
    figure = f"{function}(rel.{subject.near.property(field)})"
    return question, f"MATCH {subject.full_pattern('rel')} WHERE {where} RETURN {figure}"


def _reachable(dice: Dice, subject: Subject) -> Answer:
    """Ask for a path of some length along one relationship type."""
    node, far, called = subject.near, "x", _named(dice, subject.near.entity)
    edge, steps = subject.edge, dice.between(2, 6)
    verb = edge.link.passive if edge.reversed else edge.link.active
    length, words = (f"*{steps}", f"exactly {steps}") if dice.chance(0.4) else (f"*1..{steps}", f"up to {steps}")
    question = dice.choice(
        (
            "Starting at the {0} {1}, which {2} are reached by following '{3}' for {4} steps? Give the {5}.",
            "List the {5} of {2} that are {4} '{3}' steps away from the {0} {1}.",
        )
    ).format(node.entity.words, called, node.entity.plural, verb, words, node.entity.key.words)
    start = f"({node.variable}:{node.label} {{{node.key}: {quote(called)}}})"
    cypher = f"MATCH {start}-[:{edge.type}{length}]->({far}:{node.label}) RETURN DISTINCT {far}.{node.key}"
    return question, cypher


_LOOPS: tuple[Intent, ...] = (_reachable,)
_RECORDS: tuple[Intent, ...] = (_relation_condition, _relation_figure)
_INTENTS: tuple[Intent, ...] = (
    _list_nodes, _list_with_two_conditions, _list_by_text, _list_sorted, _count_nodes, _count_distinct, _figure, _group,
    _above_average, _neighbours, _joined, _pairs, _per_neighbour, _busy, _optional, _without, _exists, _collect,
    *_RECORDS, *_LOOPS,
)  # fmt: skip
