"""Render report.md from ReportFacts. Foreign text is escaped; only measured values are shown."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from launcher.analysis.compare.load_run import RunFacts, make_facts
from launcher.analysis.compare.summary_metrics import compute_wall_clock
from launcher.analysis.report.quality import render_quality
from launcher.analysis.report.results import (
    render_learning,
    render_memory,
    render_speed,
    render_stability,
    render_time,
)
from launcher.core.errors import ExitCode, InputError, escape
from launcher.core.file_lock import is_locked
from launcher.core.log import get_logger
from launcher.core.markdown import code, fenced, inline, prose, table
from launcher.core.redaction import REDACTED, redact_text
from launcher.core.run_files import read_text
from launcher.core.run_paths import RunPaths, write_text_atomically
from launcher.core.units import format_count, format_duration
from launcher.corpus.row_text import format_question
from launcher.hardware.model import format_hardware
from launcher.plan.model import Plan
from launcher.request.request import Request, load_request
from launcher.runs.checkpoints import list_checkpoints, step_of
from launcher.runs.evaluations import RunEvaluations, load_evaluations
from launcher.runs.record import Outcome, RunRecord, get_global_batch, list_run_code, load_record

log = get_logger(__name__)
_Value = TypeVar("_Value")

_DEFAULT_RUNS_DIR = Path("runs")
_MAX_ERROR_LINES = 30
_ADAPTER_NAMES = {"lora": "LoRA", "dora": "DoRA", "ia3": "IA³", "full": "none, full fine-tuning"}

_FILES = (
    ("manifest", "resolved manifest"),
    ("request", "the request"),
    ("hardware", "hardware of the plan"),
    ("plan", "all decisions of the plan"),
    ("accelerate", "accelerate config"),
    ("deepspeed", "DeepSpeed config"),
    ("command", "launch command"),
    ("slurm", "Slurm script"),
    *((name, "job file") for name in ("skypilot", "kubernetes", "dstack")),
    ("metrics", "one line per step and evaluation"),
    ("evaluations", "judged answers to held-out rows during training"),
    ("evaluation", "judged answers of `launcher eval`"),
    ("partial_evaluation", "judged answers of a later `launcher eval` that covered less"),
    ("outcome", "status and results of the run"),
    ("wandb", "the W&B run"),
    ("checkpoints", "resume points"),
    ("adapter", "trained adapter and its model card"),
    ("merged", "base model with the adapter merged"),
    ("logs", "console output"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportFacts:
    """Everything that the report of a run shows."""

    record: RunRecord
    evaluations: RunEvaluations
    request: Request | None  # None: missing, or written by another version
    command: str | None  # None: `accelerate launch` was called directly
    files: tuple[tuple[str, str], ...]  # existing ones only: name and description
    saved_step: int | None  # step of the newest checkpoint
    code: tuple[str, ...] = ()  # that the run directory names
    is_trained: bool | None = None  # a process of this machine trains it now; None: unknown

    @property
    def measured(self) -> RunFacts:
        """Facts and measurements of the run, as `launcher compare` uses them."""
        return make_facts(self.record, self.evaluations)


def load_facts(paths: RunPaths) -> ReportFacts:
    """Load the facts of a report from a run directory."""
    checkpoints, record = list_checkpoints(paths), load_record(paths)
    return ReportFacts(
        record=record,
        evaluations=load_evaluations(record),
        request=_load_or_none(load_request, paths.request),
        command=_load_or_none(read_text, paths.command),
        files=_list_files(paths),
        saved_step=step_of(checkpoints[0]) if checkpoints else None,
        code=list_run_code(record),
        is_trained=is_locked(paths.lock),
    )


def _load_or_none(load: Callable[[Path], _Value], file: Path) -> _Value | None:
    try:
        return load(file)
    except InputError:
        return None


def _list_files(paths: RunPaths) -> tuple[tuple[str, str], ...]:
    files = [(getattr(paths, attribute), description) for attribute, description in _FILES]
    return tuple((path.name + "/" * path.is_dir(), description) for path, description in files if path.exists())


def make_report(paths: RunPaths) -> str:
    """Return the report of a run directory, without secrets of the environment."""
    return redact_text(render_report(load_facts(paths)))


def write_report(paths: RunPaths) -> None:
    """Write report.md; any failure is only a warning, since the run itself is over."""
    try:
        write_text_atomically(paths.report, make_report(paths))
    except Exception as error:
        log.warning(f"cannot write the report: {str(error).strip() or type(error).__name__}")


def render_report(facts: ReportFacts) -> str:
    """Render all sections of a report as Markdown."""
    record, measured = facts.record, facts.measured
    sections = (
        _render_head(facts),
        _render_configuration(facts),
        _render_environment(facts),
        _render_reasons(record.plan),
        _render_observed(record.outcome),
        render_speed(record, measured),
        render_time(measured),
        render_memory(record),
        render_learning(record),
        render_stability(record),
        render_quality(
            record,
            facts.evaluations,
            run=_format_run(facts),
            expert=record.plan.expert if facts.request is None else facts.request.expert,
        ),
        _render_reproduction(facts),
        _render_files(facts),
        _render_next_steps(facts),
    )
    return "\n\n".join(filter(None, sections)) + "\n"


def _render_head(facts: ReportFacts) -> str:
    record, outcome = facts.record, facts.record.outcome
    lines = [f"# {inline(record.plan.expert)}, run `{code(record.paths.run_id)}`", _render_status(facts)]
    if outcome is not None and outcome.error and outcome.status != "done":
        tail = [escape(line) for line in outcome.error.splitlines()[-_MAX_ERROR_LINES:]]
        lines.append(fenced("\n".join(tail), "text"))
    if facts.code:
        code_list = ", ".join(f"`{code(one)}`" for one in facts.code)
        lines.append(f"The manifest names code that is executed only with `--trust`: {code_list}.")
    if record.plan.profile == "smoke":
        lines.append("Smoke run: a tiny base model on a small sample; its numbers say nothing about the full training.")
    elif record.plan.random_weights:
        lines.append("Random weights: speed and memory are real, losses and answers are meaningless.")
    return "\n\n".join(lines)


def _render_status(facts: ReportFacts) -> str:
    outcome, seconds = facts.record.outcome, compute_wall_clock(facts.measured)
    if outcome is None:
        return "**Not started.** The run directory is prepared; nothing ran."
    steps = (
        f"{outcome.steps_done:,}" if outcome.num_steps is None else f"{outcome.steps_done:,} of {outcome.num_steps:,}"
    )
    done = max((row.step for row in facts.record.steps), default=0)
    duration = "" if seconds is None else f"{' in' if done else ', after'} {format_duration(seconds)}"
    at = f"after step {done:,}" if done else "before the first step finished"
    match outcome.status:
        case "done":
            early = " Ended early." if outcome.ended_because else ""
            return f"**Done.** {steps} steps{duration}.{early}"
        case "stopped":
            return f"**Stopped** {at}{duration}, exit code {outcome.exit_code}. The run can be resumed."
        case "failed":
            return f"**Failed** {at}{duration}, exit code {outcome.exit_code}."
        case "crashed":
            return f"**Crashed** {at}{duration} without reporting an error; exit code {outcome.exit_code}."
        case "running":
            if facts.is_trained is False:
                return f"**Killed** {at}, or training on another node: no process on this machine trains it."
            return f"**Running** when this report was written, {at}; or killed since."


def _render_configuration(facts: ReportFacts) -> str:
    return f"## Configuration\n\n{table(('', ''), list(_list_configuration(facts)))}"


def _list_configuration(facts: ReportFacts) -> Iterator[tuple[str, str]]:
    plan, outcome = facts.record.plan, facts.record.outcome
    at = f" at `{code(plan.base_revision)}`" if plan.base_revision else ""
    yield "base", f"`{code(plan.base.name)}`{at}, {format_count(plan.base.num_parameters)} parameters"
    yield "adapter", _describe_adapter(plan)
    if plan.quantization is not None:
        yield "base quantization", "NF4, 4-bit"
    source = f"`{code(plan.data.path)}`, " if plan.data.path else ""
    tasks = f"{len(plan.data.tasks):,} tasks, " if plan.data.tasks else ""
    yield "data", f"{source}{tasks}{inline(plan.data.basis)}"
    if outcome is not None and outcome.data_key is not None:
        yield "data key", f"`{code(outcome.data_key)}`"
    batch = plan.batch
    packed = ", packed" if batch.packed else ""
    sequences = get_global_batch(plan, outcome)
    fewer = f"; {batch.global_batch_size:,} planned, but an epoch has fewer" * (sequences < batch.global_batch_size)
    yield "global batch", f"{sequences:,} sequences of {batch.sequence_length:,} tokens{packed}{fewer}"
    ranks = "1 rank" if batch.num_ranks == 1 else f"{batch.num_ranks:,} ranks"
    slots = (
        f"micro-batch {batch.micro_batch_size:,} x {batch.gradient_accumulation_steps:,} accumulation steps x {ranks}"
    )
    yield "split", slots + (f", {batch.empty_slots:,} empty slots" if batch.empty_slots else "")
    if outcome is not None and outcome.num_steps is not None:
        yield "steps", f"{outcome.steps_done:,} of {outcome.num_steps:,}"
    elif plan.schedule.num_steps is not None:
        yield "steps planned", f"{plan.schedule.num_steps:,}"
    rate = f"{plan.optimizer.learning_rate:g}, {plan.schedule.lr_scheduler.replace('_', ' ')}"
    yield "optimizer, learning rate", f"{plan.optimizer.name}, {rate}"
    yield "loss on", "completions" if plan.loss_on == "completion" else "all tokens"
    yield "seed", str(plan.schedule.seed)


def _describe_adapter(plan: Plan) -> str:
    adapter = plan.adapter
    rank = "" if adapter.rank is None else f", rank {adapter.rank}, alpha {adapter.alpha}"
    return f"{_ADAPTER_NAMES[adapter.kind]}{rank}, {format_count(adapter.trainable_parameters)} trainable parameters"


def _render_environment(facts: ReportFacts) -> str:
    plan, outcome = facts.record.plan, facts.record.outcome
    rows = [("hardware", inline(format_hardware(plan.hardware))), ("strategy", plan.strategy)]
    if outcome is not None:
        rows += [("started", code(outcome.started_at))]
        rows += [("ended", code(outcome.ended_at))] if outcome.ended_at else []
        versions = ", ".join(f"{name} {version}" for name, version in outcome.versions.items())
        rows += [("versions", inline(versions))] if versions else []
        rows += [("commit of the launcher", f"`{code(outcome.git_commit)}`")] if outcome.git_commit else []
    else:
        rows.append(("launcher", inline(plan.launcher_version)))
    return f"## Environment\n\n{table(('', ''), rows)}"


def _render_reasons(plan: Plan) -> str:
    rows = [(inline(item.name), inline(item.value), inline(item.reason), item.decided_by) for item in plan.decisions]
    notes = "\n".join(f"- {prose(note)}" for note in plan.notes)
    decisions = table(("decision", "value", "reason", "decided by"), rows)
    return f"## Why these settings\n\n{decisions}" + (f"\n\n{notes}" if notes else "")


def _render_observed(outcome: Outcome | None) -> str:
    """Render what was active in the training process, as opposed to what was planned."""
    if outcome is None or not outcome.observed:
        return ""
    rows = [(inline(name), inline(value)) for name, value in outcome.observed.items()]
    return f"## Active at runtime\n\n{table(('', ''), rows)}"


def _render_reproduction(facts: ReportFacts) -> str:
    return "## How to reproduce\n\n" + "\n\n".join(_list_reproduction(facts))


def _list_reproduction(facts: ReportFacts) -> Iterator[str]:
    plan, outcome = facts.record.plan, facts.record.outcome
    commit = outcome.git_commit if outcome is not None else None
    lines = []
    if commit is not None:
        lines.append(f"git checkout {shlex.quote(commit.removesuffix('+changes'))}  # in the checkout of the launcher")
    if facts.request is not None:
        lines.append(format_command(facts.request))
    if lines:
        yield fenced("\n".join(map(escape, lines)), "sh")
    if commit is not None and commit.endswith("+changes"):
        yield "The checkout of the launcher had uncommitted changes, which are not saved."
    if lines:
        yield "`manifest.json` in this directory is the manifest of this run, for checkouts without this expert."
    if any(REDACTED in line for line in lines):
        yield f"{REDACTED} replaces a secret, which is not saved."
    same = [f"seed {plan.schedule.seed}", f"manifest `{code(plan.manifest_sha256[:16])}`"]
    if outcome is not None and outcome.data_key is not None:
        same.append(f"data `{code(outcome.data_key[:16])}`")
    yield f"Losses are the same with the same {', '.join(same)}, versions and hardware."
    if facts.command is not None:
        command = "\n".join(map(escape, facts.command.rstrip("\n").splitlines()))
        yield f"The launch command, with the files of this directory:\n\n{fenced(command, 'sh')}"
    elif outcome is not None:
        yield "Started directly by `accelerate launch launcher/train.py`; the accelerate config is not saved here."


def _render_files(facts: ReportFacts) -> str:
    rows = [(f"`{code(name)}`", description) for name, description in facts.files]
    return f"## Files\n\n{table(('', ''), rows)}" if rows else ""


def _render_next_steps(facts: ReportFacts) -> str:
    return "## Next steps\n\n" + "\n\n".join(_list_next_steps(facts))


def _list_next_steps(facts: ReportFacts) -> Iterator[str]:
    outcome, plan = facts.record.outcome, facts.record.plan
    run = shlex.quote(_format_run(facts))
    if outcome is not None and outcome.status == "done":
        if not plan.random_weights:
            own = f"launcher ask {run} {format_question(plan.data.field_mapping)}"
            lines = (f"launcher ask {run}  # a held-out row; your own question: {own}", f"launcher export {run}")
            yield fenced("\n".join(map(escape, lines)), "sh")
    else:
        yield from _list_resume_hints(facts)
        yield fenced(escape(f"launcher train --resume {run}"), "sh")
    yield from _list_wandb(facts)


def _list_resume_hints(facts: ReportFacts) -> Iterator[str]:
    outcome = facts.record.outcome
    exit_code = None if outcome is None else outcome.exit_code
    if exit_code == ExitCode.DOES_NOT_FIT:
        yield "The run needs more memory than available; the message above lists what would make it fit."
    elif exit_code in (ExitCode.WRONG_INPUT, ExitCode.WRONG_TOPOLOGY):
        yield "Fix the problem in the message above."
    elif exit_code in (ExitCode.RUN_FAILED, ExitCode.BUG):
        console_log = code(str(facts.record.paths.console_log))
        yield f"Log: `{console_log}`. Resuming may succeed if the failure was transient."
    if facts.saved_step is None:
        yield "No checkpoint is saved: resuming starts at the first step."
    else:
        yield f"Resuming continues from the checkpoint of step {facts.saved_step:,}."


def _list_wandb(facts: ReportFacts) -> Iterator[str]:
    root, outcome = facts.record.paths.root, facts.record.outcome
    trace = None if outcome is None else outcome.wandb
    if trace is None:
        return
    if trace.url is not None:
        yield f"W&B run: {inline(trace.url)}"
    elif trace.folders:
        lines = [escape(f"wandb sync {shlex.quote(str(root / folder))}") for folder in trace.folders]
        yield f"To upload the offline run to W&B:\n\n{fenced(chr(10).join(lines), 'sh')}"


def _format_run(facts: ReportFacts) -> str:
    """Return the run as commands accept it: the id in the default runs directory, else the path."""
    paths = facts.record.paths
    return paths.run_id if paths.root.parent == _DEFAULT_RUNS_DIR else str(paths.root)


def format_command(request: Request) -> str:
    """Return the `launcher train` command line that gives this request when parsed."""
    return shlex.join(["launcher", "train", request.expert, *_list_flags(request)])


def _format_price_flag(request: Request) -> str | None:
    if request.price_per_node_hour is not None:
        return f"{request.price_per_node_hour}{request.currency}/node"
    return None if request.price_per_gpu_hour is None else f"{request.price_per_gpu_hour}{request.currency}"


def _list_flags(request: Request) -> Iterator[str]:
    # Only what was given explicitly: everything else is decided by the planner again.
    for override in request.overrides:
        yield from ("--set", override)
    values: dict[str, object | None] = {
        "--base": request.base,
        "--max-steps": request.max_steps,
        "--tokens-per-row": request.tokens_per_row,
        "--profile": None if request.profile == "auto" else request.profile,
        "--gpu": request.gpu,
        "--vram-limit": None if request.vram_limit_mib is None else f"{request.vram_limit_mib}MiB",
        "--gpus": request.gpus_per_node,
        "--nodes": None if request.nodes == 1 else request.nodes,
        "--cores": request.cpu_cores_per_node,
        "--ram": request.ram_gib_per_node,
        "--strategy": request.strategy,
        "--price": _format_price_flag(request),
        "--cpu-ranks": request.cpu_ranks_per_node,
        "--on-save-error": request.save_errors,
        "--max-nonfinite-steps": request.max_nonfinite_steps,
        "--hang-timeout": request.hang_seconds,
        "--profile-steps": None if request.profile_steps is None else ":".join(map(str, request.profile_steps)),
    }
    for flag, value in values.items():
        if value is not None:
            yield from (flag, str(value))
    if request.random_weights:
        yield "--random-weights"
    if not request.calibrated:
        yield "--no-calibration"
