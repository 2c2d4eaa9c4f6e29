"""`launcher rehearse`: run a cluster's plan and configs for a few steps on CPU ranks of this machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from launcher.cli.run_lookup import add_runs_dir
from launcher.cli.tables import print_json
from launcher.cli.train import make_console, prepare
from launcher.core.errors import ExitCode, escape
from launcher.core.run_paths import RunPaths
from launcher.hardware.model import format_hardware
from launcher.launch.rehearse import Rehearsal, list_achievements, make_nodes, plan_rehearsal, write_rehearsal
from launcher.launch.start import check_packages, start_run
from launcher.manifest.trust import check_trust, list_code
from launcher.plan.model import Plan
from launcher.request.arguments import add_request_arguments, make_request
from launcher.request.flag_types import positive_int
from launcher.request.run_directory import check_new_run
from launcher.runs.record import Outcome


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a rehearsal."""
    add_request_arguments(parser)
    run = parser.add_argument_group("rehearsal")
    run.add_argument(
        "--ranks", type=positive_int, metavar="N", help="total CPU ranks (default: one per core, at most 4)"
    )
    run.add_argument("--steps", type=positive_int, default=3, metavar="N", help="optimizer steps (default 3)")
    add_runs_dir(run)
    run.add_argument("--json", action="store_true", help="print the differences and the outcome as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Rehearse a cluster's training on CPU ranks of this machine, and return its exit code."""
    rehearsal = plan_rehearsal(make_request(arguments), num_ranks=arguments.ranks, num_steps=arguments.steps)
    plan = rehearsal.planned.plan
    check_trust(list_code(rehearsal.planned.loaded.manifest), rehearsal.planned.loaded.path)
    check_packages(plan)
    check_new_run(Path(arguments.runs_dir))
    if not arguments.json:
        _print_start(rehearsal)
    prepare(rehearsal.planned)
    paths = write_rehearsal(rehearsal, Path(arguments.runs_dir))
    outcome = start_run(plan, paths, make_console(arguments.json), nodes=make_nodes(plan))
    if arguments.json:
        _print_json(rehearsal, paths, outcome)
    else:
        print(f"{_format_verdict(rehearsal, paths, outcome)}\nrun directory: {paths.root}")
    return ExitCode.RUN_FAILED if outcome.exit_code is None else outcome.exit_code


def _print_start(rehearsal: Rehearsal) -> None:
    cluster = rehearsal.cluster.plan
    decisions = {decision.name: decision for decision in cluster.decisions}
    print(f"{cluster.expert} on {escape(format_hardware(cluster.hardware))}, rehearsed on this machine\n")
    for name in ("strategy", "gradient checkpointing", "batch split"):
        print(f"  {name:<22}  {decisions[name].value}")
    print(f"  {'adapter':<22}  {cluster.adapter.kind}")
    print(f"  {'rehearsed on':<22}  {_format_ranks(rehearsal.planned.plan)}\n")
    for note in rehearsal.notes:
        print(f"note: {escape(note)}")
    differences = ", ".join(escape(str(difference)) for difference in rehearsal.differences)
    print(f"configs differ from the cluster's in: {differences}\n")


def _format_ranks(plan: Plan) -> str:
    nodes = f", {plan.hardware.nodes} nodes" if plan.hardware.nodes > 1 else ""
    return f"{plan.hardware.num_ranks} CPU rank{'s' if plan.hardware.num_ranks > 1 else ''}{nodes}"


def _format_verdict(rehearsal: Rehearsal, paths: RunPaths, outcome: Outcome) -> str:
    plan = rehearsal.planned.plan
    offload = "" if plan.offload == "none" else f" with {plan.offload.replace('_', ' ')} offloaded"
    what = f"{plan.strategy}{offload} on {_format_ranks(plan)}"
    if outcome.exit_code != ExitCode.DONE:
        return f"rehearsal failed: {what}, {outcome.steps_done} steps done"
    return f"rehearsal passed: {', '.join((f'{outcome.steps_done} steps of {what}', *list_achievements(paths)))}"


def _print_json(rehearsal: Rehearsal, paths: RunPaths, outcome: Outcome) -> None:
    differences = [
        {"file": d.file, "key": d.key, "cluster": d.cluster, "rehearsal": d.rehearsal} for d in rehearsal.differences
    ]
    result = {
        "run_id": paths.run_id,
        "path": str(paths.root),
        "cluster": _summarize(rehearsal.cluster.plan),
        "rehearsal": _summarize(rehearsal.planned.plan),
        "notes": list(rehearsal.notes),
        "differences": differences,
        "passed": outcome.exit_code == ExitCode.DONE,
        "exit_code": outcome.exit_code,
        "outcome": outcome.model_dump(mode="json"),
    }
    print_json(result)


def _summarize(plan: Plan) -> dict[str, object]:
    return {
        "nodes": plan.hardware.nodes,
        "ranks": plan.hardware.num_ranks,
        "strategy": plan.strategy,
        "offload": plan.offload,
        "checkpointing": plan.checkpointing,
        "micro_batch_size": plan.batch.micro_batch_size,
        "gradient_accumulation_steps": plan.batch.gradient_accumulation_steps,
    }
