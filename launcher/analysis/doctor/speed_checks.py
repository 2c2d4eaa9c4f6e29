"""Compare the speed of a run with the plan's estimate, and find its bottlenecks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Literal

from launcher.analysis.doctor.findings import Finding
from launcher.analysis.doctor.run_helpers import (
    ENOUGH_STEPS,
    compute_lost_share,
    compute_thirds,
    find_period,
    find_slow_steps,
    format_steps,
    report_run,
    rerun_command,
    select_recent_steps,
    suggest_longer_interval,
)
from launcher.core import metrics
from launcher.core.choices import SHARDED_STRATEGIES, UNPACKED_SIZES
from launcher.core.metrics import StepMetrics, find_values
from launcher.core.units import format_count, format_percent
from launcher.plan.model import Plan
from launcher.runs.record import RunRecord, compute_median

Grade = Literal["excellent", "good", "acceptable", "problem"]

_ROUGH_ERROR = 0.6  # relative error of an estimate without a stated one, or with an assumed row length
# Shares of a step spent waiting for data: a note, a problem. Rows are memory-mapped, so a healthy run waits < 1 %.
_DATA_WAIT_NOTE, _DATA_WAIT_PROBLEM = 0.05, 0.10
# On a GPU the host waits while the device still works: allowed if only the host's wait was recorded.
_HOST_SLACK = 0.10
_IDLE = 0.70  # GPU utilization below which the GPU waits for the host
_BUSY = 0.90  # GPU utilization of a GPU that is never idle; with a low MFU it waits in collectives
_SMALL_TOKENS = 8192  # per micro-batch: below, kernel launches may take longer than the kernels
_LOST_PROBLEM, _LOST_NOTE = 0.05, 0.02  # share of the time lost in periodic slow steps
_SPIKE = 3.0  # times the usual duration: an irregular slow step
_SPIKES_LOST = 0.10  # share of the time lost in them
_SPIKES_LOST_ON_CPU = 0.30  # a CPU is shared with other programs
_TREND_STEPS, _SLOWS_DOWN = 30, 0.90  # steps needed; speed of the last third over the first
_BUSY_HOST, _BUSY_HOST_SHARE = 1.5, 0.2  # load average per core, and the share of the steps that have more
_HOT = 80.0  # °C: with a falling speed, the GPU throttles
_COMMUNICATION_SHARE = 0.25  # of a step, planned: communication is then the likely cause of a slow run
_LOW_MFU = 0.75  # of the planned MFU


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Measured speed compared with the planned one."""

    expected: float  # tokens/s
    ratio: float  # measured over expected
    error: float  # relative error of the estimate, as the plan states it
    grade: Grade  # a problem if the error of the estimate does not explain it


def compare_speed(record: RunRecord, steps: Sequence[StepMetrics]) -> Speed | None:
    """Compare the speed of a run with the plan's estimate; None without an estimate (CPU, unknown GPU).

    On a CPU, the speed of earlier runs is not used as an estimate: it depends on other programs of the machine.
    """
    plan = record.plan
    expected, measured = plan.speed.tokens_per_second, compute_median(steps, metrics.TOKENS_PER_SECOND)
    if plan.hardware.gpu is None or expected is None or measured is None:
        return None
    error, ratio = _ROUGH_ERROR if plan.speed.error is None else plan.speed.error, measured / expected
    is_length_assumed = not plan.batch.packed and plan.data.is_length_assumed
    if is_length_assumed or (record.outcome is not None and record.outcome.oom_fallbacks):
        error = max(error, _ROUGH_ERROR)
    limits: tuple[tuple[Grade, float], ...] = (
        ("excellent", 1 + error / 4),
        ("good", 1 - error / 2),
        ("acceptable", 1 - error),
    )
    grade: Grade = next((grade for grade, limit in limits if ratio >= limit), "problem")
    return Speed(expected=expected, ratio=ratio, error=error, grade=grade)


