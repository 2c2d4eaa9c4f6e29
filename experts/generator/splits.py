"""Splits of the samples; no answer and no question occurs in two of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import islice

from experts.generator import cypher_rows, domain_data, json_rows, sql_rows, typescript_rows
from experts.generator.dice import Dice
from experts.generator.domains import Domain, load_domains

Row = dict[str, str]
Splits = dict[str, list[Row]]

TRAIN_ROWS, VALIDATION_ROWS, TEST_ROWS = 2000, 200, 200
UNSEEN_TEST_ROWS = 60  # test rows from domains that occur in no other split
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Expert:
    """Row maker of an expert, and the module whose `check_row` checks its rows with a parser."""

    make_rows: Callable[[Dice, Sequence[Domain]], Iterator[Row]]
    checker: str
    seed: int


EXPERTS: Mapping[str, Expert] = {
    "json": Expert(json_rows.make_rows, "json_check", 1100),
    "neo4j": Expert(cypher_rows.make_rows, "cypher_check", 1200),
    "sql": Expert(sql_rows.make_rows, "sql_check", 1300),
    "typescript": Expert(typescript_rows.make_rows, "typescript_check", 1400),
}


def make_splits(name: str, num_train: int = TRAIN_ROWS) -> Splits:
    """Make all rows of an expert: the small splits first, whose rows the train split then avoids."""
    expert = EXPERTS[name]
    seen, unseen = load_domains(domain_data.SEEN_DOMAINS), load_domains(domain_data.UNSEEN_DOMAINS)
    taken: set[str] = set()

    def draw(seed: int, domains: Sequence[Domain], count: int) -> list[Row]:
        return list(islice(only_new(expert.make_rows(Dice(seed), domains), taken), count))

    familiar = draw(expert.seed, seen, TEST_ROWS - UNSEEN_TEST_ROWS)
    test = Dice(expert.seed).shuffle(familiar + draw(expert.seed + 1, unseen, UNSEEN_TEST_ROWS))
    validation = draw(expert.seed + 2, seen, VALIDATION_ROWS)
    train = draw(expert.seed + 3, seen, num_train)
    return {"train": train, "validation": validation, "test": test}


def only_new(rows: Iterator[Row], taken: set[str]) -> Iterator[Row]:
    """Yield the rows whose answer and prompt are new; the answer is a row's last field."""
    for row in rows:
        *prompt, answer = row.values()
        keys = {"answer " + answer, "prompt " + "\n".join(prompt)}
        if taken.isdisjoint(keys):
            taken |= keys
            yield row


def render_rows(rows: Sequence[Row]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def load_checker(name: str) -> Callable[[Row], None]:
    """Return `check_row` of an expert; importing it needs the packages of the dev extra."""
    check: Callable[[Row], None] = import_module(f"experts.generator.{EXPERTS[name].checker}").check_row
    return check
