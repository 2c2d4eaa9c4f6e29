"""`launcher regression`: an expert trained the old way and the optimised way, both judged on the same rows."""

from __future__ import annotations

import argparse
import os
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.arguments import positive
from launcher.cli.eval import DEFAULT_DROP, share
from launcher.cli.finding import add_runs_dir
from launcher.errors import ExitCode, InputError, say

if TYPE_CHECKING:
    from launcher.corpus.audit import Audit
    from launcher.inputs import PlannedRun
    from launcher.paths import RunPaths
    from launcher.regression.pair import Pair

HELP = "train the old configuration and the optimised one on the same rows: is it as good, and how much faster?"
_BUSY_SHARE = 0.5  # of the cores: from there on other work shows in the speeds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("expert", metavar="EXPERT", help="an expert by name (json), or the path of a manifest.json")
    both = parser.add_argument_group("both trainings")
    both.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="override a manifest value"
    )
    both.add_argument("--max-steps", type=positive, metavar="N", help="stop after N optimizer steps")
    both.add_argument("--base", metavar="NAME", help="another base model: one of the manifest's, a folder, a hub name")
    both.add_argument(
        "--profile", choices=("auto", "full", "smoke"), default="auto", help="auto: full with a GPU, smoke without"
    )
    add_runs_dir(both)
    asked = parser.add_argument_group("both evaluations")
    asked.add_argument("--rows", type=positive, metavar="N", help="held-out rows that are asked (default: all)")
    asked.add_argument("--max-new-tokens", type=positive, metavar="N", help="longest answer (default 512)")
    asked.add_argument(
        "--max-drop", type=share, default=DEFAULT_DROP, metavar="P%", help="what may be lost (default 5%%)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(arguments: argparse.Namespace) -> int:
    from launcher.cli.show_regression import print_pair
    from launcher.inputs import Request
    from launcher.paths import make_run_id, name_run
    from launcher.regression.children import evaluate, train
    from launcher.regression.pair import plan_pair

    request = Request(
        expert=arguments.expert,
        overrides=tuple(arguments.overrides),
        base=arguments.base,
        max_steps=arguments.max_steps,
        profile=arguments.profile,
    )
    pair = plan_pair(request, _prepare)
    load = _warn_of_load(pair)
    if not arguments.json:
        print_pair(pair)
    stem = make_run_id(pair.new.plan.expert, "regression", datetime.now(UTC))
    runs_dir = Path(arguments.runs_dir)
    old, new = (name_run(runs_dir, f"{stem}-{side.name}") for side in (pair.old, pair.new))
    cpu_seconds = []
    for side, paths in ((pair.old, old), (pair.new, new)):
        say(f"training {paths.run_id}")
        cpu_seconds.append(train(side.request, paths))
    for paths in (old, new):
        evaluate(paths, _make_eval_words(arguments))
    cost = Cost(cpu_seconds=(cpu_seconds[0], cpu_seconds[1]), notes=load)
    return judge(pair, old, new, max_drop=arguments.max_drop, is_json=arguments.json, cost=cost)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What was seen while both were trained, and stands in no file."""

    cpu_seconds: tuple[float, float] | None = None  # of the old one and the new one
    notes: tuple[str, ...] = ()


def judge(
    pair: Pair,
    old: RunPaths,
    new: RunPaths,
    *,
    max_drop: float,
    is_json: bool,
    cost: Cost | None = None,
) -> int:
    """Two runs that lie there, trained and evaluated."""
    from launcher.cli.show_regression import print_json, print_verdict
    from launcher.quality.results import load_result
    from launcher.record import load_record
    from launcher.regression.verdict import make_verdict

    cost, records = cost or Cost(), (load_record(old), load_record(new))
    results = load_result(old.evaluation), load_result(new.evaluation)
    verdict = make_verdict(records, results, max_drop, cost.cpu_seconds)
    show = print_json if is_json else print_verdict
    show(pair, verdict, (old, new), (*pair.notes, *cost.notes, *verdict.notes))
    return ExitCode.DONE if verdict.gate.is_open else ExitCode.QUALITY_GATE


def _prepare(planned: PlannedRun) -> Audit:
    """What is missing is said before anybody waits: for data, and for two trainings."""
    from launcher.cli.train import prepare
    from launcher.launch import check_packages

    check_packages(planned.plan)
    _check_judge(planned)
    return prepare(planned).store.audit


def _check_judge(planned: PlannedRun) -> None:
    from launcher.quality.judges import open_judge

    try:
        with closing(open_judge(planned.loaded.manifest)):
            pass
    except ModuleNotFoundError as error:
        raise InputError(
            f"judging needs a package that is not installed: {error.name}",
            hint="pip install 'expert-launcher[quality]'",
        ) from None


def _warn_of_load(pair: Pair) -> tuple[str, ...]:
    """Where a CPU trains, whatever else runs there takes its time, and from one of the two more than from the other."""
    cores, load = pair.new.plan.hardware.cpu_cores_per_node, os.getloadavg()[0]
    if load < _BUSY_SHARE * cores:
        return ()
    return (f"this machine was busy before (load {load:.1f} on {cores} cores): speeds say less",)


def _make_eval_words(arguments: argparse.Namespace) -> list[str]:
    given = {"rows": arguments.rows, "max-new-tokens": arguments.max_new_tokens}
    return [f"--{name}={value}" for name, value in given.items() if value is not None]
