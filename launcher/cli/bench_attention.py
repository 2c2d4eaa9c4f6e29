"""`launcher bench attention`: time the attention backends on this GPU, so that later plans choose the fastest."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from launcher.cli.bench_vary import check_load, find_out, open_work_folder, report_progress
from launcher.cli.tables import print_json, print_table
from launcher.core.errors import ExitCode, Problem, RunFailedError, escape
from launcher.core.run_paths import expand_home
from launcher.request.arguments import add_request_arguments, make_request
from launcher.request.flag_types import positive_int

if TYPE_CHECKING:
    from launcher.bench.attention import AttentionResult
    from launcher.plan.calibration import MeasuredAttention

HELP = "measure the attention backends on this GPU with an expert's shapes; later plans choose the fastest"
_EXPERT = "neo4j"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `launcher bench attention`."""
    add_request_arguments(parser, default_expert=_EXPERT)
    group = parser.add_argument_group("the measurement")
    group.add_argument(
        "--limit",
        type=positive_int,
        default=300,
        metavar="SECONDS",
        help="time limit per backend, with start-up and compilation (default 300)",
    )
    group.add_argument(
        "--out", type=expand_home, metavar="FOLDER", help="write the logs of all backends to this folder"
    )
    group.add_argument("--json", action="store_true", help="print the result as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Time all attention backends that can run here, print a table, and store the times for later plans."""
    from launcher.bench.attention import check_measurable, list_measurable, make_measurement, measure_attention
    from launcher.request.request import plan_request
    from launcher.runs.calibration_store import remember_attention

    plan = plan_request(make_request(arguments)).plan
    check_measurable(plan)
    out = find_out(arguments)
    for note in check_load(plan):
        report_progress(note)
    with open_work_folder(out) as folder:
        result = measure_attention(plan, list_measurable(plan), folder, arguments.limit, report_progress)
    if not result.timings:
        problems = tuple(Problem(where=name, what=what) for name, what in result.problems.items())
        raise RunFailedError("no attention backend could be measured", problems)
    measured = make_measurement(plan, result)
    file = remember_attention(plan.hardware, measured)
    if arguments.json:
        print_json(measured)
    else:
        _print(measured, result, file)
    return ExitCode.DONE


def _print(measured: MeasuredAttention, result: AttentionResult, file: str) -> None:
    from launcher.plan.attention import TITLES

    shape = measured.shape
    print(
        f"one layer, {measured.num_sequences} x {measured.sequence_length:,} tokens, {shape.num_heads} query and "
        f"{shape.num_kv_heads} KV heads of {shape.head_dim}, {shape.dtype}\n"
    )
    rows = [
        (
            name,
            TITLES[name],
            f"{timing.forward_ms:.3f}",
            f"{timing.backward_ms:.3f}",
            f"{timing.milliseconds:.3f}",
            f"{timing.difference:.4f}",
            "yes" if timing.is_deterministic else "no",
        )
        for name, timing in sorted(result.timings.items(), key=lambda item: item[1].milliseconds)
    ]
    header = ("backend", "", "forward ms", "backward ms", "both ms", "differs from FP32", "deterministic")
    print_table(header, rows, ("bold",))
    print()
    for name, what in result.problems.items():
        print(f"{name} cannot be used here: {escape(what)}")
    print(f"stored for later plans in {escape(file)}" if file else "not stored: calibration is disabled")
