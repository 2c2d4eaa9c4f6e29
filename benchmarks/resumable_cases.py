"""Resumable measurements: one row of JSON per case, cases with a row are skipped, and a time limit."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

OUT_OF_TIME = 75  # exit code: start again to continue


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


def iterate_unmeasured(cases: Iterable[Case], file: Path, minutes: float) -> Iterator[Case]:
    """Yield the cases without a row, or with an error in it; exits the process when the time is over."""
    known = {row["case"] for row in read_rows(file) if "error" not in row}
    deadline = time.monotonic() + 60 * minutes
    for case in cases:
        if case.name not in known:
            if time.monotonic() > deadline:
                sys.exit(OUT_OF_TIME)
            yield case


def measure_cases(
    cases: Iterable[Case], args: argparse.Namespace, measure: Callable[[Case], dict[str, Any]], shown: Iterable[str]
) -> None:
    """Measure the cases without a row, and append one row for each with GPU and versions; print the values `shown`."""
    import torch  # slow, and not needed to list or to run other programs

    from launcher.training.runtime.run_record import collect_versions

    for case in iterate_unmeasured(cases, args.out, args.minutes):
        row: dict[str, Any] = {"case": case.name}
        try:
            row |= measure(case)
        except Exception as error:  # one failed case must not stop the others
            row["error"] = f"{type(error).__name__}: {str(error)[-500:]}"
        row |= {
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "versions": collect_versions(),
        }
        add_row(args.out, row)
        values = {name: row.get(name) for name in shown}
        print(case.name, row.get("error") or values, file=sys.stderr, flush=True)


def run_subcommands(
    description: str | None,
    default_cases: list[str],
    cases_help: str,
    measure: Callable[[argparse.Namespace], None],
    table: Callable[[argparse.Namespace], None],
) -> None:
    """Parse the command line and run `measure --out FILE` or `table FILE`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    subcommands = parser.add_subparsers(required=True)
    measure_parser = subcommands.add_parser("measure")
    measure_parser.add_argument("--cases", nargs="+", default=default_cases, help=cases_help)
    measure_parser.add_argument("--out", type=Path, required=True, help="cases with a row in this file are skipped")
    measure_parser.add_argument(
        "--minutes", type=float, default=1e6, help="start no case later; exit code 75: cases are left"
    )
    measure_parser.set_defaults(run=measure)
    table_parser = subcommands.add_parser("table")
    table_parser.add_argument("rows", type=Path)
    table_parser.set_defaults(run=table)
    args = parser.parse_args()
    args.run(args)
