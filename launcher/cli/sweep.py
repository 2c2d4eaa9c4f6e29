"""`launcher sweep`: search hyperparameters, one run per trial, within a budget; the same command continues a sweep."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.plan import print_plan
from launcher.cli.run_lookup import add_runs_dir
from launcher.cli.tables import print_json, print_table
from launcher.core.errors import ExitCode, InputError, LauncherError, escape
from launcher.core.log import get_logger
from launcher.core.metrics import EVAL_LOSS
from launcher.core.run_paths import make_run_paths
from launcher.core.units import format_cost, format_duration
from launcher.request import flag_types as types
from launcher.request.arguments import add_request_arguments, make_request

if TYPE_CHECKING:
    from launcher.launch.sweep.run import Sweep, SweepResult
    from launcher.launch.sweep.study import TrialRecord
    from launcher.plan.model import Plan

log = get_logger(__name__)

_METRIC_KEY = "training.config.metric_for_best_model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a sweep."""
    add_request_arguments(parser)
    group = parser.add_argument_group("sweep")
    group.add_argument(
        "--param",
        action="append",
        default=[],
        metavar="NAME=VALUES",
        dest="params",
        help="a range (learning_rate=1e-5..1e-3:log, dropout=0..0.2) or a list (rank=8,16,32); one flag per parameter",
    )
    group.add_argument("--trials", type=types.positive_int, default=10, metavar="N", help="default 10")
    group.add_argument(
        "--objective",
        default="eval_loss",
        metavar="METRIC",
        help="eval_loss (default), or eval/<check>: the rate at which answers pass a check of the judge",
    )
    group.add_argument("--no-prune", action="store_true", help="train every trial to its end")
    group.add_argument(
        "--seed", type=types.non_negative_int, default=0, metavar="N", help="random seed of the search (default 0)"
    )
    group.add_argument(
        "--max-hours", type=types.positive_number, metavar="H", help="start no trial that would exceed this total time"
    )
    group.add_argument(
        "--max-cost", type=types.positive_number, metavar="AMOUNT", help="the same for the total cost; needs --price"
    )
    group.add_argument("--name", metavar="NAME", help="folder of the sweep in the runs folder (default: EXPERT-sweep)")
    group.add_argument("--dry-run", action="store_true", help="show the search space, a plan and the expected time")
    add_runs_dir(group)
    group.add_argument("--json", action="store_true", help="print the trials as JSON")


def run(arguments: argparse.Namespace) -> ExitCode:
    """Run a sweep, or with --dry-run show what it would search."""
    from launcher.launch.start import check_packages, check_startable
    from launcher.launch.sweep.run import Sweep, check_objective, parse_objective, run_sweep
    from launcher.launch.sweep.space import parse_params
    from launcher.launch.sweep.study import check_optuna
    from launcher.manifest import find_manifest
    from launcher.manifest.trust import check_trust, list_code
    from launcher.request.request import plan_request

    if arguments.dry_run and arguments.json:
        raise InputError("--dry-run and --json cannot be used together: a dry run has no trials to print")
    if arguments.name:
        make_run_paths(Path(arguments.runs_dir), arguments.name, "--name")
    objective = parse_objective(arguments.objective)
    request = make_request(arguments)
    if objective != EVAL_LOSS:
        request = replace(request, overrides=(f"{_METRIC_KEY}={objective}", *request.overrides))
    params = parse_params(arguments.params, find_manifest(request.expert), request.overrides)
    check_optuna()
    planned = plan_request(request)
    check_objective(planned.plan, objective)
    sweep = Sweep(
        request=request,
        params=params,
        runs_dir=Path(arguments.runs_dir),
        name=arguments.name or f"{planned.plan.expert}-sweep",
        num_trials=arguments.trials,
        objective=objective,
        seed=arguments.seed,
        prunes=not arguments.no_prune,
        max_seconds=_find_budget(arguments, planned.plan),
        max_restarts=arguments.max_restarts or 0,
    )
    if arguments.dry_run:
        _print_dry_run(sweep)
        return ExitCode.DONE
    check_trust(list_code(planned.loaded.manifest), planned.loaded.path)
    check_startable(planned.plan)
    check_packages(planned.plan)
    result = run_sweep(sweep, log.info)
    page = _write_page(sweep, result)
    if arguments.json:
        _print_json(sweep, result)
    else:
        _print_result(sweep, result, page)
    if result.best is not None or result.exit_code:
        return result.exit_code
    has_failed = any(trial.status == "failed" for trial in result.trials)
    return ExitCode.RUN_FAILED if has_failed else ExitCode.DOES_NOT_FIT