def check_speed(record: RunRecord) -> Iterator[Finding]:
    """Grade the speed of a run by the plan's estimate, then report its bottlenecks."""
    steps = select_recent_steps(record)
    if len(steps) < ENOUGH_STEPS:
        yield report_run.ok("speed", f"{len(record.steps)} steps are too few to check it")
        return
    speed = compare_speed(record, steps)
    bottlenecks = [*_find_bottlenecks(record, steps, None if speed is None else speed.grade)]
    yield _describe_speed(record, steps, speed, bottlenecks)
    yield from bottlenecks


def _find_bottlenecks(record: RunRecord, steps: Sequence[StepMetrics], grade: Grade | None) -> Iterator[Finding]:
    data = [*_check_data_wait(record, steps)]
    yield from data
    yield from _check_recompilation(record)
    links = [*_check_communication(record, steps, grade)]
    yield from links
    if not data and not links:
        yield from _check_idle_gpu(record, steps, grade)
    if not data:  # waiting for data makes slow steps itself
        yield from _check_slow_steps(record, steps)
    yield from _check_trend(record, steps)
    yield from _check_host_load(record)


def _check_host_load(record: RunRecord) -> Iterator[Finding]:
    """Check for other programs on the host while the run trained."""
    loads = [(step.step, load) for step in record.steps if (load := step.get(metrics.HOST_LOAD)) is not None]
    busy = [(step, load) for step, load in loads if load > _BUSY_HOST]
    if len(busy) < max(ENOUGH_STEPS, _BUSY_HOST_SHARE * len(loads)):
        return
    cores = record.plan.hardware.cpu_cores_per_node
    average = mean(load for _, load in busy)
    yield report_run.note(
        "host load",
        f"load average {average * cores:.1f} on {cores} cores in {len(busy):,} of {len(loads):,} steps, "
        f"from step {busy[0][0]:,}",
        "other programs used the CPU while the run trained: its speed is not comparable",
        "train on an idle machine to measure speed",
    )


def _describe_speed(
    record: RunRecord, steps: Sequence[StepMetrics], speed: Speed | None, bottlenecks: Sequence[Finding]
) -> Finding:
    rate = compute_median(steps, metrics.TOKENS_PER_SECOND) or 0.0
    mfu = compute_median(steps, metrics.DEVICE_MFU)
    reached = f"{format_count(rate)} tokens/s" + (f", {format_percent(mfu)} MFU" if mfu is not None else "")
    if len(steps) < len(record.steps):  # the report has medians of all steps
        reached += f" (median of {len(steps):,} steps, without warm-up)"
    if record.plan.hardware.gpu is None:
        return report_run.ok("speed", f"{reached}; speed on a CPU is not estimated: only bottlenecks are checked")
    if speed is None:
        return report_run.ok("speed", f"{reached}; no estimate to compare with ({record.plan.speed.confidence})")
    found = f"{speed.grade}: {reached}, {100 * speed.ratio:.0f} % of the {format_count(speed.expected)} expected"
    if speed.grade != "problem":
        return report_run.ok("speed", found)
    why = f"the estimate may be off by {100 * speed.error:.0f} %, which does not explain this"
    named = ", ".join(dict.fromkeys(finding.subject for finding in bottlenecks))
    step = f"fix these findings first: {named}" if named else "run launcher doctor: its micro-test measures the GPU"
    return report_run.problem("speed", found, why, step)


def _check_data_wait(record: RunRecord, steps: Sequence[StepMetrics]) -> Iterator[Finding]:
    times = [(step.get(metrics.STEP_SECONDS) or 0.0, step) for step in steps]
    device = [(took, step.get(metrics.DATA_WAIT_SHARE)) for took, step in times]
    host = [(took, (step.get(metrics.DATA_WAIT_SECONDS) or 0.0) / took) for took, step in times if took]
    waits = [(took, share) for took, share in device if took and share is not None and math.isfinite(share)]
    slack = 0.0 if waits or record.plan.hardware.gpu is None else _HOST_SLACK
    waits = waits or host
    if not waits:
        return
    shares = [share for _, share in waits]
    share = sum(took * share for took, share in waits) / sum(took for took, _ in waits)  # as in report and comparison
    if share <= _DATA_WAIT_NOTE + slack:
        return
    num_waiting = sum(value > _DATA_WAIT_NOTE + slack for value in shares)
    where = f"in {num_waiting} of {len(shares)} steps" if num_waiting < len(shares) else "in every step"
    plan = record.plan
    yield report_run(
        "data",
        "problem" if share > _DATA_WAIT_PROBLEM + slack else "note",
        f"{format_percent(share)} of the step time waits for data, {where}; {_describe_workers(plan)}",
        "the device idles until its batches are ready",
        _suggest_workers(record),
    )


