"""`launcher bench ablation`: the speedup of each optimization, alone and cumulatively."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.bench_vary import check_load, find_out, open_work_folder, prepare_data, report_progress
from launcher.cli.tables import print_json, print_table
from launcher.core.errors import ExitCode, InputError, escape
from launcher.core.run_paths import expand_home
from launcher.request.arguments import add_request_arguments, make_request
from launcher.request.flag_types import positive_int

if TYPE_CHECKING:
    from launcher.bench.ablation_report import Ablation
    from launcher.bench.ablation_stages import Stage

HELP = "measure every optimization from a plain training loop to the launcher's, alone and cumulatively"
_EXPERT = "neo4j"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `launcher bench ablation`."""
    add_request_arguments(parser, default_expert=_EXPERT)
    group = parser.add_argument_group("the ablation")
    stages = "measure only these stages (default: all); the first and the last are always measured"
    group.add_argument("--stages", metavar="A,B", help=stages)
    group.add_argument("--steps", type=positive_int, default=4, metavar="N", help="timed steps per stage (default 4)")
    group.add_argument("--warm", type=positive_int, default=2, metavar="N", help="warm-up steps, not timed (default 2)")
    group.add_argument(
        "--seconds",
        type=positive_int,
        default=90,
        metavar="N",
        help="time limit for the steps of a stage; steps are shortened if two do not fit (default 90)",
    )
    group.add_argument(
        "--limit",
        type=positive_int,
        default=600,
        metavar="SECONDS",
        help="time limit per stage, with startup (default 600)",
    )
    group.add_argument(
        "--out",
        type=expand_home,
        metavar="FOLDER",
        help="default: bench/ablation-EXPERT; an interrupted ablation resumes there",
    )
    group.add_argument("--json", action="store_true", help="print the result as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print the stages of the ablation; return RUN_FAILED unless the launcher's own loop was measured."""
    from launcher.bench.ablation import AblationEffort, run_ablation
    from launcher.bench.ablation_report import make_ablation
    from launcher.bench.ablation_stages import list_measurements, list_stages
    from launcher.bench.variants import check_one_process
    from launcher.request.request import plan_request

    planned = plan_request(make_request(arguments))
    plan = planned.plan
    check_one_process(plan, plan.expert)
    out = find_out(arguments, f"bench/ablation-{plan.expert}")
    stages = _select_stages(list_stages(plan), arguments.stages)
    measurements = list_measurements(stages, in_fp8=plan.precision.uses_fp8)
    store = prepare_data(planned).store.folder
    notes = check_load(plan)
    effort = AblationEffort(
        warmup_steps=arguments.warm,
        timed_steps=arguments.steps,
        seconds=arguments.seconds,
        limit_seconds=arguments.limit,
    )
    with open_work_folder(out) as folder:
        records = run_ablation(plan, store, measurements, effort, folder, report_progress)
        ablation = make_ablation(plan, records, arguments.warm, arguments.steps, notes)
        files = _write(ablation, folder)
    if arguments.json:
        print_json(ablation)
    else:
        _print(ablation)
        print(f"written to {escape(str(folder))}/: {', '.join(files)}")
    is_complete = any(record.key == "launcher" and record.status == "measured" for record in records)
    return ExitCode.DONE if is_complete else ExitCode.RUN_FAILED


def _select_stages(stages: tuple[Stage, ...], flag: str | None) -> tuple[Stage, ...]:
    if flag is None:
        return stages
    names = [name.strip() for name in flag.split(",")]
    known = [stage.key for stage in stages]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InputError(f"--stages: no stage {', '.join(unknown)}", hint=f"stages: {', '.join(known)}")
    return tuple(stage for stage in stages if stage.key in names)


def _write(ablation: Ablation, folder: Path) -> list[str]:
    """Write the ablation as JSON, Markdown and, if matplotlib is installed, a plot; return the names of the files."""
    from launcher.bench.ablation_report import INSTALL_HINT, can_plot, render_markdown, render_png
    from launcher.core.run_paths import write_text_atomically

    png = render_png(ablation) if can_plot() else None
    texts = {
        "ablation.json": ablation.model_dump_json(indent=2) + "\n",
        "ablation.md": render_markdown(ablation),
    }
    for name, text in texts.items():
        write_text_atomically(folder / name, text)
    if png is None:
        report_progress(INSTALL_HINT)
        return list(texts)
    (folder / "ablation.png").write_bytes(png)
    return [*texts, "ablation.png"]


def _print(ablation: Ablation) -> None:
    from launcher.bench.ablation_report import HEADER, describe, list_missing, table_rows

    print(f"\n{escape(ablation.expert)}: {escape(describe(ablation))}\n")
    print_table(HEADER, table_rows(ablation), ("bold",))
    print()
    for line in list_missing(ablation):
        print(escape(line))
    for note in ablation.notes:
        print(f"note: {escape(note)}")
