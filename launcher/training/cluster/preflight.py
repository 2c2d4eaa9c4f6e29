"""Compare all nodes before anything is loaded, and refuse to train on nodes that differ.

There is no process group yet, so different versions of torch or NCCL cannot hang in it. A single node is not checked.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from pydantic import ValidationError

from launcher.core.errors import ExitCode, LauncherError, Problem, TopologyError
from launcher.core.frozen_model import Frozen
from launcher.core.log import get_logger
from launcher.core.run_paths import RunPaths, write_text_atomically
from launcher.corpus.spec import PreparationSpec
from launcher.hardware.launch_env import RankInfo, find_missing_rank_variable, read_rank_info
from launcher.plan.model import Plan
from launcher.runs.record import exit_code_of
from launcher.training.cluster.node_diff import (
    ComparedNode,
    find_differences,
    find_warnings,
    format_numbers,
    format_summary,
)
from launcher.training.cluster.node_info import NodeInfo, collect_node_info
from launcher.training.runtime.rendezvous import (
    Message,
    connect_store,
    fail_like_rank_0,
    gather,
    reply,
    send,
)
from launcher.training.runtime.run_record import RunRecorder

log = get_logger(__name__)

# Nodes start together; imports, and hashing data for the first time, take a while.
_TIMEOUT_SECONDS = 300.0
_TITLE = "the nodes cannot train together"

MakeSpec = Callable[[], PreparationSpec]


class NodeReport(Frozen):
    """What a rank sends to rank 0: its error, or if it is the first rank of its node, the facts of the node."""

    node: int
    host: str
    facts: NodeInfo | None = None
    exit_code: int = 0
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _OwnNode:
    report: NodeReport
    data: PreparationSpec | None
    error: Exception | None


def check_nodes(
    plan: Plan,
    paths: RunPaths,
    recorder: RunRecorder,
    make_spec: MakeSpec,
    timeout_seconds: float = _TIMEOUT_SECONDS,
) -> PreparationSpec:
    """Raise unless all nodes have equal software, plan and data; return the specification of the data to prepare."""
    place = read_rank_info(os.environ)
    # build_accelerator refuses processes without a rank.
    if place.num_nodes == 1 or find_missing_rank_variable(os.environ) is not None:
        return make_spec()
    store = connect_store(timedelta(seconds=timeout_seconds))
    own = _inspect_own_node(plan, paths, place, make_spec)
    if place.rank == 0:
        messages = gather(store, place.num_ranks, timeout_seconds)
        reports = {0: own.report} | {message.rank: _parse_report(message, place) for message in messages}
        nodes = [ComparedNode(facts=own.report.facts)] if own.report.facts is not None else []
        for message in messages:
            if (facts := reports[message.rank].facts) is not None:
                nodes.append(ComparedNode(facts, message.clock_offset, message.clock_error))
        problems = (*_find_missing(place, reports, timeout_seconds), *_find_failures(reports))
        problems += find_differences(nodes, plan)
        error = _choose_error(place, own, reports, problems)
        _write_facts(paths, nodes)
        reply(store, messages, json.dumps(_make_verdict(error, own.report)))
        if error is not None:
            raise error
        _report_agreement(recorder, nodes, plan)
    else:
        _follow_verdict(send(store, place.rank, own.report.model_dump_json(), timeout_seconds), place, own)
    assert own.data is not None
    return own.data


def _inspect_own_node(plan: Plan, paths: RunPaths, place: RankInfo, make_spec: MakeSpec) -> _OwnNode:
    """Return this node's facts or the error that occurred, because the other ranks wait for one of the two."""
    report = NodeReport(node=place.node, host=socket.gethostname())
    try:
        data = make_spec()
        facts = collect_node_info(plan, paths, place, data) if place.is_first else None
    except Exception as error:
        text = str(error) if isinstance(error, LauncherError) else f"{type(error).__name__}: {error}"
        failed = report.model_copy(update={"exit_code": exit_code_of(error), "error": text})
        return _OwnNode(report=failed, data=None, error=error)
    return _OwnNode(report=report.model_copy(update={"facts": facts}), data=data, error=None)


