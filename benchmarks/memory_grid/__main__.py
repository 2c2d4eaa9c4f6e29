"""`python -m benchmarks.memory_grid`: compare estimated and measured memory over a grid of trainings."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.core.errors import ExitCode, InputError, LauncherError
from launcher.core.log import configure, get_logger

if TYPE_CHECKING:
    from benchmarks.memory_grid.cases import GridCase
    from benchmarks.memory_grid.grid import Progress
    from benchmarks.memory_grid.rows import GridRow, GridTable
    from benchmarks.memory_grid.summary import Summary

log = get_logger(__name__)

HELP = "compare estimated and measured memory over a grid of trainings; can be interrupted and resumed"
_EPILOG = """\
exit codes: 0 every case is measured or skipped with a reason, 4 some failed (--again retries them),
75 out of time: start again to continue
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    configure()
    try:
        return run(make_parser().parse_args(argv))
    except LauncherError as error:
        log.error(error)
        return int(error.exit_code)


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory_grid",
        description=HELP,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    measuring = parser.add_argument_group("measuring")
    measuring.add_argument("--out", metavar="ROWS", help="append one line per case to this file (rows.jsonl)")
    measuring.add_argument(
        "--minutes",
        type=_minutes,
        default=math.inf,
        metavar="N",
        help="start no case that would not finish within N minutes (default: no limit)",
    )
    measuring.add_argument(
        "--bases",
        nargs="+",
        metavar="SIZE",
        help="0.6B 1.7B 4B 8B (default: all four), or tiny, which needs no GPU and has no memory figures",
    )
    measuring.add_argument("--only", metavar="PATTERN", help="only matching cases: qlora, '0.6B-*-compiled*'")
    measuring.add_argument("--again", action="store_true", help="retry cases that failed")
    measuring.add_argument("--list", action="store_true", help="list the cases without measuring")
    measuring.add_argument("--gpu", metavar="NAME", help="with --list: estimate for this GPU of the catalogue")
    results = parser.add_argument_group("results")
    results.add_argument("--collect", metavar="ROWS", help="combine rows into one table, with --output")
    results.add_argument("--output", metavar="FILE", help="file of the table")
    results.add_argument(
        "--table", nargs="?", const="", metavar="FILE", help="summarize a table or rows (default: --output or --out)"
    )
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Run the requested action."""
    from launcher.hardware.gpu_catalogue import lookup_gpu

    if (arguments.collect is None) != (arguments.output is None):
        raise InputError("--collect ROWS requires --output FILE, and vice versa")
    if arguments.gpu is not None and not arguments.list:
        raise InputError("--gpu requires --list: memory is measured on the local GPU")
    if arguments.list:
        if arguments.gpu is not None:
            lookup_gpu(arguments.gpu)  # raises for an unknown GPU
        return _list(arguments)
    if arguments.collect is not None:
        _collect(Path(arguments.collect), Path(arguments.output))
        return _summarize(arguments, arguments.output) if arguments.table is not None else ExitCode.DONE
    if arguments.table is not None and (arguments.table or arguments.out is not None):
        return _summarize(arguments, arguments.out)
    if arguments.out is None:
        raise InputError("no action given", hint="--out ROWS measures, --list lists, --table FILE summarizes")
    return _measure(arguments)


def _measure(arguments: argparse.Namespace) -> int:
    from benchmarks.memory_grid.grid import run_grid

    cases = _select(arguments)
    _check_gpu(cases)
    progress = run_grid(cases, Path(arguments.out), arguments.minutes, log.info, again=arguments.again)
    print(_describe(progress, len(cases)))
    if progress.num_left:
        return ExitCode.PREEMPTED
    return ExitCode.RUN_FAILED if progress.failed else ExitCode.DONE


def _select(arguments: argparse.Namespace) -> tuple[GridCase, ...]:
    from benchmarks.memory_grid.cases import BASES, select_cases

    return select_cases(arguments.bases or list(BASES), arguments.only)


def _check_gpu(cases: Sequence[GridCase]) -> None:
    from benchmarks.memory_grid.cases import TINY
    from launcher.hardware.probe import probe_hardware

    if any(case.base != TINY for case in cases) and probe_hardware().gpu is None:
        raise InputError(
            "no GPU on this machine to measure memory on",
            hint="--bases tiny runs every code path without a GPU; --list --gpu h200 shows the estimates",
        )


def _describe(progress: Progress, num_cases: int) -> str:
    parts = [f"{progress.num_measured} of {num_cases} cases measured"]
    parts += [f"{progress.num_left_out} skipped"] if progress.num_left_out else []
    parts += [f"{len(progress.failed)} failed ({', '.join(progress.failed)})"] if progress.failed else []
    if progress.num_left:
        parts.append(f"{progress.num_left} left, the next takes about {progress.next_seconds or 0:.0f} s")
    return "; ".join(parts)


def _list(arguments: argparse.Namespace) -> int:
    from benchmarks.memory_grid.grid import estimate_seconds
    from benchmarks.memory_grid.rows import load_rows
    from launcher.cli.tables import print_table

    cases = _select(arguments)
    rows = load_rows(Path(arguments.out)) if arguments.out is not None else ()
    known = {row.case: row for row in rows}
    table, seconds = [], 0.0
    for case in cases:
        row = known.get(case.name)
        expected = estimate_seconds(case, rows) if row is None else 0.0
        seconds += expected
        duration = f"{expected:.0f} s" if expected else ""
        table.append((case.name, _format_estimate(case, arguments.gpu), _state(row), duration))
    print_table(("case", "estimate", "state", "duration"), table, styles=("cyan", "bold", "", "dim"))
    print(f"{len(cases)} cases; those left take about {seconds / 60:.0f} min (a guess until some are measured)")
    return ExitCode.DONE


def _format_estimate(case: GridCase, gpu: str | None) -> str:
    """Format the estimated memory, or the reason why the case is skipped."""
    import tempfile

    from benchmarks.memory_grid.grid import GridSpec
    from benchmarks.memory_grid.plans import plan_case
    from launcher.core.units import format_gib

    with tempfile.TemporaryDirectory() as folder:
        try:
            memory = plan_case(case, Path(folder), GridSpec().num_steps, gpu).plan.memory
        except LauncherError as error:
            return f"skipped: {error.title}"
    return format_gib(memory.total_bytes)


def _state(row: GridRow | None) -> str:
    if row is None:
        return "left"
    if row.left_out is not None:
        return "skipped"
    return "measured" if row.is_measured else f"failed: {(row.error or '').splitlines()[0]}"


def _collect(rows: Path, output: Path) -> None:
    from benchmarks.memory_grid.rows import load_rows, make_table, write_table

    if not rows.is_file():
        raise InputError(f"{rows}: no such file")
    table = make_table(load_rows(rows))
    write_table(output, table)
    log.info(f"{len(table.records)} configurations in {output}")


def _summarize(arguments: argparse.Namespace, default: str | None) -> int:
    from benchmarks.memory_grid.rows import load_table
    from benchmarks.memory_grid.summary import list_miscounted, make_summaries
    from launcher.cli.tables import print_table

    table = load_table(Path(arguments.table or default or ""))
    summaries = make_summaries(table)
    print(_format_header(table))
    if summaries:
        print_table(
            ("part", "estimate", "configurations", "median", "95 % within", "worst over", "worst under"),
            [_make_row(summary) for summary in summaries],
            styles=("cyan", "", "bold", "bold", "bold", "", ""),
        )
    else:
        print("no memory was measured (no GPU)")
    for case, reason in table.left_out.items():
        print(f"skipped: {case}: {reason}")
    for line in list_miscounted(table):
        print(f"warning: {line}")
    return ExitCode.DONE


def _format_header(table: GridTable) -> str:
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


if __name__ == "__main__":
    sys.exit(main())
