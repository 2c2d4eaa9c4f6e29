"""ReportFacts -> report.md. Pure. Foreign text is escaped, and nothing is told that was not measured."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from launcher.errors import ExitCode, escape
from launcher.hardware import format_hardware
from launcher.plan.model import Plan
from launcher.prose import code, fenced, inline, prose, table
from launcher.record import Outcome
from launcher.redaction import BLOT
from launcher.report.asking import format_command
from launcher.report.facts import ReportFacts
from launcher.report.figures import find_total_seconds
from launcher.report.quality import render_quality
from launcher.report.results import (
    render_learning,
    render_memory,
    render_speed,
    render_stability,
    render_time,
)
from launcher.units import format_count, format_duration

_DEFAULT_RUNS_DIR = Path("runs")
_SHOWN_ERROR_LINES = 30
_ADAPTER_NAMES = {"lora": "LoRA", "dora": "DoRA", "ia3": "IA³", "full": "none: every weight is trained"}


def render_report(facts: ReportFacts) -> str:
    record = facts.record
    sections = (
        _render_head(facts),
        _render_what(facts),
        _render_where(facts),
        _render_reasons(record.plan),
        _render_observed(record.outcome),
        render_speed(record),
        render_time(record),
        render_memory(record),
        render_learning(record),
        render_stability(record),
        render_quality(record, facts.evaluations, _name_run(facts)),
        _render_reproduction(facts),
        _render_files(facts),
        _render_next(facts),
    )
    return "\n\n".join(filter(None, sections)) + "\n"


def _render_head(facts: ReportFacts) -> str:
    record, outcome = facts.record, facts.record.outcome
    lines = [f"# {inline(record.plan.expert)}, run `{code(record.paths.run_id)}`", _render_verdict(facts)]
    if outcome is not None and outcome.error and outcome.status != "done":
        shown = [escape(line) for line in outcome.error.splitlines()[-_SHOWN_ERROR_LINES:]]
        lines.append(fenced("\n".join(shown), "text"))
    if record.plan.profile == "smoke":
        lines.append("A smoke run: a tiny base on a small sample. Its figures are of nothing else.")
    elif record.plan.random_weights:
        lines.append("With random weights: speed and memory are real, what it learnt is not.")
    return "\n\n".join(lines)


def _render_verdict(facts: ReportFacts) -> str:
    outcome, seconds = facts.record.outcome, find_total_seconds(facts.record)
    if outcome is None:
        return "**Not started.** Its files are written; nothing ran."
    steps = (
        f"{outcome.steps_done:,}" if outcome.num_steps is None else f"{outcome.steps_done:,} of {outcome.num_steps:,}"
    )
    took = "" if seconds is None else f" in {format_duration(seconds)}"
    done = max((row.step for row in facts.record.steps), default=0)
    at = f"after step {done:,}" if done else "before its first step was done"
    match outcome.status:
        case "done":
            early = " It ended early, by its own rules." if outcome.ended_because else ""
            return f"**Done.** {steps} steps{took}.{early}"
        case "stopped":
            return f"**Stopped** {at}{took}, exit code {outcome.exit_code}. It can be resumed."
        case "failed":
            return f"**Failed** {at}{took}, exit code {outcome.exit_code}."
        case "crashed":
            return f"**Died** {at}{took}, and could not say why itself; exit code {outcome.exit_code}."
        case "running":
            return f"**Running** when this was written, {at}; or it was killed without a word."


def _render_what(facts: ReportFacts) -> str:
    return f"## What ran\n\n{table(('', ''), list(_find_what(facts)))}"


def _find_what(facts: ReportFacts) -> Iterator[tuple[str, str]]:
    plan, outcome = facts.record.plan, facts.record.outcome
    at = f" at `{code(plan.base_revision)}`" if plan.base_revision else ""
    yield "base", f"`{code(plan.base.name)}`{at}, {format_count(plan.base.num_parameters)} weights"
    yield "adapter", _describe_adapter(plan)
    if plan.quantization is not None:
        yield "base while training", {"int4": "NF4, 4 bits", "int8": "8 bits"}[plan.quantization.kind]
    source = f"`{code(plan.data.path)}`, " if plan.data.path else ""
    tasks = f"{len(plan.data.tasks):,} tasks, " if plan.data.tasks else ""
    yield "data", f"{source}{tasks}{inline(plan.data.basis)}"
    if outcome is not None and outcome.data_key is not None:
        yield "data key", f"`{code(outcome.data_key)}`"
    batch = plan.batch
    packed = ", packed" if batch.packed else ""
    yield "global batch", f"{batch.global_batch_size:,} sequences of {batch.sequence_length:,} tokens{packed}"
    ranks = "1 rank" if batch.num_ranks == 1 else f"{batch.num_ranks:,} ranks"
    slots = f"{batch.micro_batch_size:,} a micro-step x {batch.gradient_accumulation_steps:,} micro-steps x {ranks}"
    yield "split", slots + (f", {batch.empty_slots:,} slots empty" if batch.empty_slots else "")
    if outcome is not None and outcome.num_steps is not None:
        yield "steps", f"{outcome.steps_done:,} of {outcome.num_steps:,}"
    elif plan.schedule.num_steps is not None:
        yield "steps planned", f"{plan.schedule.num_steps:,}"
    rate = f"{plan.optimizer.learning_rate:g}, {plan.schedule.lr_scheduler.replace('_', ' ')}"
    yield "optimizer, learning rate", f"{plan.optimizer.name}, {rate}"
    yield "loss on", "answers" if plan.loss_on == "completion" else "all tokens"
    yield "seed", str(plan.schedule.seed)


def _describe_adapter(plan: Plan) -> str:
    adapter = plan.adapter
    rank = "" if adapter.rank is None else f", rank {adapter.rank}, alpha {adapter.alpha}"
    return f"{_ADAPTER_NAMES[adapter.kind]}{rank}, {format_count(adapter.trainable_parameters)} weights trained"


def _render_where(facts: ReportFacts) -> str:
    plan, outcome = facts.record.plan, facts.record.outcome
    rows = [("hardware", inline(format_hardware(plan.hardware))), ("strategy", plan.strategy)]
    if outcome is not None:
        rows += [("began", code(outcome.started_at))]
        rows += [("ended", code(outcome.ended_at))] if outcome.ended_at else []
        versions = ", ".join(f"{name} {version}" for name, version in outcome.versions.items())
        rows += [("versions", inline(versions))] if versions else []
        rows += [("commit", f"`{code(outcome.git_commit)}`")] if outcome.git_commit else []
    else:
        rows.append(("launcher", inline(plan.launcher_version)))
    return f"## On what\n\n{table(('', ''), rows)}"


def _render_reasons(plan: Plan) -> str:
    rows = [(inline(one.name), inline(one.value), inline(one.reason), one.decided_by) for one in plan.decisions]
    notes = "\n".join(f"- {prose(note)}" for note in plan.notes)
    shown = table(("decision", "value", "why", "said by"), rows)
    return f"## Why these settings\n\n{shown}" + (f"\n\n{notes}" if notes else "")


def _render_observed(outcome: Outcome | None) -> str:
    """What the plan says is meant; this is what was seen in the live process."""
    if outcome is None or not outcome.observed:
        return ""
    rows = [(inline(name), inline(seen)) for name, seen in outcome.observed.items()]
    return f"## Seen in the live process\n\n{table(('', ''), rows)}"


def _render_reproduction(facts: ReportFacts) -> str:
    return "## How to reproduce it\n\n" + "\n\n".join(_find_reproduction(facts))


def _find_reproduction(facts: ReportFacts) -> Iterator[str]:
    plan, outcome = facts.record.plan, facts.record.outcome
    commit = outcome.git_commit if outcome is not None else None
    lines = []
    if commit is not None:
        lines.append(f"git checkout {shlex.quote(commit.removesuffix('+changes'))}")
    if facts.request is not None:
        lines.append(format_command(facts.request))
    if lines:
        yield fenced("\n".join(map(escape, lines)), "sh")
    if commit is not None and commit.endswith("+changes"):
        yield "Files of the checkout were changed after that commit: what they were is not kept."
    if any(BLOT in line for line in lines):
        yield f"{BLOT} stands for a secret: it is not kept."
    same = [f"seed {plan.schedule.seed}", f"manifest `{code(plan.manifest_sha256[:16])}`"]
    if outcome is not None and outcome.data_key is not None:
        same.append(f"data `{code(outcome.data_key[:16])}`")
    yield f"The same losses come of the same {', '.join(same)} and versions, on the same hardware."
    if facts.command is not None:
        shown = "\n".join(map(escape, facts.command.rstrip("\n").splitlines()))
        yield f"What it started, with the files of this directory:\n\n{fenced(shown, 'sh')}"
    elif outcome is not None:
        yield "It was started by `accelerate launch launcher/train.py`, with a configuration that is not kept here."


def _render_files(facts: ReportFacts) -> str:
    rows = [(f"`{code(file.name)}`", file.what) for file in facts.files]
    return f"## Files\n\n{table(('', ''), rows)}" if rows else ""


def _render_next(facts: ReportFacts) -> str:
    return "## What next\n\n" + "\n\n".join(_find_next(facts))


def _find_next(facts: ReportFacts) -> Iterator[str]:
    outcome, plan = facts.record.outcome, facts.record.plan
    run = shlex.quote(_name_run(facts))
    if outcome is not None and outcome.status == "done":
        if not plan.random_weights:
            lines = (f"launcher ask {run} 'your question'", f"launcher export {run}")
            yield fenced("\n".join(map(escape, lines)), "sh")
    else:
        yield from _find_way_out(facts)
        expert = shlex.quote(plan.expert if facts.request is None else facts.request.expert)
        yield fenced(escape(f"launcher train {expert} --resume {run}"), "sh")
    yield from _find_wandb(facts)


def _find_way_out(facts: ReportFacts) -> Iterator[str]:
    outcome, logs = facts.record.outcome, f"`{code(str(facts.record.paths.console_log))}`"
    code_of = None if outcome is None else outcome.exit_code
    if code_of == ExitCode.DOES_NOT_FIT:
        yield "It needs more memory than there is: the message above names what would make it fit."
    elif code_of in (ExitCode.WRONG_INPUT, ExitCode.WRONG_TOPOLOGY):
        yield "Mend what the message above names."
    elif code_of in (ExitCode.RUN_FAILED, ExitCode.BUG):
        yield f"Its log: {logs}. A start from the last checkpoint may pass where this one did not."
    if facts.saved_step is None:
        yield "Nothing is saved: it begins at its first step."
    else:
        yield f"Step {facts.saved_step:,} is saved: it goes on from there."


def _find_wandb(facts: ReportFacts) -> Iterator[str]:
    root, outcome = facts.record.paths.root, facts.record.outcome
    trace = None if outcome is None else outcome.wandb
    if trace is None:
        return
    if trace.url is not None:
        yield f"In W&B: {inline(trace.url)}"
    elif trace.folders:
        lines = [escape(f"wandb sync {shlex.quote(str(root / folder))}") for folder in trace.folders]
        yield f"To W&B, where it was not sent yet:\n\n{fenced(chr(10).join(lines), 'sh')}"


def _name_run(facts: ReportFacts) -> str:
    """As verbs take it: by its id where runs lie by default, else by its path."""
    paths = facts.record.paths
    return paths.run_id if paths.root.parent == _DEFAULT_RUNS_DIR else str(paths.root)
