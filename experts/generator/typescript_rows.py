"""Instructions with the types they are about, and the requested TypeScript."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from experts.generator import typescript_arrays as arrays
from experts.generator import typescript_declarations as declarations
from experts.generator.dice import Dice
from experts.generator.domains import Domain

Row = dict[str, str]
Intent = Callable[[Dice, Domain], arrays.Answer | None]  # None: not possible for the drawn type

_INTENTS: tuple[Intent, ...] = (
    arrays.filter_items,
    arrays.count_items,
    arrays.ask_any_or_all,
    arrays.map_items,
    arrays.sum_items,
    arrays.count_groups,
    arrays.group_items,
    arrays.index_items,
    arrays.sort_items,
    arrays.pipeline,
    arrays.distinct_values,
    arrays.find_item,
    arrays.join_items,
    arrays.describe_item,
    declarations.declare_interface,
    declarations.declare_part,
    declarations.declare_enum,
    declarations.type_guard,
    declarations.discriminated_union,
    declarations.map_to_other,
    declarations.update_item,
    declarations.load_all,
    declarations.load_or_default,
    declarations.generic_extreme,
    declarations.generic_group,
    declarations.validate_item,
    declarations.store_class,
    declarations.key_constants,
)


def make_rows(dice: Dice, domains: Sequence[Domain]) -> Iterator[Row]:
    """Yield rows endlessly. Intents alternate, so that difficult ones are as frequent as easy ones."""
    while True:
        for intent in _INTENTS:
            answer = intent(dice, dice.choice(domains))
            if answer:
                instruction, given, code = answer
                yield {"instruction": f"{instruction}\n\n{given}".rstrip(), "output": code}


def types_given(row: Row) -> str:
    """Return the types given with the instruction; the answer is checked together with them."""
    return row["instruction"].partition("\n\n")[2]