def _describe_workers(plan: Plan) -> str:
    ranks = max(1, plan.hardware.gpus_per_node)
    each = " for each rank" if ranks > 1 else ""
    count = plan.loader.num_workers
    return f"{count} loader worker{'' if count == 1 else 's'}{each}, {plan.hardware.cpu_cores_per_node} cores"


def _suggest_workers(record: RunRecord) -> str:
    """Return advice against waiting for data: more DataLoader workers if CPU cores are free, and a faster disk."""
    plan = record.plan
    spare = plan.hardware.cpu_cores_per_node // max(1, plan.hardware.gpus_per_node) - 1
    num_workers = min(max(2, 2 * plan.loader.num_workers), spare)
    disk = "launcher data --move-to DIR moves prepared data to a faster disk"
    if num_workers > plan.loader.num_workers:
        return f"{rerun_command(record, f'training.config.dataloader_num_workers={num_workers}')}; {disk}"
    return f"no core is free for more workers: use more cores; {disk}"


def _check_recompilation(record: RunRecord) -> Iterator[Finding]:
    outcome = record.outcome
    if outcome is None or outcome.compiled_graphs is None:
        return
    graphs, more = outcome.compiled_graphs, outcome.recompiled_graphs
    shapes = 1 if record.plan.batch.packed else UNPACKED_SIZES
    usual = graphs * shapes + 2  # evaluation has its own graphs
    if more > usual:
        yield report_run.problem(
            "recompilation",
            f"{more} graphs were compiled during training, {usual} are usual",
            "tensor shapes change between steps, and each compilation stops training for seconds to minutes",
            rerun_command(record, "training.config.torch_compile=false"),
        )


def _check_communication(record: RunRecord, steps: Sequence[StepMetrics], grade: Grade | None) -> Iterator[Finding]:
    plan = record.plan
    if plan.hardware.num_ranks < 2:
        return
    slow_links = record.outcome.slow_links if record.outcome is not None else ""
    busy, mfu = compute_median(steps, metrics.GPU_UTILIZATION), compute_median(steps, metrics.DEVICE_MFU)
    is_slow = grade == "problem"
    if slow_links:
        found = slow_links
    elif is_slow and plan.speed.communication_fraction > _COMMUNICATION_SHARE:
        planned = format_percent(plan.speed.communication_fraction)
        found = f"communication takes more than the planned {planned} of a step"
    elif is_slow and busy is not None and busy >= _BUSY and plan.speed.mfu and mfu and mfu < _LOW_MFU * plan.speed.mfu:
        found = (
            f"GPU utilization is {format_percent(busy)}, but MFU is {format_percent(mfu)} instead of "
            f"{format_percent(plan.speed.mfu)}"
        )
    else:
        return
    yield report_run.problem(
        "communication", found, "ranks wait for each other's weights or gradients", _suggest_less_communication(record)
    )


def _suggest_less_communication(record: RunRecord) -> str:
    plan = record.plan
    if plan.speed.fewer_gpus_note:
        return plan.speed.fewer_gpus_note
    look = "NCCL_DEBUG=INFO shows which links are used; launcher doctor shows P2P"
    if plan.strategy in SHARDED_STRATEGIES and plan.hardware.num_ranks > 1:
        return f"--strategy zero2, if memory allows, gathers no weights; {look}"
    return f"fewer nodes (--nodes {max(1, plan.hardware.nodes - 1)}); {look}" if plan.hardware.nodes > 1 else look


