"""`launcher bench memory`: what trainings take against what was predicted, over a grid, in pieces that resume."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.errors import ExitCode, InputError, LauncherError, say

if TYPE_CHECKING:
    from launcher.bench.memory_cases import GridCase
    from launcher.bench.memory_grid import Progress
    from launcher.bench.memory_rows import GridRow, GridTable
    from launcher.bench.memory_summary import Summary

HELP = "measure memory against the prediction, over a grid of trainings, in pieces that resume"
_EPILOG = """\
exit codes: 0 every case is measured or left out with its reason, 4 some failed (--again tries them once more),
75 the time is over: start it again, it goes on
"""


def add_memory_parser(parts: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = parts.add_parser(
        "memory", help=HELP, description=HELP, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.set_defaults(run_part=run)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    measuring = parser.add_argument_group("measuring")
    measuring.add_argument("--out", metavar="ROWS", help="a line for each case is added to this file (rows.jsonl)")
    measuring.add_argument(
        "--minutes",
        type=_minutes,
        default=math.inf,
        metavar="N",
        help="begin no case that would not end in so many minutes (default: all of them)",
    )
    measuring.add_argument(
        "--bases",
        nargs="+",
        metavar="SIZE",
        help="of 0.6B 1.7B 4B 8B (default: these), and tiny, which needs no GPU and tells nothing of memory",
    )
    measuring.add_argument("--only", metavar="PATTERN", help="cases whose name has it: qlora, '0.6B-*-compiled*'")
    measuring.add_argument("--again", action="store_true", help="cases that failed, too")
    measuring.add_argument("--list", action="store_true", help="show the cases, and measure nothing")
    measuring.add_argument("--gpu", metavar="NAME", help="with --list: predict for this GPU of the catalogue")
    results = parser.add_argument_group("what was measured")
    results.add_argument("--collect", metavar="ROWS", help="make one table of rows, with --into")
    results.add_argument("--into", metavar="FILE", help="where the table goes")
    results.add_argument(
        "--table", nargs="?", const="", metavar="FILE", help="sum up a table, or rows (default: of --into or --out)"
    )


def run(arguments: argparse.Namespace) -> int:
    from launcher.gpus import find_gpu

    if (arguments.collect is None) != (arguments.into is None):
        raise InputError("--collect ROWS and --into FILE belong together")
    if arguments.gpu is not None and not arguments.list:
        raise InputError("--gpu is for --list: memory is measured on the GPU that is here")
    if arguments.list:
        if arguments.gpu is not None:
            find_gpu(arguments.gpu)  # one that nobody knows is a mistake, not a grid without cases
        return _list(arguments)
    if arguments.collect is not None:
        _collect(Path(arguments.collect), Path(arguments.into))
        return _sum_up(arguments, arguments.into) if arguments.table is not None else ExitCode.DONE
    if arguments.table is not None and (arguments.table or arguments.out is not None):
        return _sum_up(arguments, arguments.out)
    if arguments.out is None:
        raise InputError("nothing is named to be done", hint="--out ROWS measures, --list shows, --table FILE sums up")
    return _measure(arguments)


def _measure(arguments: argparse.Namespace) -> int:
    from launcher.bench.memory_grid import run_grid

    cases = _select(arguments)
    _check_gpu(cases)
    progress = run_grid(cases, Path(arguments.out), arguments.minutes, say, again=arguments.again)
    print(_describe(progress, len(cases)))
    if progress.num_left:
        return ExitCode.PREEMPTED
    return ExitCode.RUN_FAILED if progress.failed else ExitCode.DONE


def _select(arguments: argparse.Namespace) -> tuple[GridCase, ...]:
    from launcher.bench.memory_cases import BASES, select_cases

    return select_cases(arguments.bases or list(BASES), arguments.only)


def _check_gpu(cases: Sequence[GridCase]) -> None:
    from launcher.bench.memory_cases import TINY
    from launcher.probe import probe_hardware

    if any(case.base != TINY for case in cases) and probe_hardware().gpu is None:
        raise InputError(
            "there is no GPU here, so there is no memory to be measured",
            hint="--bases tiny tries every code path without one; --list --gpu h200 shows what is predicted",
        )


def _describe(progress: Progress, num_cases: int) -> str:
    parts = [f"{progress.num_measured} of {num_cases} cases are measured"]
    parts += [f"{progress.num_left_out} are left out"] if progress.num_left_out else []
    parts += [f"{len(progress.failed)} failed ({', '.join(progress.failed)})"] if progress.failed else []
    if progress.num_left:
        parts.append(f"{progress.num_left} are to do, the next takes about {progress.next_seconds or 0:.0f} s")
    return "; ".join(parts)


def _list(arguments: argparse.Namespace) -> int:
    from launcher.bench.memory_grid import expect_seconds
    from launcher.bench.memory_rows import load_rows
    from launcher.cli.tables import print_table

    cases = _select(arguments)
    rows = load_rows(Path(arguments.out)) if arguments.out is not None else ()
    known = {row.case: row for row in rows}
    shown, seconds = [], 0.0
    for case in cases:
        row = known.get(case.name)
        expected = expect_seconds(case, rows) if row is None else 0.0
        seconds += expected
        shown.append((case.name, _predict(case, arguments.gpu), _state(row), f"{expected:.0f} s" if expected else ""))
    print_table(("case", "predicted", "state", "takes"), shown, styles=("cyan", "bold", "", "dim"))
    print(f"{len(cases)} cases; those to do take about {seconds / 60:.0f} min, a guess until some are measured")
    return ExitCode.DONE


def _predict(case: GridCase, gpu: str | None) -> str:
    """On paper, or for this machine; a reason where it is not measured."""
    import tempfile

    from launcher.bench.memory_grid import GridSpec
    from launcher.bench.memory_plans import plan_case
    from launcher.units import format_gib

    with tempfile.TemporaryDirectory() as folder:
        try:
            memory = plan_case(case, Path(folder), GridSpec().num_steps, gpu).plan.memory
        except LauncherError as error:
            return f"left out: {error.title}"
    return format_gib(memory.total_bytes)


def _state(row: GridRow | None) -> str:
    if row is None:
        return "to do"
    if row.left_out is not None:
        return "left out"
    return "measured" if row.is_measured else f"failed: {(row.error or '').splitlines()[0]}"


def _collect(rows: Path, into: Path) -> None:
    from launcher.bench.memory_rows import load_rows, make_table, write_table

    if not rows.is_file():
        raise InputError(f"{rows} is no file")
    table = make_table(load_rows(rows))
    write_table(into, table)
    say(f"{len(table.records)} configurations in {into}")


def _sum_up(arguments: argparse.Namespace, other: str | None) -> int:
    from launcher.bench.memory_rows import load_table
    from launcher.bench.memory_summary import find_miscounted, make_summaries
    from launcher.cli.tables import print_table

    table = load_table(Path(arguments.table or other or ""))
    summaries = make_summaries(table)
    print(_head(table))
    if summaries:
        print_table(
            ("part", "predicted", "configurations", "median", "95 % within", "worst over", "worst under"),
            [_make_row(summary) for summary in summaries],
            styles=("cyan", "", "bold", "bold", "bold", "", ""),
        )
    else:
        print("no memory was measured: there was no GPU")
    for case, why in table.left_out.items():
        print(f"left out: {case}: {why}")
    for told in find_miscounted(table):
        print(f"warning: {told}")
    return ExitCode.DONE


def _head(table: GridTable) -> str:
    software = ", ".join(f"{name} {version}" for name, version in sorted(table.versions.items()))
    return f"{len(table.records)} configurations on {table.gpu or 'no GPU'}, {table.date} ({software})"


def _make_row(summary: Summary) -> tuple[str, ...]:
    over, under = summary.worst_over, summary.worst_under
    return (
        summary.part,
        summary.basis,
        str(summary.num_cases),
        f"{100 * summary.median:.2f} %",
        f"{100 * summary.within_95:.1f} %",
        f"{100 * over.error:+.1f} % {over.case}",
        f"{100 * under.error:+.1f} % {under.case}",
    )


def _minutes(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is not a number of minutes above 0")
    return number
