"""Questions on tables and their SQL, in the dialect of SQLite."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from experts.generator.conditions import SIGNS, Condition, Op, make_condition
from experts.generator.dice import Dice
from experts.generator.domains import Domain, Field
from experts.generator.naming import join_words
from experts.generator.phrases import (
    ask_columns,
    ask_count,
    ask_figure,
    ask_names,
    ask_per,
    ask_top,
    extreme_words,
    function_words,
)
from experts.generator.sql_tables import Context, Table, draw_pair, draw_single, draw_triple
from experts.generator.values import Value, format_number

Row = dict[str, str]
Answer = tuple[str, str]  # question, SQL
Intent = Callable[[Dice, Context], Answer | None]  # None: not possible for these tables


def make_rows(dice: Dice, domains: Sequence[Domain]) -> Iterator[Row]:
    """Yield rows endlessly. Intents alternate, so that difficult ones are as frequent as easy ones."""
    while True:
        for draw_context, intent in _INTENTS:
            context = draw_context(dice, dice.choice(domains))
            answer = intent(dice, context)
            if answer:
                yield {"sql_prompt": answer[0], "sql_context": context.render(), "sql": answer[1] + ";"}


def quote(value: Value) -> str:
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return format_number(value)


def render_condition(condition: Condition, column: str) -> str:
    op, values = condition.op, [quote(value) for value in condition.values]
    if op in SIGNS:
        return f"{column} {SIGNS[op]} {values[0]}"
    if op in _LIKES:
        return f"{column} LIKE {quote(_LIKES[op].format(condition.values[0]))}"
    if op == "year":
        return f"{column} BETWEEN '{values[0]}-01-01' AND '{values[0]}-12-31'"
    return _CONDITIONS[op].format(column, *values) if op != "in" else f"{column} IN ({', '.join(values)})"


_LIKES: dict[str, str] = {"contains": "%{}%", "starts": "{}%", "ends": "%{}"}
_CONDITIONS: dict[str, str] = {
    "eq": "{} = {}",
    "ne": "{} <> {}",
    "between": "{} BETWEEN {} AND {}",
    "null": "{} IS NULL",
    "not_null": "{} IS NOT NULL",
    "true": "{} = 1",
    "false": "{} = 0",
}


def _draw(dice: Dice, fields: Sequence[Field], test: Callable[[Field], bool]) -> Field | None:
    fitting = [field for field in fields if test(field)]
    return dice.choice(fitting) if fitting else None


def _where(dice: Dice, table: Table, ops: Sequence[Op] | None = None, prefix: str = "") -> tuple[str, str]:
    """Draw a condition on a column of the table, as text and in SQL."""
    field = dice.choice(table.fields[1:] if ops is None and dice.chance(0.8) else table.fields)
    condition = make_condition(dice, field, ops)
    return condition.words, render_condition(condition, prefix + table.column(field))


def _columns(dice: Dice, table: Table) -> list[Field]:
    return dice.subset(table.fields, dice.choice((1, 2, 2, 3)))


def _list_rows(dice: Dice, context: Context) -> Answer:
    table = context.main
    fields, (words, where) = _columns(dice, table), _where(dice, table)
    question = ask_columns(dice, fields, f"{table.entity.plural} {words}")
    return question, f"SELECT {', '.join(map(table.column, fields))} FROM {table.name} WHERE {where}"


def _list_with_two_conditions(dice: Dice, context: Context) -> Answer | None:
    table = context.main
    (first_words, first), (second_words, second) = _where(dice, table), _where(dice, table)
    if first.split()[0] == second.split()[0]:
        return None
    joined = dice.choice(("and", "and", "or"))
    question = ask_columns(dice, [table.entity.key], f"{table.entity.plural} {first_words} {joined} {second_words}")
    return question, f"SELECT {table.key} FROM {table.name} WHERE {first} {joined.upper()} {second}"


def _list_by_text(dice: Dice, context: Context) -> Answer:
    table = context.main
    condition = make_condition(dice, table.entity.key, ("contains", "starts", "ends"))
    fields = _columns(dice, table)
    question = ask_columns(dice, fields, f"{table.entity.plural} {condition.words}")
    where = render_condition(condition, table.key)
    return question, f"SELECT {', '.join(map(table.column, fields))} FROM {table.name} WHERE {where}"


def _list_missing(dice: Dice, context: Context) -> Answer | None:
    table = context.main
    field = _draw(dice, table.fields, lambda field: field.optional)
    if field is None:
        return None
    condition, extra = make_condition(dice, field), _where(dice, table)
    if field.words in extra[0]:
        return None
    question = ask_columns(dice, [table.entity.key], f"{table.entity.plural} {extra[0]} and {condition.words}")
    where = f"{extra[1]} AND {render_condition(condition, table.column(field))}"
    return question, f"SELECT {table.key} FROM {table.name} WHERE {where}"


def _list_sorted(dice: Dice, context: Context) -> Answer | None:
    table = context.main
    field = _draw(dice, table.fields, lambda field: field.is_number or field.kind == "date")
    if field is None:
        return None
    descending, limit = dice.chance(0.6), dice.between(1, 20)
    words, where = _where(dice, table) if dice.chance(0.4) else ("", "")
    question = ask_top(dice, table.entity, field, descending, limit, words)
    filtered = f" WHERE {where}" if where else ""
    order = f"ORDER BY {table.column(field)} {'DESC' if descending else 'ASC'} LIMIT {limit}"
    return question, f"SELECT {table.key}, {table.column(field)} FROM {table.name}{filtered} {order}"


def _count_rows(dice: Dice, context: Context) -> Answer:
    words, where = _where(dice, context.main)
    question = ask_count(dice, f"{context.main.entity.plural} {words}")
    return question, f"SELECT COUNT(*) FROM {context.main.name} WHERE {where}"


def _count_distinct(dice: Dice, context: Context) -> Answer | None:
    table = context.main
    field = _draw(dice, table.fields[1:], lambda field: field.is_text)
    words, where = _where(dice, table)
    if field is None or field.words in words:
        return None
    question = dice.choice(("How many different {0} values do {1} have?", "Count the distinct {0} among {1}."))
    sql = f"SELECT COUNT(DISTINCT {table.column(field)}) FROM {table.name} WHERE {where}"
    return question.format(field.words, f"{table.entity.plural} {words}"), sql


def _figure(dice: Dice, context: Context) -> Answer | None:
    table = context.main
    field = _draw(dice, table.fields, lambda field: field.is_quantity)
    if field is None:
        return None
    function, (words, where) = dice.choice(_FUNCTIONS), _where(dice, table)
    question = ask_figure(dice, function, field, f"{table.entity.plural} {words}")
    return question, f"SELECT {function.upper()}({table.column(field)}) FROM {table.name} WHERE {where}"


_FUNCTIONS = ("avg", "sum", "max", "min")


def _group(dice: Dice, context: Context) -> Answer | None:
    """Ask for a count or an aggregate per value of a column; sometimes only of groups of some size."""
    table = context.main
    group = _draw(dice, table.fields, lambda field: field.is_category)
    field = _draw(dice, table.fields, lambda field: field.is_quantity)
    if group is None or field is None:
        return None
    function, column = dice.choice(("count", *_FUNCTIONS)), table.column(group)
    figure = "COUNT(*)" if function == "count" else f"{function.upper()}({table.column(field)})"
    words, where = _where(dice, table) if dice.chance(0.5) else ("", "")
    if group.words in words:
        return None
    rows = f"{table.entity.plural} {words}".strip()
    question = ask_per(dice, group.words, function, field, rows)
    filtered = f" WHERE {where}" if where else ""
    return question, f"SELECT {column}, {figure} FROM {table.name}{filtered} GROUP BY {column}"


def _group_having(dice: Dice, context: Context) -> Answer | None:
    table = context.main
    group = _draw(dice, table.fields, lambda field: field.is_category)
    field = _draw(dice, table.fields, lambda field: field.is_quantity)
    if group is None or field is None:
        return None
    column, sign = table.column(group), dice.choice((("more than", ">"), ("at least", ">="), ("fewer than", "<")))
    if dice.chance(0.5):
        number, figure, words = dice.between(2, 40), "COUNT(*)", f"{sign[0]} {{}} {table.entity.plural}"
    else:
        number, figure = dice.between(max(1, field.low), field.high), f"AVG({table.column(field)})"
        words = f"an average {field.words} of {sign[0].replace('fewer', 'less')} {{}}"
    question = dice.choice(("Which {0} values have {1}?", "List each {0} that has {1}.", "Show every {0} with {1}."))
    sql = f"SELECT {column} FROM {table.name} GROUP BY {column} HAVING {figure} {sign[1]} {number}"
    return question.format(group.words, words.format(number)), sql


def _above_average(dice: Dice, context: Context) -> Answer | None:
    table = context.main
    field = _draw(dice, table.fields, lambda field: field.is_quantity)
    if field is None:
        return None
    word, sign = dice.choice((("above", ">"), ("below", "<")))
    fields = _columns(dice, table)
    question = ask_columns(dice, fields, f"{table.entity.plural} with {field.words} {word} the average")
    column, columns = table.column(field), ", ".join(map(table.column, fields))
    return question, (
        f"SELECT {columns} FROM {table.name} WHERE {column} {sign} (SELECT AVG({column}) FROM {table.name})"
    )


def _extreme_row(dice: Dice, context: Context) -> Answer | None:
    table = context.main
    field = _draw(dice, table.fields, lambda field: field.is_number or field.kind == "date")
    group = _draw(dice, table.fields, lambda field: field.is_category)
    if field is None or group is None:
        return None
    function = dice.choice(("max", "min"))
    condition = make_condition(dice, group, ("eq",))
    where = render_condition(condition, table.column(group))
    rows = f"{table.entity.plural} {condition.words}"
    question = f"Of the {rows}, which have the {extreme_words(field, function == 'max')} {field.words}?"
    column = table.column(field)
    inner = f"SELECT {function.upper()}({column}) FROM {table.name} WHERE {where}"
    return question, f"SELECT {table.key} FROM {table.name} WHERE {where} AND {column} = ({inner})"


def _join_on(child: Table, parent: Table) -> str:
    foreign = child.naming.foreign_id(parent.entity)
    return f"FROM {child.name} AS c JOIN {parent.name} AS p ON c.{foreign} = p.{parent.id}"


def _join_list(dice: Dice, context: Context) -> Answer | None:
    """Ask for children of parents that meet a condition."""
    child, parent = context.main, context.parent
    if parent is None:
        return None
    fields = _columns(dice, child)
    words, where = _where(dice, parent, prefix="p.")
    rows = f"{child.entity.plural} {context.domain.owns.passive} {parent.entity.plural} {words}"
    columns = ", ".join(f"c.{child.column(field)}" for field in fields)
    return ask_columns(dice, fields, rows), f"SELECT {columns} {_join_on(child, parent)} WHERE {where}"


def _join_both(dice: Dice, context: Context) -> Answer | None:
    """Ask for each child with the name of its parent."""
    child, parent = context.main, context.parent
    if parent is None:
        return None
    words, where = _where(dice, child, prefix="c.")
    rows = f"{child.entity.plural} {words}"
    question = dice.choice(("List the {0} of {1} together with the {2}.", "For {1}, show the {0} and the {2}.")).format(
        child.entity.key.words, rows, parent.entity.key_words
    )
    sql = f"SELECT c.{child.key}, p.{parent.key} {_join_on(child, parent)} WHERE {where}"
    return question, sql


def _join_group(dice: Dice, context: Context) -> Answer | None:
    """Ask for the number of children, or an aggregate of them, per parent."""
    child, parent = context.main, context.parent
    field = _draw(dice, child.fields, lambda field: field.is_quantity)
    if parent is None or field is None:
        return None
    function = dice.choice(("count", *_FUNCTIONS))
    figure = "COUNT(*)" if function == "count" else f"{function.upper()}(c.{child.column(field)})"
    words, where = _where(dice, child, prefix="c.") if dice.chance(0.5) else ("", "")
    rows = f"{child.entity.plural} {words}".strip()
    question = ask_per(dice, parent.entity.key_words, function, field, rows)
    filtered = f" WHERE {where}" if where else ""
    sql = f"SELECT p.{parent.key}, {figure} {_join_on(child, parent)}{filtered} GROUP BY p.{parent.id}"
    return question, sql


def _join_having(dice: Dice, context: Context) -> Answer | None:
    child, parent = context.main, context.parent
    if parent is None:
        return None
    number = dice.between(2, 30)
    words, where = _where(dice, child, prefix="c.")
    rows = f"{parent.entity.plural} that {context.domain.owns.active} more than {number} {child.entity.plural} {words}"
    sql = f"SELECT p.{parent.key} {_join_on(child, parent)} WHERE {where} GROUP BY p.{parent.id}"
    return ask_names(dice, parent.entity, rows), f"{sql} HAVING COUNT(*) > {number}"


def _without_children(dice: Dice, context: Context) -> Answer | None:
    """Ask for parents without children, or without children of some kind."""
    child, parent = context.main, context.parent
    if parent is None:
        return None
    words, where = _where(dice, child, prefix="c.")
    rows = f"{parent.entity.plural} that {context.domain.owns.active} no {child.entity.plural} {words}"
    foreign = child.naming.foreign_id(parent.entity)
    inner = f"SELECT 1 FROM {child.name} AS c WHERE c.{foreign} = p.{parent.id} AND {where}"
    return ask_names(dice, parent.entity, rows), (
        f"SELECT p.{parent.key} FROM {parent.name} AS p WHERE NOT EXISTS ({inner})"
    )


def _in_subquery(dice: Dice, context: Context) -> Answer | None:
    child, parent = context.main, context.parent
    if parent is None:
        return None
    words, where = _where(dice, child)
    rows = f"{parent.entity.plural} that {context.domain.owns.active} {child.entity.plural} {words}"
    inner = f"SELECT {child.naming.foreign_id(parent.entity)} FROM {child.name} WHERE {where}"
    return ask_names(
        dice, parent.entity, rows
    ), f"SELECT {parent.key} FROM {parent.name} WHERE {parent.id} IN ({inner})"


def _left_join_count(dice: Dice, context: Context) -> Answer | None:
    """Count children, with zero for parents that have none."""
    child, parent = context.main, context.parent
    if parent is None:
        return None
    words, where = _where(dice, parent, prefix="p.")
    question = dice.choice(
        (
            "For {0} {1}, count the {2} of each, also where there are none.",
            "How many {2} does each of the {0} {1} have, including zero?",
        )
    ).format(parent.entity.plural, words, child.entity.plural)
    foreign = child.naming.foreign_id(parent.entity)
    joined = f"FROM {parent.name} AS p LEFT JOIN {child.name} AS c ON c.{foreign} = p.{parent.id}"
    count_of = f"COUNT(c.{foreign})"
    return question, f"SELECT p.{parent.key}, {count_of} {joined} WHERE {where} GROUP BY p.{parent.id}"


def _three_tables(context: Context) -> tuple[Table, Table, Table, str]:
    child, other, record = context.main, context.other, context.record
    assert other is not None
    assert record is not None
    joined = (
        f"FROM {other.name} AS o JOIN {record.name} AS r ON r.{other.naming.foreign_id(other.entity)} = o.{other.id} "
        f"JOIN {child.name} AS c ON c.{child.id} = r.{child.naming.foreign_id(child.entity)}"
    )
    return child, other, record, joined


def _many_to_many(dice: Dice, context: Context) -> Answer:
    child, other, _, joined = _three_tables(context)
    if dice.chance(0.5):
        words, where = _where(dice, child, prefix="c.")
        rows = f"{other.entity.plural} that {context.domain.meets.active} {child.entity.plural} {words}"
        return ask_names(dice, other.entity, rows), f"SELECT DISTINCT o.{other.key} {joined} WHERE {where}"
    words, where = _where(dice, other, prefix="o.")
    rows = f"{child.entity.plural} {context.domain.meets.passive} {other.entity.plural} {words}"
    return ask_names(dice, child.entity, rows), f"SELECT DISTINCT c.{child.key} {joined} WHERE {where}"


def _record_condition(dice: Dice, context: Context) -> Answer:
    """Ask with a condition on the table between the two."""
    child, other, record, joined = _three_tables(context)
    field = dice.choice(record.fields)
    condition = make_condition(dice, field)
    where = render_condition(condition, f"r.{record.column(field)}")
    names = [other.entity.key_words, child.entity.key_words]
    question = dice.choice(("List the {0} for {1} {2}.", "Show the {0} of all {1} {2}."))
    sql = f"SELECT o.{other.key}, c.{child.key} {joined} WHERE {where}"
    return question.format(join_words(names), record.entity.plural, condition.words), sql


def _record_figure(dice: Dice, context: Context) -> Answer | None:
    _, other, record, joined = _three_tables(context)
    field = _draw(dice, record.fields, lambda field: field.is_quantity)
    if field is None:
        return None
    function, (words, where) = dice.choice(_FUNCTIONS), _where(dice, context.main, prefix="c.")
    question = (
        f"For each {other.entity.words}, what is the {function_words(function)} {field.words} "
        f"of {record.entity.plural} of {context.main.entity.plural} {words}?"
    )
    figure = f"{function.upper()}(r.{record.column(field)})"
    return question, f"SELECT o.{other.key}, {figure} {joined} WHERE {where} GROUP BY o.{other.id}"


def _single_or_pair(dice: Dice, domain: Domain) -> Context:
    """Draw one table, sometimes with another one that the question does not need."""
    return draw_single(dice, domain) if dice.chance(0.75) else draw_pair(dice, domain)


_SINGLE: tuple[Intent, ...] = (
    _list_rows, _list_with_two_conditions, _list_by_text, _list_missing, _list_sorted, _count_rows, _count_distinct,
    _figure, _group, _group_having, _above_average, _extreme_row,
)  # fmt: skip
_PAIR: tuple[Intent, ...] = (
    _join_list, _join_both, _join_group, _join_having, _without_children, _in_subquery, _left_join_count,
)  # fmt: skip
_TRIPLE: tuple[Intent, ...] = (_many_to_many, _record_condition, _record_figure)
_INTENTS = (
    *((_single_or_pair, intent) for intent in _SINGLE),
    *((draw_pair, intent) for intent in _PAIR),
    *((draw_triple, intent) for intent in _TRIPLE),
)