def _check_idle_gpu(record: RunRecord, steps: Sequence[StepMetrics], grade: Grade | None) -> Iterator[Finding]:
    busy, plan = compute_median(steps, metrics.GPU_UTILIZATION), record.plan
    if busy is None or busy >= _IDLE:
        return
    tokens = plan.batch.micro_batch_size * plan.batch.sequence_length
    status: Literal["note", "problem"] = "note" if grade in ("excellent", "good") else "problem"
    if tokens > _SMALL_TOKENS:
        yield report_run(
            "idle GPU",
            status,
            f"GPU utilization is {format_percent(busy)}, though it does not wait for data",
            "the host is too slow: other programs use its cores, or the CPU saves power",
            "launcher doctor shows the CPU load; top shows the processes",
        )
        return
    remedy = (
        rerun_command(record, "training.config.torch_compile=true")
        if plan.compile is None
        else "use a GPU with more free memory, or fewer ranks: both allow larger micro-batches"
    )
    yield report_run(
        "launch-bound",
        status,
        f"GPU utilization is {format_percent(busy)} with micro-batches of {tokens:,} tokens",
        "kernel launches take longer than the kernels",
        remedy,
    )


def _check_slow_steps(record: RunRecord, steps: Sequence[StepMetrics]) -> Iterator[Finding]:
    slow = find_slow_steps(steps)
    period = find_period([step.step for step in steps], {step.step for step in slow})
    if period is not None:
        lost = compute_lost_share(steps, slow)
        if lost > _LOST_NOTE:
            cause, remedy = _explain_period(record, period)
            yield report_run(
                "slow steps",
                "problem" if lost > _LOST_PROBLEM else "note",
                f"every {period} steps, one is slow ({format_steps(slow)}): {format_percent(lost)} of the time",
                cause,
                remedy,
            )
        return
    spikes = find_slow_steps(steps, _SPIKE)
    lost = compute_lost_share(steps, spikes)
    on_gpu = record.plan.hardware.gpu is not None
    if lost <= (_SPIKES_LOST if on_gpu else _SPIKES_LOST_ON_CPU):
        return
    compiles = record.plan.compile is not None
    yield report_run(
        "slow steps",
        "problem" if on_gpu else "note",
        f"{len(spikes)} steps took more than {_SPIKE:.0f} times as long as usual ({format_steps(spikes)}): "
        f"{format_percent(lost)} of the time",
        "recompilation, or other programs on this machine"
        if compiles
        else "other programs on this machine, or its disk",
        rerun_command(record, "training.config.torch_compile=false")
        if compiles
        else "launcher doctor shows load and disks",
    )


def _explain_period(record: RunRecord, period: int) -> tuple[str, str]:
    schedule = record.plan.schedule
    last = record.steps[-1]
    per_epoch = round(last.step / last.epoch) if last.epoch else 0
    if period == schedule.save_every_steps:
        return "checkpoints are saved at this interval", suggest_longer_interval(record, "save")
    if period == schedule.evaluate_every_steps:
        return "evaluations run at this interval", suggest_longer_interval(record, "eval")
    if per_epoch and period % per_epoch == 0:
        keep = "training.config.dataloader_persistent_workers=true"
        return "epochs begin at this interval: workers restart, and the disk is read again", rerun_command(record, keep)
    return (
        "nothing in the plan has this interval: another job on this machine, or batches read from a slow disk",
        "run top and iostat while it trains; launcher doctor shows load and disks",
    )


def _check_trend(record: RunRecord, steps: Sequence[StepMetrics]) -> Iterator[Finding]:
    """Check for a falling speed, on a GPU only: a CPU is shared and its speed varies."""
    rates = find_values(steps, metrics.TOKENS_PER_SECOND)
    if record.plan.hardware.gpu is None or len(rates) < _TREND_STEPS:
        return
    first, _, last = compute_thirds(rates)
    if last >= _SLOWS_DOWN * first:
        return
    heat = find_values(steps, metrics.GPU_TEMPERATURE)
    hottest = max(heat[-max(1, len(heat) // 3) :], default=0.0)
    found = f"the last third of the run is {format_percent(1 - last / first)} slower than the first"
    if hottest >= _HOT:
        hot = f"{found}, at {hottest:.0f} °C"
        remedy = "check airflow and fans, or lower the power limit with nvidia-smi -pl WATTS"
        yield report_run.problem("throttling", hot, "the GPU throttles", remedy)
        return
    remedy = "launcher doctor shows power, heat, and other programs on this machine"
    yield report_run.problem("slowing down", found, "another program uses more and more of the machine", remedy)