def _parse_report(message: Message, place: RankInfo) -> NodeReport:
    """Parse a rank's report; if another version wrote it in another format, return a report that says so."""
    try:
        return NodeReport.model_validate_json(message.text)
    except ValidationError:
        node, host, version = message.rank // place.ranks_per_node, "unknown host", "unknown"
        with suppress(ValueError, KeyError, TypeError):
            tree = json.loads(message.text)
            node, host, facts = int(tree["node"]), str(tree["host"]), tree["facts"]
            version = f"{facts['versions']['launcher']}, commit {facts['commit']}"
        error = f"its report cannot be parsed by this version: its launcher is {version}"
        return NodeReport(node=node, host=host, exit_code=int(ExitCode.WRONG_TOPOLOGY), error=error)


def _find_missing(place: RankInfo, reports: dict[int, NodeReport], timeout_seconds: float) -> Iterator[Problem]:
    missing: dict[int, list[int]] = {}
    for rank in sorted(set(range(place.num_ranks)) - reports.keys()):
        missing.setdefault(rank // place.ranks_per_node, []).append(rank)
    for node, ranks in missing.items():
        names = f"rank{'s' if len(ranks) > 1 else ''} {format_numbers(ranks)}"
        yield Problem(where=f"node {node}", what=f"no report within {timeout_seconds:.0f} s ({names})")


def _find_failures(reports: dict[int, NodeReport]) -> Iterator[Problem]:
    """Yield the errors of failed ranks; an error that several ranks of a node have is listed once."""
    failed = [report for report in reports.values() if report.exit_code]
    lines = dict.fromkeys(
        (f"node {report.node} ({report.host})", line) for report in failed for line in report.error.splitlines()
    )
    for where, line in lines:
        yield Problem(where=where, what=line.strip())


def _choose_error(
    place: RankInfo, own: _OwnNode, reports: dict[int, NodeReport], problems: tuple[Problem, ...]
) -> Exception | None:
    failed = [report for report in reports.values() if report.exit_code]
    is_same_everywhere = len(failed) == place.num_ranks and len({report.error for report in failed}) == 1
    if own.error is not None and (is_same_everywhere or not isinstance(own.error, LauncherError)):
        return own.error  # the same on all nodes, or a bug, whose traceback must be visible
    if not problems:
        return None
    error = TopologyError(_TITLE, problems, "make the nodes equal, or omit the one that differs; see logs/nodes.json")
    if failed:
        error.exit_code = ExitCode(failed[0].exit_code)
    elif len(reports) < place.num_ranks:
        error.exit_code = ExitCode.RUN_FAILED
    return error


def _make_verdict(error: Exception | None, first: NodeReport) -> dict[str, int | str]:
    """Return rank 0's exit code and a one-line reason as a dict that ranks of other versions understand, too."""
    if error is None:
        return {"exit_code": 0, "line": ""}
    problems = error.problems if isinstance(error, LauncherError) else ()
    names = ", ".join(dict.fromkeys(problem.where for problem in problems if problem.where))
    what = f"{_TITLE} ({names})" if names else (str(error).splitlines() or [type(error).__name__])[0]
    where = f"see the console of node {first.node} ({first.host})"
    return {"exit_code": exit_code_of(error), "line": f"ended before anything was loaded: {what}; {where}"}


def _write_facts(paths: RunPaths, nodes: Sequence[ComparedNode]) -> None:
    trees = [node.facts.model_dump(mode="json") for node in nodes]
    try:
        write_text_atomically(paths.node_facts, json.dumps(trees, indent=2, sort_keys=True) + "\n")
    except LauncherError as error:
        log.warning(error)


def _report_agreement(recorder: RunRecorder, nodes: Sequence[ComparedNode], plan: Plan) -> None:
    summary, warnings = format_summary(nodes), find_warnings(nodes, plan)
    for line in (f"nodes: {summary}", *(f"warning: {warning}" for warning in warnings)):
        log.info(line)
    recorder.update(observed={"nodes": "; ".join((summary, *warnings))})


def _follow_verdict(text: str | None, place: RankInfo, own: _OwnNode) -> None:
    """Raise if rank 0 refused to train or did not respond; the first rank of each node prints the reason."""
    code, line = int(ExitCode.RUN_FAILED), "rank 0, which compares the nodes, did not respond"
    if text is not None:
        verdict = json.loads(text)
        code, line = int(verdict["exit_code"]), str(verdict["line"])
    if not code:
        return
    if place.is_first:
        log.info(f"node {own.report.node} ({own.report.host}): {line}")
    if own.error is not None and not isinstance(own.error, LauncherError):
        raise own.error
    fail_like_rank_0(code)
