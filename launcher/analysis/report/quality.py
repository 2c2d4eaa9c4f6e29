"""Report section on the quality of answers: each check for base and adapter, and the worst answers."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence

from launcher.analysis.report.results import draw_sparkline
from launcher.core.errors import escape
from launcher.core.markdown import code, fenced, inline, one_line, table
from launcher.core.metrics import EVAL_PREFIX, find_values, is_task_metric
from launcher.core.units import format_percent
from launcher.judges.results import NOT_CHECKED, AnswerResult, EvalResult
from launcher.judges.statistics import PairedChange
from launcher.plan.task_eval import NO_JUDGE
from launcher.runs.evaluations import Evaluation, RunEvaluations
from launcher.runs.record import RunRecord

_NUM_WORST = 3
_MAX_CHARS = 160  # of a question, an answer or a reason


def render_quality(record: RunRecord, evaluations: RunEvaluations, *, run: str, expert: str) -> str:
    """Render the quality section of a report; `run` and `expert` are names or paths, as commands accept them."""
    parts = (*_render_results(record, evaluations), *_render_missing(record, evaluations, run, expert))
    return "\n\n".join(("## Quality", *parts))


def _render_results(record: RunRecord, evaluations: RunEvaluations) -> Iterator[str]:
    columns = list(_list_columns(evaluations))
    if not columns:
        yield from _render_rates(record)
        return
    yield "Share of held-out rows that pass each check, with its 95 % confidence interval; the main check is bold."
    yield _render_checks(columns)
    if (gain := evaluations.gain) is not None:
        yield _describe_gain(*gain)
    yield from _render_trend(record, columns[-1][1].result.main_check)
    adapter = evaluations.adapter
    if adapter is not None:
        yield from _render_worst(adapter)


def _list_columns(evaluations: RunEvaluations) -> Iterator[tuple[str, Evaluation]]:
    if evaluations.base is not None:
        yield "base", evaluations.base
    if evaluations.trained is not None:
        yield f"adapter, step {evaluations.trained.step:,}", evaluations.trained
    if evaluations.full_eval is not None:
        yield "adapter, `launcher eval`", evaluations.full_eval


def _render_rates(record: RunRecord) -> Iterator[str]:
    """Render the logged task metrics of a run whose judged answers were not saved."""
    rates = {
        name: (value, row.step)
        for row in record.rows
        for name, value in row.values.items()
        if is_task_metric(name) and math.isfinite(value)
    }
    if not rates:
        yield "No answers were judged: only losses show the quality of this run."
        return
    rows = [(f"`{code(name)}`", f"{value:.4g}", f"{step:,}") for name, (value, step) in sorted(rates.items())]
    yield table(("task metric", "last", "after step"), rows)
    yield "The answers were not saved, so the number of rows and the judge are unknown."


def _render_checks(columns: Sequence[tuple[str, Evaluation]]) -> str:
    results = [evaluation.result for _, evaluation in columns]
    checks = {check.name: check for result in results for check in result.checks}  # the last one wins
    num_rows = [f"{len(result.answers):,} of {result.num_rows:,} {inline(result.split)}" for result in results]
    rows = [["rows", *num_rows, ""]]
    for name, check in checks.items():
        title = f"`{code(name)}` {inline(check.title)}"
        cells = [_describe_rate(result, name) for result in results]
        rows.append([f"**{title}**" if name == results[-1].main_check else title, *cells, inline(check.checker)])
    return table(("check", *(title for title, _ in columns), "judged by"), rows)


def _describe_rate(result: EvalResult, name: str) -> str:
    check = next((check for check in result.checks if check.name == name), None)
    if check is None:
        return "not judged"
    if not check.num_judged:
        return NOT_CHECKED
    subset = "" if check.num_judged == len(result.answers) else f", {check.num_judged:,} judged"
    return f"{format_percent(check.rate)} ({100 * check.low:.1f} to {100 * check.high:.1f}{subset})"


def _describe_gain(main_check: str, change: PairedChange, warnings: Sequence[str]) -> str:
    points = (
        f"{100 * change.difference:+.1f} points ({100 * change.low:+.1f} to {100 * change.high:+.1f}, 95 % confidence)"
    )
    summary = (
        f"On the {change.num_rows:,} rows judged for both, `{code(main_check)}` changed by {points}: "
        f"{change.num_won:,} won, {change.num_lost:,} lost."
    )
    if change.low <= 0 <= change.high:
        summary += " The interval includes 0: the difference may be chance."
    return " ".join((summary, *(f"Note: {inline(warning)}." for warning in warnings)))


def _render_trend(record: RunRecord, main_check: str) -> Iterator[str]:
    name = f"{EVAL_PREFIX}{main_check}"
    rates = find_values(record.rows, name)
    if len(rates) > 2:
        steps = [row.step for row in record.rows if name in row.values]
        summary = f"from {format_percent(rates[0])} to {format_percent(rates[-1])}, best {format_percent(max(rates))}"
        yield f"`{code(name)}`, step {steps[0]:,} to {steps[-1]:,}: {draw_sparkline(rates)} {summary}."


def _render_worst(adapter: Evaluation) -> Iterator[str]:
    """Render some wrong answers; those that fail the earliest check come first, because later checks are stricter."""
    result = adapter.result
    names = [check.name for check in result.checks]
    failed = [answer for answer in result.answers if answer.checks.get(result.main_check) is False]
    failed.sort(key=lambda answer: next(index for index, name in enumerate(names) if answer.checks.get(name) is False))
    if failed:
        heading = f"The worst of {len(failed):,} wrong answers:" if len(failed) > _NUM_WORST else "Wrong answers:"
        yield "\n".join((heading, "", *map(_describe_answer, failed[:_NUM_WORST])))


def _describe_answer(answer: AnswerResult) -> str:
    text = f"`{code(_shorten(answer.answer))}`" if answer.answer.strip() else "nothing"
    cut = ", cut off at the length limit" if answer.end == "length" else ""
    reason = f": {inline(_shorten(answer.reason))}" if answer.reason else ""
    return f"- question `{code(_shorten(answer.instruction))}`, answer {text}{cut}{reason}"


def _shorten(text: str) -> str:
    """Return a text as one short line; it is redacted before it is cut, since half a secret is not recognized."""
    flat = one_line(text)
    return flat if len(flat) <= _MAX_CHARS else f"{flat[: _MAX_CHARS - 1]}…"


def _render_missing(record: RunRecord, evaluations: RunEvaluations, run: str, expert: str) -> Iterator[str]:
    for name in evaluations.unreadable:
        yield f"`{code(name)}` cannot be read and is omitted here."
    if evaluations.is_outdated:
        yield "The results of `launcher eval` are older than the last resume of this run and are omitted here."
    is_done = record.outcome is not None and record.outcome.status == "done"
    if not is_done or record.plan.random_weights:
        return
    if evaluations.trained is not None and evaluations.trained.step != evaluations.kept_step:
        yield f"The adapter has the weights of step {evaluations.kept_step:,}; training evaluated another step."
    lines = []
    if evaluations.full_eval is None and any(decision.reason == NO_JUDGE for decision in record.plan.decisions):
        yield (
            "There is no judge for these answers: set `evaluation.judge_command` in the manifest to a program that "
            "checks them, then run `launcher eval`."
        )
    elif evaluations.full_eval is None:
        lines.append(f"launcher eval --run {shlex.quote(run)}  # more rows, from the test split if any")
    if evaluations.base is None and (evaluations.trained is not None or evaluations.full_eval is not None):
        yield "The base model was not evaluated without the adapter."
        lines.append(f"launcher eval {shlex.quote(expert)} --base")
    if lines:
        yield fenced("\n".join(map(escape, lines)), "sh")
