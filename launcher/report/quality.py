"""How good the expert's answers are, as Markdown: base and adapter, check by check, and what went wrong."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from launcher.errors import escape
from launcher.evaluations import Evaluation, RunEvaluations
from launcher.metrics import EVAL_PREFIX, find_values
from launcher.prose import code, fenced, inline, one_line, table
from launcher.quality.results import AnswerResult, CheckResult, EvalResult
from launcher.quality.scores import Change
from launcher.record import RunRecord
from launcher.report.figures import draw_sparkline, find_last_task_metrics
from launcher.units import format_percent

_WORST = 3
_SHOWN = 160  # characters of a text


def render_quality(record: RunRecord, found: RunEvaluations, run: str) -> str:
    """`run` is what verbs call it by."""
    return "\n\n".join(("## Quality", *_find_parts(record, found), *_find_missing(record, found, run)))


def _find_parts(record: RunRecord, found: RunEvaluations) -> Iterator[str]:
    columns = list(_find_columns(found))
    if not columns:
        yield from _render_rates(record)
        return
    yield "Answers to held-out rows, judged: the share that is right, where it lies with 95 %; bold is the main check."
    yield _render_checks(columns)
    if (gain := found.gain) is not None:
        yield _describe_gain(*gain)
    yield from _describe_course(record, columns[-1][1].result.main_check)
    adapter = found.adapter
    if adapter is not None:
        yield from _render_worst(adapter)


def _find_columns(found: RunEvaluations) -> Iterator[tuple[str, Evaluation]]:
    if found.base is not None:
        yield "base", found.base
    if found.trained is not None:
        yield f"adapter, step {found.trained.step:,}", found.trained
    if found.whole is not None:
        yield "adapter, `launcher eval`", found.whole


def _render_rates(record: RunRecord) -> Iterator[str]:
    """All that is left where the answers were not kept."""
    rates = find_last_task_metrics(record.rows)
    if not rates:
        yield "No answers were judged: losses are all that is known of this run's quality."
        return
    rows = [(f"`{code(name)}`", f"{value:.4g}", f"{step:,}") for name, (value, step) in sorted(rates.items())]
    yield table(("task metric", "last", "after step"), rows)
    yield "On how many rows, and who judged, is not known: the answers are not kept here."


def _render_checks(columns: Sequence[tuple[str, Evaluation]]) -> str:
    last = columns[-1][1].result
    results = [one.result for _, one in columns]
    checks = {check.name: check for result in results for check in result.checks}  # the last tells best
    asked = [f"{len(result.answers):,} of {result.num_rows:,} {inline(result.split)}" for result in results]
    rows = [["rows", *asked, ""]]
    for name, check in checks.items():
        title = f"`{code(name)}` {inline(check.title)}"
        cells = [_describe_rate(result, name) for result in results]
        rows.append([f"**{title}**" if name == last.main_check else title, *cells, inline(check.checker)])
    return table(("check", *(title for title, _ in columns), "judged by"), rows)


def _describe_rate(result: EvalResult, name: str) -> str:
    check = next((one for one in result.checks if one.name == name), None)
    if check is None or not check.num_judged:
        return "not judged"
    few = "" if check.num_judged == len(result.answers) else f", {check.num_judged:,} judged"
    return f"{format_percent(check.rate)} ({_describe_reach(check)}{few})"


def _describe_reach(check: CheckResult) -> str:
    return f"{100 * check.low:.1f} to {100 * check.high:.1f}"


def _describe_gain(main_check: str, change: Change, warnings: Sequence[str]) -> str:
    points = f"{100 * change.difference:+.1f} points ({100 * change.low:+.1f} to {100 * change.high:+.1f} with 95 %)"
    told = (
        f"On the {change.num_rows:,} rows that both were judged on, `{code(main_check)}` changed by {points}: "
        f"{change.num_won:,} won, {change.num_lost:,} lost."
    )
    if change.low <= 0 <= change.high:
        told += " No change lies within that: it may be chance."
    return " ".join((told, *(f"Note: {inline(warning)}." for warning in warnings)))


def _describe_course(record: RunRecord, main_check: str) -> Iterator[str]:
    name = f"{EVAL_PREFIX}{main_check}"
    rates = find_values(record.rows, name)
    if len(rates) > 2:
        steps = [row.step for row in record.rows if name in row.values]
        told = f"from {format_percent(rates[0])} to {format_percent(rates[-1])}, best {format_percent(max(rates))}"
        yield f"`{code(name)}`, step {steps[0]:,} to {steps[-1]:,}: {draw_sparkline(rates)} {told}."


def _render_worst(adapter: Evaluation) -> Iterator[str]:
    """Those that fail the earliest check first: the order of the checks is that of strictness."""
    result = adapter.result
    names = [check.name for check in result.checks]
    failed = [answer for answer in result.answers if answer.checks.get(result.main_check) is False]
    failed.sort(key=lambda answer: next(at for at, name in enumerate(names) if answer.checks.get(name) is False))
    if failed:
        some = f"The worst of {len(failed):,} wrong answers:" if len(failed) > _WORST else "Wrong answers:"
        yield "\n".join((some, "", *map(_describe_answer, failed[:_WORST])))


def _describe_answer(answer: AnswerResult) -> str:
    given = f"`{code(_shorten(answer.answer))}`" if answer.answer.strip() else "nothing"
    cut = ", and was cut off there" if answer.end == "length" else ""
    why = f": {inline(_shorten(answer.reason))}" if answer.reason else ""
    return f"- asked `{code(_shorten(answer.instruction))}`, it answered {given}{cut}{why}"


def _shorten(text: str) -> str:
    """Cut behind the escaping: half a secret is not known as one."""
    flat = one_line(text)
    return flat if len(flat) <= _SHOWN else f"{flat[: _SHOWN - 1]}…"


def _find_missing(record: RunRecord, found: RunEvaluations, run: str) -> Iterator[str]:
    for name in found.unreadable:
        yield f"`{code(name)}` cannot be read: it is not told here."
    if found.is_outdated:
        yield "What `launcher eval` found was before the run went on: it is not told here."
    is_done = record.outcome is not None and record.outcome.status == "done"
    if not is_done or record.plan.random_weights:
        return
    if found.trained is not None and found.trained.step != found.kept_step:
        yield f"The adapter has the weights of step {found.kept_step:,}: while it trained, others were asked."
    expert, lines = shlex.quote(record.plan.expert), []
    if found.whole is None:
        lines.append(f"launcher eval {expert} --run {shlex.quote(run)}  # more rows, the test split where there is one")
    if found.base is None and (found.trained is not None or found.whole is not None):
        yield "How good the base is without the adapter is not known."
        lines.append(f"launcher eval {expert} --base")
    if lines:
        yield fenced("\n".join(map(escape, lines)), "sh")
