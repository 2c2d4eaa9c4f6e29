"""Measurements in pieces that resume: rows as JSON lines, what is there is not measured again, an end to the time."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

TIME_IS_OVER = 75  # exit code: start it again


class Named(Protocol):
    @property
    def name(self) -> str: ...


Case = TypeVar("Case", bound=Named)


def read_rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def add_row(file: Path, row: dict[str, Any]) -> None:
    row = {**row, "date": datetime.datetime.now(datetime.UTC).date().isoformat()}
    with file.open("a") as out:
        out.write(json.dumps(row, sort_keys=True) + "\n")


def iterate_left(cases: Iterable[Case], file: Path, minutes: float) -> Iterator[Case]:
    """Those without a row that has no error; ends the process when the time is over."""
    known = {row["case"] for row in read_rows(file) if "error" not in row}
    deadline = time.monotonic() + 60 * minutes
    for case in cases:
        if case.name not in known:
            if time.monotonic() > deadline:
                sys.exit(TIME_IS_OVER)
            yield case


def run_verbs(
    description: str | None,
    default_cases: list[str],
    told: str,
    measure: Callable[[argparse.Namespace], None],
    table: Callable[[argparse.Namespace], None],
) -> None:
    """`measure --out FILE`, and `table FILE`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    measuring = verbs.add_parser("measure")
    measuring.add_argument("--cases", nargs="+", default=default_cases, help=told)
    measuring.add_argument("--out", type=Path, required=True, help="rows that it has are not measured again")
    measuring.add_argument("--minutes", type=float, default=1e6, help="begin no case later; exit code 75: some left")
    measuring.set_defaults(run=measure)
    showing = verbs.add_parser("table")
    showing.add_argument("rows", type=Path)
    showing.set_defaults(run=table)
    args = parser.parse_args()
    args.run(args)
