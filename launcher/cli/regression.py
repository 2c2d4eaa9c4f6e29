"""`launcher regression`: train an expert with old and optimized settings, evaluate both on the same rows."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.eval import DEFAULT_MAX_REGRESSION
from launcher.cli.run_lookup import add_runs_dir
from launcher.cli.tables import print_json, print_table
from launcher.core.errors import ExitCode, InputError, escape
from launcher.core.log import get_logger
from launcher.core.run_paths import expand_home
from launcher.hardware.model import format_hardware
from launcher.request.flag_types import base_model, percentage, positive_int

if TYPE_CHECKING:
    from launcher.bench.regression import Pair
    from launcher.core.run_paths import RunPaths
    from launcher.corpus.audit import Audit
    from launcher.request.request import PlannedRun

log = get_logger(__name__)

_MAX_LOAD = 0.5  # per core: above it, other processes affect the speeds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `launcher regression`."""
    parser.add_argument(
        "expert", type=expand_home, metavar="EXPERT", help="name of an expert (json), or path of a manifest.json"
    )
    both = parser.add_argument_group("both trainings")
    both.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="override a manifest value"
    )
    both.add_argument("--max-steps", type=positive_int, metavar="N", help="stop after N optimizer steps")
    both.add_argument(
        "--base",
        type=base_model,
        metavar="NAME",
        help="another base model: one of the manifest's, a folder, or a Hub name",
    )
    both.add_argument(
        "--profile", choices=("auto", "full", "smoke"), default="auto", help="auto: full with a GPU, smoke without"
    )
    add_runs_dir(both)
    evaluations = parser.add_argument_group("both evaluations")
    evaluations.add_argument("--rows", type=positive_int, metavar="N", help="number of rows to evaluate (default: all)")
    evaluations.add_argument(
        "--max-new-tokens",
        type=positive_int,
        metavar="N",
        help="longest answer (default: 512, or more for rows with a longer reference answer)",
    )
    evaluations.add_argument(
        "--max-regression",
        type=percentage,
        default=DEFAULT_MAX_REGRESSION,
        metavar="P%",
        help="largest allowed drop in correct answers, in percentage points (default 5%%)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Train and evaluate with the old and the new settings, compare the runs, and return the gate's exit code."""
    from launcher.bench.regression import evaluate, plan_pair, train
    from launcher.core.run_paths import make_run_id, make_run_paths
    from launcher.request.request import Request
    from launcher.request.run_directory import check_new_run

    request = Request(
        expert=arguments.expert,
        overrides=tuple(arguments.overrides),
        base=arguments.base,
        max_steps=arguments.max_steps,
        profile=arguments.profile,
    )
    check_new_run(Path(arguments.runs_dir))
    pair = plan_pair(request, _prepare)
    notes = _check_load(pair)
    if not arguments.json:
        _print_pair(pair)
    stem = make_run_id(pair.new.plan.expert, "regression", datetime.now(UTC))
    old, new = (make_run_paths(Path(arguments.runs_dir), f"{stem}-{side}") for side in ("old", "new"))
    seconds = []
    for planned, paths in ((pair.old, old), (pair.new, new)):
        log.info(f"training {paths.run_id}")
        seconds.append(train(planned.request, paths))
    if pair.new.plan.hardware.gpu is None:  # hardly affected by other processes; includes startup and evaluation
        notes = (*notes, f"CPU time: {seconds[0]:,.1f} s (old), {seconds[1]:,.1f} s (new)")
    for paths in (old, new):
        evaluate(paths, _list_eval_flags(arguments))
    return compare(pair, old, new, max_regression=arguments.max_regression, is_json=arguments.json, notes=notes)


def compare(
    pair: Pair, old: RunPaths, new: RunPaths, *, max_regression: float, is_json: bool, notes: Sequence[str] = ()
) -> int:
    """Compare two runs that are trained and evaluated; return the exit code of the quality gate."""
    from launcher.analysis.compare import load_run_facts, make_comparison
    from launcher.analysis.compare.render_text import format_figure
    from launcher.bench.regression import make_verdict
    from launcher.judges.results import load_result
    from launcher.runs.record import load_record

    results = load_result(old.evaluation), load_result(new.evaluation)
    verdict = make_verdict((load_record(old), load_record(new)), results, max_regression)
    figures = make_comparison([load_run_facts(old), load_run_facts(new)], made_at="").figures
    words = ["launcher", "compare", old.run_id, new.run_id]
    runs_dir = str(new.root.parent)
    command = shlex.join(words if runs_dir == "runs" else [*words, "--runs-dir", runs_dir])
    all_notes = (*pair.notes, *notes, *verdict.notes)
    if is_json:
        result = {
            "expert": pair.new.plan.expert,
            "profile": pair.new.plan.profile,
            "runs": {"old": str(old.root), "new": str(new.root)},
            "settings": [asdict(setting) for setting in pair.settings],
            "figures": [figure.model_dump(mode="json") for figure in figures],
            "rows": verdict.rows,
            "num_asked": len(results[1].answers),
            "speedup": verdict.speedup,
            "gate": {"is_open": verdict.gate.is_open, "words": verdict.gate.message},
            "notes": all_notes,
            "compare": command,
        }
        print_json(result)
    else:
        print(f"\n{escape(pair.new.plan.expert)}: evaluated on {len(results[1].answers)} rows\n")
        trained = ("rows trained", *(f"{count:,.0f}" for count in verdict.rows))
        rows = [(figure.title, format_figure(figure, 0), format_figure(figure, 1)) for figure in figures]
        print_table(("", "old", "new"), [trained, *rows], ("bold",))
        print()
        for note in all_notes:
            print(f"note: {escape(note)}")
        print(f"quality gate {'passed' if verdict.gate.is_open else 'FAILED'}: {verdict.gate.message}")
        print(f"speed: {_format_speed(verdict.speedup)}")
        print(f"\n{command}")
    return ExitCode.DONE if verdict.gate.is_open else ExitCode.QUALITY_GATE


def _print_pair(pair: Pair) -> None:
    """Print the settings of the old and the new run before they are trained."""
    plan = pair.new.plan
    print(f"{escape(plan.expert)} on {escape(format_hardware(plan.hardware))}, {plan.profile} profile\n")
    rows = [(each.name, each.old, each.new, each.reason) for each in pair.settings if each.has_effect]
    print_table(("setting", "old", "new", "reason for old"), rows, ("bold",))
    same = ", ".join(f"{setting.name} ({setting.new})" for setting in pair.settings if not setting.has_effect)
    if same:
        print(f"same in both: {escape(same)}")
    print(flush=True)


def _format_speed(speedup: float | None) -> str:
    if speedup is None:
        return "unknown: no step was timed"
    text = f"{speedup:.2f} times as many rows per second"
    return text if speedup > 1 else f"not faster here: {text}"


def _prepare(planned: PlannedRun) -> Audit:
    """Check that the packages and the judge of the answers are available, prepare the data and return its audit."""
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
    """Return a warning if other processes keep the CPU busy, else an empty tuple."""
    cores, load = pair.new.plan.hardware.cpu_cores_per_node, os.getloadavg()[0]
    if load < _MAX_LOAD * cores:
        return ()
    return (f"this machine was already busy (load {load:.1f} on {cores} cores): speeds are less reliable",)


def _list_eval_flags(arguments: argparse.Namespace) -> list[str]:
    flags = {"rows": arguments.rows, "max-new-tokens": arguments.max_new_tokens}
    return [f"--{name}={value}" for name, value in flags.items() if value is not None]