def _find_budget(arguments: argparse.Namespace, plan: Plan) -> float | None:
    """Return the seconds that all trials together may take, from --max-hours and --max-cost; None without a limit."""
    limits = [] if arguments.max_hours is None else [arguments.max_hours * 3600]
    if arguments.max_cost is not None:
        price = plan.speed.price_per_gpu_hour
        if not price:
            raise InputError("--max-cost needs the price of a GPU-hour", hint="add --price 0.40, or --price 24/node")
        limits.append(arguments.max_cost / (price * plan.hardware.num_ranks) * 3600)
    return min(limits, default=None)


def _print_dry_run(sweep: Sweep) -> None:
    from launcher.launch.sweep.run import format_values
    from launcher.launch.sweep.trial import plan_trial

    print_table(("parameter", "values"), [(param.name, param.describe()) for param in sweep.params])
    trial = sweep.open_study(in_memory=True).ask()
    run = plan_trial(sweep.request, trial.overrides, sweep.runs_dir, sweep.name_run(trial))
    print(f"\nPlan of trial 0 ({format_values(trial)}):\n")
    print_plan(run.planned.plan)
    speed = run.planned.plan.speed
    goal = "highest" if sweep.maximizes else "lowest"
    print(f"\n{sweep.num_trials} trials for the {goal} {sweep.objective}; ", end="")
    if speed.total_seconds is None:
        print("their duration is unknown until the first one has run")
    else:
        total = speed.total_seconds * sweep.num_trials
        cost = "" if speed.cost is None else f", {format_cost(speed.cost * sweep.num_trials, speed.currency)}"
        print(f"without pruning about {format_duration(total)} for all steps{cost}")
    if sweep.max_seconds is not None:
        print(f"Budget: {format_duration(sweep.max_seconds)}")
    print("Dry run: nothing was written or started.")


def _write_page(sweep: Sweep, result: SweepResult) -> Path | None:
    """Write an HTML page that compares all done and pruned trials; return its path, or None if none was written."""
    from launcher.analysis.compare import load_run_facts, make_comparison
    from launcher.analysis.compare.html import render_html
    from launcher.core.run_paths import RunPaths, write_text_atomically

    names = [sweep.name_run(trial) for trial in result.trials if trial.status in ("done", "pruned")]
    if not names:
        return None
    page = sweep.folder / "compare.html"
    try:
        runs = [load_run_facts(RunPaths(sweep.runs_dir / name)) for name in names]
        made_at = datetime.now(UTC).isoformat(timespec="seconds")
        comparison = make_comparison(runs, made_at=made_at, title=f"{sweep.name}: {len(runs)} trials", skipped=[])
        write_text_atomically(page, render_html(comparison))
    except LauncherError as error:
        log.warning(f"the trials cannot be compared: {error.title}")
        return None
    return page


def _print_result(sweep: Sweep, result: SweepResult, page: Path | None) -> None:
    from launcher.launch.sweep.run import shorten_number

    head = ("trial", *(param.name for param in sweep.params), sweep.objective, "time", "status", "run or reason")
    rows = []
    for trial in result.trials:
        mark = " (best)" if result.best is not None and trial.number == result.best.number else ""
        rows.append(
            (
                str(trial.number),
                *(shorten_number(trial.values[param.key]) for param in sweep.params),
                "" if trial.objective is None else f"{trial.objective:.4f}",
                format_duration(trial.seconds) if trial.seconds else "",
                f"{trial.status}{mark}",
                sweep.name_run(trial) if trial.status in ("done", "pruned", "running") else escape(trial.reason),
            )
        )
    print_table(head, rows)
    print(f"\nEnded: {result.ended_because}")
    if any(trial.status == "running" for trial in result.trials) or result.exit_code:
        print("The same command continues the sweep.")
    if page is not None:
        print(f"Compared:        {escape(str(page))}")
    if result.best is not None:
        print(f"Use the best:    {shlex.join(('launcher', 'export', _name_best(sweep, result.best)))}")
        print(f"Train it again:  {_format_command(sweep, result.best)}")


def _name_best(sweep: Sweep, trial: TrialRecord) -> str:
    name = sweep.name_run(trial)
    return name if str(sweep.runs_dir) == "runs" else str(sweep.runs_dir / name)


def _format_command(sweep: Sweep, trial: TrialRecord) -> str:
    """Return the `launcher train` command that trains with a trial's settings outside of the sweep."""
    from launcher.analysis.report.render import format_command

    return escape(format_command(replace(sweep.request, overrides=(*sweep.request.overrides, *trial.overrides))))


def _print_json(sweep: Sweep, result: SweepResult) -> None:
    trials = [
        {
            "trial": trial.number,
            "run_id": sweep.name_run(trial),
            "parameters": dict(trial.values),
            "status": trial.status,
            "objective": trial.objective,
            "seconds": trial.seconds,
            "reason": trial.reason,
        }
        for trial in result.trials
    ]
    best = None if result.best is None else sweep.name_run(result.best)
    content = {"name": sweep.name, "objective": sweep.objective, "ended_because": result.ended_because, "best": best}
    print_json({**content, "trials": trials})
