"""`launcher rehearse`: a cluster's plan and files, tried for a few steps on CPU ranks of this machine."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.arguments import add_request_arguments, make_request, positive
from launcher.cli.finding import add_runs_dir
from launcher.cli.train import make_console, prepare
from launcher.errors import ExitCode, escape

if TYPE_CHECKING:
    from launcher.paths import RunPaths
    from launcher.plan.model import Plan
    from launcher.record import Outcome
    from launcher.rehearsal import Rehearsal

HELP = "try a cluster's plan and files on CPU ranks of this machine, with a tiny base, for a few steps"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_request_arguments(parser)
    run = parser.add_argument_group("the rehearsal")
    run.add_argument("--ranks", type=positive, metavar="N", help="CPU ranks in all (default: at most 4, one a core)")
    run.add_argument("--steps", type=positive, default=3, metavar="N", help="optimizer steps (default 3)")
    add_runs_dir(run)
    run.add_argument("--json", action="store_true", help="print the differences and how it ended as JSON")


def run(arguments: argparse.Namespace) -> int:
    from launcher.launch import check_packages, start_run
    from launcher.rehearsal import make_nodes, plan_rehearsal, write_rehearsal

    rehearsal = plan_rehearsal(make_request(arguments), num_ranks=arguments.ranks, num_steps=arguments.steps)
    plan = rehearsal.planned.plan
    check_packages(plan)
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
    from launcher.hardware import format_hardware

    cluster = rehearsal.cluster.plan
    decisions = {decision.name: decision for decision in cluster.decisions}
    print(f"{cluster.expert} on {escape(format_hardware(cluster.hardware))}, rehearsed on this machine\n")
    for name in ("strategy", "gradient checkpointing", "split"):
        print(f"  {name:<22}  {decisions[name].value}")
    print(f"  {'adapter':<22}  {cluster.adapter.kind}")
    print(f"  {'rehearsed on':<22}  {_format_ranks(rehearsal.planned.plan)}\n")
    for note in rehearsal.notes:
        print(f"note: {escape(note)}")
    told = ", ".join(escape(str(difference)) for difference in rehearsal.differences)
    print(f"files differ from the cluster's in: {told}\n")


def _format_ranks(plan: Plan) -> str:
    nodes = f", {plan.hardware.nodes} nodes" if plan.hardware.nodes > 1 else ""
    return f"{plan.hardware.num_ranks} CPU rank{'s' if plan.hardware.num_ranks > 1 else ''}{nodes}"


def _format_verdict(rehearsal: Rehearsal, paths: RunPaths, outcome: Outcome) -> str:
    from launcher.rehearsal import find_feats

    plan = rehearsal.planned.plan
    offload = "" if plan.offload == "none" else f" with {plan.offload.replace('_', ' ')} offloaded"
    what = f"{plan.strategy}{offload} on {_format_ranks(plan)}"
    if outcome.exit_code != ExitCode.DONE:
        return f"rehearsal failed: {what}, {outcome.steps_done} steps done"
    return f"rehearsal passed: {', '.join((f'{outcome.steps_done} steps of {what}', *find_feats(paths)))}"


def _print_json(rehearsal: Rehearsal, paths: RunPaths, outcome: Outcome) -> None:
    differences = [
        {"file": d.file, "key": d.key, "cluster": d.cluster, "rehearsal": d.rehearsal} for d in rehearsal.differences
    ]
    result = {
        "run_id": paths.run_id,
        "path": str(paths.root),
        "cluster": _summarise(rehearsal.cluster.plan),
        "rehearsal": _summarise(rehearsal.planned.plan),
        "notes": list(rehearsal.notes),
        "differences": differences,
        "passed": outcome.exit_code == ExitCode.DONE,
        "exit_code": outcome.exit_code,
        "outcome": outcome.model_dump(mode="json"),
    }
    json.dump(result, sys.stdout, indent=2)
    print()


def _summarise(plan: Plan) -> dict[str, object]:
    return {
        "nodes": plan.hardware.nodes,
        "ranks": plan.hardware.num_ranks,
        "strategy": plan.strategy,
        "offload": plan.offload,
        "checkpointing": plan.checkpointing,
        "micro_batch_size": plan.batch.micro_batch_size,
        "gradient_accumulation_steps": plan.batch.gradient_accumulation_steps,
    }
