"""`launcher regression`: train an expert the old way and the optimized way, evaluate both on the same rows."""

from __future__ import annotations

import argparse
import os
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.eval import DEFAULT_MAX_REGRESSION
from launcher.cli.run_lookup import add_runs_dir
from launcher.core.errors import ExitCode, InputError
from launcher.core.log import get_logger
from launcher.request.flag_types import percentage, positive_int

if TYPE_CHECKING:
    from launcher.bench.regression.pair import Pair
    from launcher.core.run_paths import RunPaths
    from launcher.corpus.audit import Audit
    from launcher.request.request import PlannedRun

log = get_logger(__name__)

_MAX_LOAD = 0.5  # per core: above it, other processes affect the speeds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `launcher regression`."""
    parser.add_argument("expert", metavar="EXPERT", help="name of an expert (json), or path of a manifest.json")
    both = parser.add_argument_group("both trainings")
    both.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="override a manifest value"
    )
    both.add_argument("--max-steps", type=positive_int, metavar="N", help="stop after N optimizer steps")
    both.add_argument(
        "--base", metavar="NAME", help="another base model: one of the manifest's, a folder, or a Hub name"
    )
    both.add_argument(
        "--profile", choices=("auto", "full", "smoke"), default="auto", help="auto: full with a GPU, smoke without"
    )
    add_runs_dir(both)
    evaluations = parser.add_argument_group("both evaluations")
    evaluations.add_argument("--rows", type=positive_int, metavar="N", help="number of rows to evaluate (default: all)")
    evaluations.add_argument("--max-new-tokens", type=positive_int, metavar="N", help="longest answer (default 512)")
    evaluations.add_argument(
        "--max-regression",
        type=percentage,
        default=DEFAULT_MAX_REGRESSION,
        metavar="P%",
        help="largest allowed drop in correct answers, in percentage points (default 5%%)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Train both, evaluate both, and print the comparison; the exit code is that of the quality gate."""
    from launcher.bench.regression.commands import evaluate, train
    from launcher.bench.regression.pair import plan_pair
    from launcher.cli.print_regression import print_pair
    from launcher.core.run_paths import make_run_id, make_run_paths
    from launcher.request.request import Request

    request = Request(
        expert=arguments.expert,
        overrides=tuple(arguments.overrides),
        base=arguments.base,
        max_steps=arguments.max_steps,
        profile=arguments.profile,
    )
    pair = plan_pair(request, _prepare)
    load_notes = _check_load(pair)
    if not arguments.json:
        print_pair(pair)
    stem = make_run_id(pair.new.plan.expert, "regression", datetime.now(UTC))
    runs_dir = Path(arguments.runs_dir)
    old, new = (make_run_paths(runs_dir, f"{stem}-{side.name}") for side in (pair.old, pair.new))
    cpu_seconds = []
    for side, paths in ((pair.old, old), (pair.new, new)):
        log.info(f"training {paths.run_id}")
        cpu_seconds.append(train(side.request, paths))
    for paths in (old, new):
        evaluate(paths, _list_eval_flags(arguments))
    conditions = Conditions(cpu_seconds=(cpu_seconds[0], cpu_seconds[1]), notes=load_notes)
    return compare(
        pair, old, new, max_regression=arguments.max_regression, is_json=arguments.json, conditions=conditions
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """What was observed while training both, and is recorded in no file."""

    cpu_seconds: tuple[float, float] | None = None  # old and new
    notes: tuple[str, ...] = ()


def compare(
    pair: Pair,
    old: RunPaths,
    new: RunPaths,
    *,
    max_regression: float,
    is_json: bool,
    conditions: Conditions | None = None,
) -> int:
    """Compare two runs that are trained and evaluated; return the exit code of the quality gate."""
    from launcher.bench.regression.verdict import make_verdict
    from launcher.cli.print_regression import print_json, print_verdict
    from launcher.judges.results import load_result
    from launcher.runs.record import load_record

    conditions, records = conditions or Conditions(), (load_record(old), load_record(new))
    results = load_result(old.evaluation), load_result(new.evaluation)
    verdict = make_verdict(records, results, max_regression, conditions.cpu_seconds)
    show = print_json if is_json else print_verdict
    show(pair, verdict, (old, new), (*pair.notes, *conditions.notes, *verdict.notes))
    return ExitCode.DONE if verdict.gate.is_open else ExitCode.QUALITY_GATE


def _prepare(planned: PlannedRun) -> Audit:
    """Check that packages and judge are available, then prepare the data."""
    from launcher.cli.train import prepare
    from launcher.launch.start import check_packages
    from launcher.manifest.trust import check_trust, list_code

    check_trust(list_code(planned.loaded.manifest), planned.loaded.path)
    check_packages(planned.plan)
    _check_judge(planned)
    return prepare(planned).store.audit


def _check_judge(planned: PlannedRun) -> None:
    from launcher.judges.registry import open_judge

    try:
        with closing(open_judge(planned.loaded.manifest)):
            pass
    except ModuleNotFoundError as error:
        raise InputError(
            f"evaluation needs a package that is not installed: {error.name}",
            hint="pip install 'expert-launcher[quality]'",
        ) from None


def _check_load(pair: Pair) -> tuple[str, ...]:
    """Return a warning if other processes keep the machine busy."""
    cores, load = pair.new.plan.hardware.cpu_cores_per_node, os.getloadavg()[0]
    if load < _MAX_LOAD * cores:
        return ()
    return (f"this machine was already busy (load {load:.1f} on {cores} cores): speeds are less reliable",)


def _list_eval_flags(arguments: argparse.Namespace) -> list[str]:
    flags = {"rows": arguments.rows, "max-new-tokens": arguments.max_new_tokens}
    return [f"--{name}={value}" for name, value in flags.items() if value is not None]
