"""Before anything is loaded, every node tells what it is, and the first rank compares: unlike nodes do not train.

There is no process group yet, so different versions of torch or NCCL cannot hang in it. On one node nothing happens.
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

from launcher.corpus.preparation import Preparation
from launcher.errors import ExitCode, LauncherError, Problem, TopologyError, say
from launcher.paths import RunPaths, write_text_atomically
from launcher.plan.model import Plan
from launcher.record import exit_code_of
from launcher.started import Place, find_place, find_unknown_rank
from launcher.training.chronicle import Chronicle
from launcher.training.comparing import SeenNode, find_problems, find_warnings, format_alike, format_numbers
from launcher.training.node_facts import NodeFacts, collect_facts
from launcher.training.roll_call import Answer, answer, hear_all, tell_all
from launcher.values import Frozen

# Nodes start together; what takes time here is imports, and the hash of data that was never hashed before.
_PATIENCE_SECONDS = 300.0
_TITLE = "the nodes cannot train together"

FindData = Callable[[], Preparation]


class NodeReport(Frozen):
    """What a rank says: its node's facts, where it is the first there, or why it has none."""

    node: int
    host: str
    facts: NodeFacts | None = None
    exit_code: int = 0
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Own:
    report: NodeReport
    data: Preparation | None
    error: Exception | None


def check_nodes(
    plan: Plan,
    paths: RunPaths,
    chronicle: Chronicle,
    find_data: FindData,
    patience_seconds: float = _PATIENCE_SECONDS,
) -> Preparation:
    """What is to be prepared, once all nodes are known to prepare and train the same."""
    place = find_place(os.environ)
    if place.num_nodes == 1 or find_unknown_rank(os.environ) is not None:  # copies are refused by whoever starts them
        return find_data()
    from launcher.training.sharing import connect

    store = connect(timedelta(seconds=patience_seconds))
    own = _look(plan, paths, place, find_data)
    if place.rank == 0:
        answers = hear_all(store, place.num_ranks, patience_seconds)
        reports = {0: own.report} | {one.rank: _read_report(one, place) for one in answers}
        nodes = [SeenNode(facts=own.report.facts)] if own.report.facts is not None else []
        nodes += _seen_nodes(answers, reports)
        error = _judge(plan, place, own, reports, nodes, patience_seconds)
        _record(paths, nodes)
        tell_all(store, answers, json.dumps(_make_verdict(error, own.report)))
        if error is not None:
            raise error
        _show(chronicle, nodes, plan)
    else:
        verdict = answer(store, place.rank, own.report.model_dump_json(), patience_seconds)
        _obey(verdict, place, own)
    assert own.data is not None
    return own.data


def _look(plan: Plan, paths: RunPaths, place: Place, find_data: FindData) -> _Own:
    """An error is an answer too: the others would wait for a better one."""
    report = NodeReport(node=place.node, host=socket.gethostname())
    try:
        data = find_data()
        facts = collect_facts(plan, paths, place, data) if place.is_first else None
    except Exception as error:
        said = str(error) if isinstance(error, LauncherError) else f"{type(error).__name__}: {error}"
        told = report.model_copy(update={"exit_code": exit_code_of(error), "error": said})
        return _Own(report=told, data=None, error=error)
    return _Own(report=report.model_copy(update={"facts": facts}), data=data, error=None)


def _read_report(told: Answer, place: Place) -> NodeReport:
    """Another version of this package may tell something else."""
    try:
        return NodeReport.model_validate_json(told.text)
    except ValidationError:
        node, host, version = told.rank // place.ranks_per_node, "unknown host", "unknown"
        with suppress(ValueError, KeyError, TypeError):
            tree = json.loads(told.text)
            node, host, facts = int(tree["node"]), str(tree["host"]), tree["facts"]
            version = f"{facts['versions']['launcher']}, commit {facts['commit']}"
        error = f"it tells what this version does not know: its launcher is {version}"
        return NodeReport(node=node, host=host, exit_code=int(ExitCode.WRONG_TOPOLOGY), error=error)


