"""`launcher bench ladder`: what each optimisation brings, alone and on top of the others, from a plain loop to ours."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.arguments import add_request_arguments, make_request, positive
from launcher.cli.bench_vary import prepare_side, tell, warn_of_load, work_folder
from launcher.errors import ExitCode, InputError, escape

if TYPE_CHECKING:
    from launcher.bench.ladder_report import Ladder
    from launcher.bench.rungs import Rung

HELP = "measure every optimisation from a plain training loop to the launcher's, alone and cumulatively"
_EXPERT = "neo4j"
_FILES = ("ladder.json", "ladder.md", "ladder.png", "ladder.html")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_request_arguments(parser, default_expert=_EXPERT)
    ladder = parser.add_argument_group("the ladder")
    ladder.add_argument("--rungs", metavar="A,B", help="only these (default: all; the first and the last always)")
    ladder.add_argument("--steps", type=positive, default=4, metavar="N", help="timed steps of a rung (default 4)")
    ladder.add_argument("--warm", type=positive, default=2, metavar="N", help="steps before them, dropped (default 2)")
    ladder.add_argument(
        "--seconds",
        type=positive,
        default=90,
        metavar="N",
        help="time no more steps after so long, and cut those of which two would take longer (default 90)",
    )
    ladder.add_argument(
        "--limit", type=positive, default=600, metavar="SECONDS", help="longest a rung may take, its start too (600)"
    )
    ladder.add_argument(
        "--out",
        metavar="FOLDER",
        help="default: bench/ladder-EXPERT; a ladder that was interrupted goes on there",
    )
    ladder.add_argument("--json", action="store_true", help="print the ladder as JSON")


def run(arguments: argparse.Namespace) -> int:
    from launcher.bench.ladder import LadderEffort, climb_ladder
    from launcher.bench.ladder_report import make_ladder
    from launcher.bench.rungs import make_climbs, make_rungs
    from launcher.bench.sides import Side, check_one_process
    from launcher.inputs import plan_request

    planned = plan_request(make_request(arguments))
    plan = planned.plan
    check_one_process(plan, plan.expert)
    climbs = make_climbs(_pick(make_rungs(plan), arguments.rungs))
    store = prepare_side(plan, Side(label=plan.expert, planned=planned)).store.folder
    notes = warn_of_load(plan)
    effort = LadderEffort(
        warm_steps=arguments.warm,
        timed_steps=arguments.steps,
        seconds=arguments.seconds,
        limit_seconds=arguments.limit,
    )
    with work_folder(arguments.out or f"bench/ladder-{plan.expert}") as folder:
        records = climb_ladder(plan, store, climbs, effort, folder, tell)
        ladder = make_ladder(plan, records, arguments.warm, arguments.steps, notes)
        _write(ladder, folder)
    if arguments.json:
        print(ladder.model_dump_json(indent=2))
    else:
        _print(ladder, folder)
    is_whole = any(record.key == "launcher" and record.status == "measured" for record in records)
    return ExitCode.DONE if is_whole else ExitCode.RUN_FAILED


def _pick(rungs: tuple[Rung, ...], wanted: str | None) -> tuple[Rung, ...]:
    if wanted is None:
        return rungs
    names = [name.strip() for name in wanted.split(",")]
    known = [rung.key for rung in rungs]
    strangers = [name for name in names if name not in known]
    if strangers:
        raise InputError(f"--rungs: no rung {', '.join(strangers)}", hint=f"there are: {', '.join(known)}")
    return tuple(rung for rung in rungs if rung.key in names)


def _write(ladder: Ladder, folder: Path) -> None:
    from launcher.bench.ladder_page import render_page
    from launcher.bench.ladder_plot import draw_ladder
    from launcher.bench.ladder_report import render_markdown
    from launcher.bench.png import render_png
    from launcher.paths import write_text_atomically

    write_text_atomically(folder / "ladder.json", ladder.model_dump_json(indent=2) + "\n")
    write_text_atomically(folder / "ladder.md", render_markdown(ladder))
    write_text_atomically(folder / "ladder.html", render_page(ladder))
    (folder / "ladder.png").write_bytes(render_png(draw_ladder(ladder)))


def _print(ladder: Ladder, folder: Path) -> None:
    from launcher.bench.ladder_report import HEAD, describe, list_missing, make_rows
    from launcher.cli.tables import print_table

    print(f"\n{escape(ladder.expert)}: {escape(describe(ladder))}\n")
    print_table(HEAD, make_rows(ladder), ("bold",))
    print()
    for line in list_missing(ladder):
        print(escape(line))
    for note in ladder.notes:
        print(f"note: {escape(note)}")
    print(f"written to {escape(str(folder))}/: {', '.join(_FILES)}")
