"""`launcher bench EXPERT --vary KEY=A,B`: is A faster than B on this machine, and how certain is that?"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.tables import print_json, print_table
from launcher.core.errors import ExitCode, InputError, escape
from launcher.core.log import get_logger
from launcher.core.output_path import check_output_folder
from launcher.core.run_paths import expand_home
from launcher.request.arguments import add_request_arguments, make_request
from launcher.request.flag_types import positive_int

if TYPE_CHECKING:
    from launcher.bench.ab_test import BlockSize
    from launcher.bench.result import BenchResult
    from launcher.bench.variants import Variant
    from launcher.corpus.prepare import Prepared
    from launcher.plan.model import Plan
    from launcher.request.request import PlannedRun

log = get_logger(__name__)

HELP = "compare the speed of two or more values of one manifest key, measured alternately"
_MAX_LOAD = 0.5  # per core: above it, other processes affect the speeds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `launcher bench --vary`."""
    add_request_arguments(parser)
    bench = parser.add_argument_group("the comparison")
    bench.add_argument(
        "--vary",
        required=True,
        metavar="KEY=A,B",
        help="a key of training.config, or any path that --set takes: torch_compile=true,false",
    )
    bench.add_argument("--steps", type=positive_int, default=8, metavar="N", help="timed steps per block (default 8)")
    bench.add_argument("--repeats", type=positive_int, default=7, metavar="N", help="blocks per variant (default 7)")
    bench.add_argument(
        "--warm", type=positive_int, default=3, metavar="N", help="warm-up steps per block, not timed (default 3)"
    )
    bench.add_argument(
        "--fresh", action="store_true", help="start a new process for every block, to include startup variance"
    )
    bench.add_argument(
        "--limit",
        type=positive_int,
        default=900,
        metavar="SECONDS",
        help="time limit for a build and a block (default 900)",
    )
    bench.add_argument(
        "--out", type=expand_home, metavar="FOLDER", help="write result.json, report.md and logs to this folder"
    )
    bench.add_argument("--json", action="store_true", help="print the result as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Measure the speed of all variants in alternation, and print how they compare."""
    from launcher.bench.ab_test import fit_together, make_block_size, measure_variants
    from launcher.bench.bootstrap import MIN_ROUNDS
    from launcher.bench.result import list_caveats, make_result
    from launcher.bench.variants import parse_vary, plan_variants

    if arguments.repeats < MIN_ROUNDS:
        raise InputError(
            f"--repeats {arguments.repeats}: too few for a confidence interval", hint=f"use at least {MIN_ROUNDS}"
        )
    out = find_out(arguments)
    variation = parse_vary(arguments.vary)
    variants = plan_variants(make_request(arguments), variation)
    prepared = [prepare_data(variant.planned) for variant in variants]
    stores = [data.store.folder for data in prepared]
    batch_sizes = [variant.plan.batch.global_batch_size for variant in variants]
    block_size = make_block_size(batch_sizes, arguments.warm, arguments.steps)
    num_sequences = min(data.store.audit.splits["train"].num_packs for data in prepared)
    notes = [
        *check_load(variants[0].plan),
        *list_caveats(variants, block_size, [str(store) for store in stores], num_sequences),
    ]
    reuse_processes = not arguments.fresh and fit_together(variants)
    if not arguments.json:
        _print_start(variants, block_size, arguments.repeats, reuse_processes)
    with open_work_folder(out) as folder:
        measurements = measure_variants(
            variants,
            stores,
            block_size,
            folder / "logs",
            repeats=arguments.repeats,
            limit_seconds=arguments.limit,
            reuse_processes=reuse_processes,
            report=report_progress,
        )
        result = make_result(variation, variants, measurements, notes)
        if out is not None:
            _write(result, folder)
    if arguments.json:
        print_json(result)
    else:
        _print_result(result, arguments.out)
    return ExitCode.DONE


def prepare_data(planned: PlannedRun) -> Prepared:
    """Check that the plan can run here, then prepare its data."""
    from launcher.cli.train import prepare
    from launcher.launch.start import check_packages, check_startable
    from launcher.manifest.trust import check_trust, list_code

    check_trust(list_code(planned.loaded.manifest), planned.loaded.path)
    check_startable(planned.plan)
    check_packages(planned.plan)
    return prepare(planned)


def find_out(arguments: argparse.Namespace, default: str | None = None) -> Path | None:
    """Return the checked folder of --out, or of `default`; None without either."""
    name = default if arguments.out is None else arguments.out
    return None if name is None else check_output_folder(name, "--out")


def check_load(plan: Plan) -> list[str]:
    """Return a warning if other processes keep the CPU busy, else an empty list."""
    cores, load = plan.hardware.cpu_cores_per_node, os.getloadavg()[0]
    if load < _MAX_LOAD * cores:
        return []
    return [f"this machine was already busy (load {load:.1f} on {cores} cores): small differences are less reliable"]


@contextmanager
def open_work_folder(out: Path | None) -> Iterator[Path]:
    """Yield the folder of --out, which is created if necessary; without --out, a temporary one."""
    if out is None:
        with tempfile.TemporaryDirectory(prefix="launcher-bench-") as name:
            yield Path(name)
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {out}: {error.strerror}", hint="choose a writable folder") from None
    yield out


def _write(result: BenchResult, folder: Path) -> None:
    from launcher.bench.result import render_markdown
    from launcher.core.run_paths import write_text_atomically

    write_text_atomically(folder / "result.json", result.model_dump_json(indent=2) + "\n")
    write_text_atomically(folder / "report.md", render_markdown(result))


def _print_start(variants: Sequence[Variant], block_size: BlockSize, repeats: int, reuse_processes: bool) -> None:
    from launcher.hardware.model import format_hardware

    plan = variants[0].plan
    print(f"{escape(plan.expert)} on {escape(format_hardware(plan.hardware))}, {plan.profile} profile")
    warmup, timed = block_size.count_steps(max(variant.plan.batch.global_batch_size for variant in variants))
    processes = "one process per variant" if reuse_processes else "a new process for every block"
    blocks = f"{repeats} interleaved blocks of {warmup} + {timed} steps each"
    print(f"{len(variants)} variants, {blocks}; {processes}\n", flush=True)


def _print_result(result: BenchResult, out: str | None) -> None:
    from launcher.bench.result import describe_method, table_header, table_rows

    print()
    print_table(table_header(result), table_rows(result), ("bold",))
    print()
    if result.changes:
        header = ("decided by the plan", *(variant.label for variant in result.variants))
        print_table(header, [(change.name, *(value or "-" for value in change.values)) for change in result.changes])
        print()
    for verdict in result.verdicts:
        print(escape(verdict.text))
    print(f"({describe_method(result)})")
    for note in result.notes:
        print(f"note: {escape(note)}")
    if out is not None:
        print(f"written to {escape(out)}/: result.json, report.md, logs")


def report_progress(text: str) -> None:
    """Log a progress line."""
    log.info(escape(text))