def _seen_nodes(answers: Sequence[Answer], reports: dict[int, NodeReport]) -> Iterator[SeenNode]:
    for one in answers:
        facts = reports[one.rank].facts
        if facts is not None:
            yield SeenNode(facts=facts, ahead_seconds=one.ahead_seconds, within_seconds=one.within_seconds)


def _judge(
    plan: Plan,
    place: Place,
    own: _Own,
    reports: dict[int, NodeReport],
    nodes: Sequence[SeenNode],
    patience_seconds: float,
) -> Exception | None:
    failed = [report for report in reports.values() if report.exit_code]
    is_common = len(failed) == place.num_ranks and len({report.error for report in failed}) == 1
    if own.error is not None and (is_common or not isinstance(own.error, LauncherError)):
        return own.error  # the same on all nodes, or our own bug, whose traceback must be seen
    problems = (
        *_absence_problems(place, reports, patience_seconds),
        *_failure_problems(failed),
        *find_problems(nodes, plan),
    )
    if not problems:
        return None
    error = TopologyError(_TITLE, problems, "make them alike, or leave the odd one out; logs/nodes.json has all facts")
    if failed:
        error.exit_code = ExitCode(failed[0].exit_code)
    elif len(reports) < place.num_ranks:
        error.exit_code = ExitCode.RUN_FAILED
    return error


def _absence_problems(place: Place, reports: dict[int, NodeReport], patience_seconds: float) -> Iterator[Problem]:
    missing: dict[int, list[int]] = {}
    for rank in sorted(set(range(place.num_ranks)) - reports.keys()):
        missing.setdefault(rank // place.ranks_per_node, []).append(rank)
    for node, ranks in missing.items():
        who = f"rank{'s' if len(ranks) > 1 else ''} {format_numbers(ranks)}"
        yield Problem(where=f"node {node}", what=f"nothing was heard of it within {patience_seconds:.0f} s ({who})")


def _failure_problems(failed: Sequence[NodeReport]) -> Iterator[Problem]:
    """Ranks of one node fail alike, as a rule: told once."""
    told = dict.fromkeys((f"node {one.node} ({one.host})", line) for one in failed for line in one.error.splitlines())
    for where, line in told:
        yield Problem(where=where, what=line.strip())


def _make_verdict(error: Exception | None, first: NodeReport) -> dict[str, int | str]:
    """For the others: an exit code, and one line. Plain, because they may be of another version."""
    if error is None:
        return {"exit_code": 0, "line": ""}
    problems = error.problems if isinstance(error, LauncherError) else ()
    names = ", ".join(dict.fromkeys(problem.where for problem in problems if problem.where))
    what = f"{_TITLE} ({names})" if names else (str(error).splitlines() or [type(error).__name__])[0]
    where = f"the console of node {first.node} ({first.host}) tells all"
    return {"exit_code": exit_code_of(error), "line": f"ended before anything was loaded: {what}; {where}"}


def _record(paths: RunPaths, nodes: Sequence[SeenNode]) -> None:
    """Whatever the verdict. A disk that cannot take it will be told of by whoever has to write."""
    trees = [node.facts.model_dump(mode="json") for node in nodes]
    try:
        write_text_atomically(paths.node_facts, json.dumps(trees, indent=2, sort_keys=True) + "\n")
    except LauncherError as error:
        say(f"warning: {error}")


def _show(chronicle: Chronicle, nodes: Sequence[SeenNode], plan: Plan) -> None:
    alike, warnings = format_alike(nodes), find_warnings(nodes, plan)
    for line in (f"nodes: {alike}", *(f"warning: {warning}" for warning in warnings)):
        say(line)
    chronicle.note(observed={"nodes": "; ".join((alike, *warnings))})


def _obey(told: str | None, place: Place, own: _Own) -> None:
    from launcher.training.sharing import ToldElsewhereError

    code, line = int(ExitCode.RUN_FAILED), "nothing was heard of rank 0, which compares the nodes"
    if told is not None:
        verdict = json.loads(told)
        code, line = int(verdict["exit_code"]), str(verdict["line"])
    if not code:
        return
    if place.is_first:
        say(f"node {own.report.node} ({own.report.host}): {line}")
    if own.error is not None and not isinstance(own.error, LauncherError):
        raise own.error
    raise ToldElsewhereError(code)
