"""`launcher bench EXPERT --vary KEY=A,B`: is A faster than B, on this machine, and how sure is that?"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.arguments import add_request_arguments, make_request, positive
from launcher.errors import ExitCode, InputError, escape, say

if TYPE_CHECKING:
    from launcher.bench.order import Course
    from launcher.bench.result import BenchResult
    from launcher.bench.sides import Side
    from launcher.corpus.prepare import Prepared
    from launcher.plan.model import Plan

HELP = "is A faster than B: one key of the manifest with two values or more, measured in turn"
_BUSY_SHARE = 0.5  # of the cores: from there on other work shows in the speeds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_request_arguments(parser)
    bench = parser.add_argument_group("the comparison")
    bench.add_argument(
        "--vary",
        required=True,
        metavar="KEY=A,B",
        help="a key of training.config, or any path that --set takes: torch_compile=true,false",
    )
    bench.add_argument("--steps", type=positive, default=8, metavar="N", help="timed steps of a block (default 8)")
    bench.add_argument("--repeats", type=positive, default=7, metavar="N", help="blocks of each side (default 7)")
    bench.add_argument(
        "--warm", type=positive, default=3, metavar="N", help="steps before the timed ones, dropped (default 3)"
    )
    bench.add_argument(
        "--fresh", action="store_true", help="a new process for every block: what differs between starts counts too"
    )
    bench.add_argument(
        "--limit", type=positive, default=900, metavar="SECONDS", help="longest build, or block (default 900)"
    )
    bench.add_argument("--out", metavar="FOLDER", help="keep the result there: result.json, report.md, logs")
    bench.add_argument("--json", action="store_true", help="print the result as JSON")


def run(arguments: argparse.Namespace) -> int:
    from launcher.bench.comparing import Effort, fit_together, measure_sides
    from launcher.bench.interval import LEAST_ROUNDS
    from launcher.bench.order import make_course
    from launcher.bench.result import find_notes, make_result
    from launcher.bench.sides import plan_sides
    from launcher.bench.varying import parse_vary

    if arguments.repeats < LEAST_ROUNDS:
        raise InputError(
            f"--repeats {arguments.repeats}: too few to say how sure a difference is", hint=f"at least {LEAST_ROUNDS}"
        )
    variation = parse_vary(arguments.vary)
    sides = plan_sides(make_request(arguments), variation)
    prepared = [prepare_side(side.plan, side) for side in sides]
    stores = [one.store.folder for one in prepared]
    course = make_course([side.plan.batch.global_batch_size for side in sides], arguments.warm, arguments.steps)
    notes = [
        *warn_of_load(sides[0].plan),
        *find_notes(sides, course, [str(store) for store in stores], _count_sequences(prepared)),
    ]
    is_kept = not arguments.fresh and fit_together(sides)
    if not arguments.json:
        _print_start(sides, course, arguments.repeats, is_kept)
    effort = Effort(repeats=arguments.repeats, course=course, limit_seconds=arguments.limit)
    with work_folder(arguments.out) as folder:
        measured = measure_sides(sides, stores, effort, folder / "logs", is_kept=is_kept, tell=tell)
        result = make_result(variation, sides, measured, effort, notes)
        if arguments.out is not None:
            _write(result, folder)
    if arguments.json:
        print(result.model_dump_json(indent=2))
    else:
        _print_result(result, arguments.out)
    return ExitCode.DONE


def prepare_side(plan: Plan, side: Side) -> Prepared:
    """What is missing is said before anybody waits."""
    from launcher.cli.train import prepare
    from launcher.launch import check_packages, check_startable

    check_startable(plan)
    check_packages(plan)
    return prepare(side.planned)


def _count_sequences(prepared: Sequence[Prepared]) -> int:
    return min(one.store.audit.splits["train"].num_packs for one in prepared)


def warn_of_load(plan: Plan) -> list[str]:
    """Whatever else runs here takes its time, and from one side more than from the other."""
    cores, load = plan.hardware.cpu_cores_per_node, os.getloadavg()[0]
    if load < _BUSY_SHARE * cores:
        return []
    return [f"this machine was busy before (load {load:.1f} on {cores} cores): small differences say less"]


@contextmanager
def work_folder(out: str | None) -> Iterator[Path]:
    if out is None:
        with tempfile.TemporaryDirectory(prefix="launcher-bench-") as name:
            yield Path(name)
        return
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {out}: {error.strerror}", hint="name a folder that can be written") from None
    yield folder


def _write(result: BenchResult, folder: Path) -> None:
    from launcher.bench.comparison_text import render_markdown
    from launcher.paths import write_text_atomically

    write_text_atomically(folder / "result.json", result.model_dump_json(indent=2) + "\n")
    write_text_atomically(folder / "report.md", render_markdown(result))


def _print_start(sides: Sequence[Side], course: Course, repeats: int, is_kept: bool) -> None:
    from launcher.hardware import format_hardware

    plan = sides[0].plan
    print(f"{escape(plan.expert)} on {escape(format_hardware(plan.hardware))}, {plan.profile} profile")
    warm, timed = course.count_steps(max(side.plan.batch.global_batch_size for side in sides))
    how = "a process a side" if is_kept else "a new process for every block"
    print(f"{len(sides)} sides, {repeats} blocks of {warm} + {timed} steps each, in turn; {how}\n", flush=True)


def _print_result(result: BenchResult, out: str | None) -> None:
    from launcher.bench.comparison_text import describe_method, make_head, make_rows
    from launcher.cli.tables import print_table

    print()
    print_table(make_head(result), make_rows(result), ("bold",))
    print()
    if result.changes:
        head = ("decided by the plan", *(side.label for side in result.sides))
        print_table(head, [(change.name, *(value or "-" for value in change.values)) for change in result.changes])
        print()
    for versus in result.verdicts:
        print(escape(versus.words))
    print(f"({describe_method(result)})")
    for note in result.notes:
        print(f"note: {escape(note)}")
    if out is not None:
        print(f"kept in {escape(out)}/: result.json, report.md, logs")


def tell(text: str) -> None:
    say(escape(text))
