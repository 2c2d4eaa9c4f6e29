"""How fast a run is against what was expected, in words, and what holds it up."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Literal

from launcher import metrics
from launcher.choices import UNPACKED_SIZES
from launcher.doctor.findings import Finding
from launcher.doctor.series import (
    ENOUGH_STEPS,
    compare_ends,
    find_period,
    find_slow_steps,
    lost_share,
    median_of,
    recent_steps,
)
from launcher.doctor.words import again, evaluate_every, save_every, tell
from launcher.metrics import StepMetrics, find_values
from launcher.plan.model import Plan
from launcher.record import RunRecord
from launcher.units import format_count, format_percent

Word = Literal["excellent", "good", "acceptable", "problem"]

_STATED_ERROR = re.compile(r"within about ([0-9]+) %")
_ROUGH_ERROR = 0.6  # of "a rough guess", and of rows whose length was only assumed
# Of a step, waiting for data. Prepared rows come from a memory map: a healthy run waits for less than one per cent.
WAITS, STARVES = 0.05, 0.10
# On a GPU the host waits while the device still works: where only the host's wait is known, that much is the device's.
_HOST_SLACK = 0.10
_IDLE = 0.70  # utilisation below which a GPU has too little to do
_BUSY = 0.90
_SMALL_TOKENS = 8192  # of a micro-step, below which launching kernels may take longer than running them
_MORE_GRAPHS = re.compile(r"([0-9]+) graphs, .*?; ([0-9]+) more graphs while training")
_LOST_MUCH, _LOST_SOME = 0.05, 0.02  # of the time, in slow steps
_SPIKE = 3.0
_SPIKES_LOST = 0.10
_SPIKES_LOST_ON_CPU = 0.30  # which is shared with whatever comes
_TREND_STEPS, _FALLS = 30, 0.90
_HOT = 80.0
_WAITS_FOR_LINKS = 0.25
_MFU_SHARE = 0.75


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Measured against planned."""

    tokens_per_second: float
    expected: float
    error: float  # of the expectation, as the plan itself states it

    @property
    def ratio(self) -> float:
        return self.tokens_per_second / self.expected

    @property
    def word(self) -> Word:
        """Below what the estimate's own error explains, something is wrong."""
        if self.ratio >= 1 + self.error / 4:
            return "excellent"
        if self.ratio >= 1 - self.error / 2:
            return "good"
        return "acceptable" if self.ratio >= 1 - self.error else "problem"


def find_speed(record: RunRecord) -> Speed | None:
    """None where nothing was expected (a CPU, an unknown GPU), or too few steps tell."""
    steps, expected = recent_steps(record), record.plan.speed.tokens_per_second
    measured = median_of(steps, metrics.TOKENS_PER_SECOND)
    if expected is None or measured is None or len(steps) < ENOUGH_STEPS:
        return None
    return Speed(tokens_per_second=measured, expected=expected, error=_find_error(record))


def _find_error(record: RunRecord) -> float:
    plan = record.plan
    stated = _STATED_ERROR.search(plan.speed.confidence)
    error = int(stated[1]) / 100 if stated else _ROUGH_ERROR
    is_length_assumed = not plan.batch.packed and "assumed" in plan.data.basis
    has_stepped_down = record.outcome is not None and bool(record.outcome.rungs)
    return max(error, _ROUGH_ERROR) if is_length_assumed or has_stepped_down else error


def judge_pace(record: RunRecord) -> Iterator[Finding]:
    """The speed in a word, then what holds it up."""
    steps = recent_steps(record)
    if len(steps) < ENOUGH_STEPS:
        yield tell("speed", "ok", f"{len(record.steps)} steps are too few to judge it")
        return
    holdups = [*_find_holdups(record, steps)]
    yield _judge_speed(record, steps, holdups)
    yield from holdups


def _find_holdups(record: RunRecord, steps: Sequence[StepMetrics]) -> Iterator[Finding]:
    data = [*_judge_data(record, steps)]
    yield from data
    yield from _judge_recompiling(record)
    links = [*_judge_links(record, steps)]
    yield from links
    if not data and not links:
        yield from _judge_launching(record, steps)
    if not data:  # waiting for data has patterns of its own
        yield from _judge_slow_steps(record, steps)
    yield from _judge_trend(record, steps)


def _judge_speed(record: RunRecord, steps: Sequence[StepMetrics], holdups: Sequence[Finding]) -> Finding:
    rate = median_of(steps, metrics.TOKENS_PER_SECOND) or 0.0
    mfu = median_of(steps, metrics.DEVICE_MFU)
    reached = f"{format_count(rate)} tokens/s" + (f", {format_percent(mfu)} of the peak" if mfu is not None else "")
    speed = find_speed(record)
    if speed is None:
        return tell("speed", "ok", f"{reached}; nothing to compare it with ({record.plan.speed.confidence})")
    found = f"{speed.word}: {reached}, {100 * speed.ratio:.0f} % of the {format_count(speed.expected)} expected"
    if speed.word != "problem":
        return tell("speed", "ok", found)
    why = f"the estimate may be off by {100 * speed.error:.0f} %, which does not explain it"
    named = ", ".join(dict.fromkeys(finding.subject for finding in holdups))
    step = (
        f"first what is named here: {named}"
        if named
        else "launcher doctor, whose micro-test shows what the GPU reaches"
    )
    return tell("speed", "problem", found, why, step)


def _judge_data(record: RunRecord, steps: Sequence[StepMetrics]) -> Iterator[Finding]:
    shares = find_values(steps, metrics.DATA_WAIT_SHARE)
    slack = 0.0
    if not shares:
        pairs = ((step.get(metrics.DATA_WAIT_SECONDS), step.get(metrics.STEP_SECONDS)) for step in steps)
        shares = [waited / took for waited, took in pairs if waited is not None and took]
        slack = _HOST_SLACK if record.plan.hardware.gpu is not None else 0.0
    if not shares:
        return
    share = max(mean(shares), sorted(shares)[len(shares) // 2])
    if share <= WAITS + slack:
        return
    num_waiting = sum(one > WAITS + slack for one in shares)
    where = f"in {num_waiting} of {len(shares)} steps" if num_waiting < len(shares) else "in every step"
    plan = record.plan
    yield tell(
        "data",
        "problem" if share > STARVES + slack else "note",
        f"{format_percent(share)} of a step waits for data, {where}; {_describe_workers(plan)}",
        "the CPU starves the device: batches are not ready when it is",
        _feed_better(record),
    )


def _describe_workers(plan: Plan) -> str:
    ranks = max(1, plan.hardware.gpus_per_node)
    each = " for each rank" if ranks > 1 else ""
    count = plan.loader.num_workers
    return f"{count} loader worker{'' if count == 1 else 's'}{each}, {plan.hardware.cpu_cores_per_node} cores"


def _feed_better(record: RunRecord) -> str:
    """More workers where cores are left; else a faster disk."""
    plan = record.plan
    spare = plan.hardware.cpu_cores_per_node // max(1, plan.hardware.gpus_per_node) - 1
    wanted = min(max(2, 2 * plan.loader.num_workers), spare)
    disk = "launcher data --move-to DIR puts prepared rows on a faster disk"
    if wanted > plan.loader.num_workers:
        return f"{again(record, f'training.config.dataloader_num_workers={wanted}')}; {disk}"
    return f"no core is left for more workers: give the run more cores; {disk}"


def _judge_recompiling(record: RunRecord) -> Iterator[Finding]:
    compiled = record.outcome.observed.get("torch.compile", "") if record.outcome is not None else ""
    told = _MORE_GRAPHS.search(compiled)
    if told is None:
        return
    graphs, more = int(told[1]), int(told[2])
    shapes = 1 if record.plan.batch.packed else UNPACKED_SIZES
    usual = graphs * shapes + 2  # an evaluation has graphs of its own
    if more > usual:
        yield tell(
            "recompiling",
            "problem",
            f"{more} graphs were compiled while training, {usual} are usual",
            "each takes seconds to minutes in which nothing is trained: shapes change from step to step",
            again(record, "training.config.torch_compile=false"),
        )


def _judge_links(record: RunRecord, steps: Sequence[StepMetrics]) -> Iterator[Finding]:
    plan = record.plan
    if plan.hardware.num_ranks < 2:
        return
    links = record.outcome.observed.get("links", "") if record.outcome is not None else ""
    busy, mfu = median_of(steps, metrics.GPU_UTILIZATION), median_of(steps, metrics.DEVICE_MFU)
    speed = find_speed(record)
    is_slow = speed is not None and speed.word == "problem"
    if "steps will take longer" in links:
        found = links.rpartition("; ")[2]
    elif is_slow and plan.speed.communication_fraction > _WAITS_FOR_LINKS:
        found = (
            f"{format_percent(plan.speed.communication_fraction)} of a step was expected to wait for links, it is more"
        )
    elif (
        is_slow and busy is not None and busy >= _BUSY and plan.speed.mfu and mfu and mfu < _MFU_SHARE * plan.speed.mfu
    ):
        found = (
            f"the GPUs are {format_percent(busy)} busy, but compute {format_percent(mfu)} of their peak instead of "
            f"{format_percent(plan.speed.mfu)}"
        )
    else:
        return
    yield tell(
        "communication", "problem", found, "ranks wait for each other's weights or gradients", _talk_less(record)
    )


def _talk_less(record: RunRecord) -> str:
    plan = record.plan
    sooner = [note for note in plan.notes if "would finish sooner" in note]
    if sooner:
        return sooner[0]
    look = "NCCL_DEBUG=INFO shows which links are used; launcher doctor shows P2P"
    if plan.strategy in ("fsdp2", "zero3") and plan.hardware.num_ranks > 1:
        return f"--strategy zero2, where memory allows, gathers no weights; {look}"
    return f"fewer nodes (--nodes {max(1, plan.hardware.nodes - 1)}); {look}" if plan.hardware.nodes > 1 else look


def _judge_launching(record: RunRecord, steps: Sequence[StepMetrics]) -> Iterator[Finding]:
    busy, plan = median_of(steps, metrics.GPU_UTILIZATION), record.plan
    if busy is None or busy >= _IDLE:
        return
    speed = find_speed(record)
    is_expected = speed is not None and speed.word in ("excellent", "good")
    tokens = plan.batch.micro_batch_size * plan.batch.sequence_length
    status: Literal["note", "problem"] = "note" if is_expected else "problem"
    if tokens > _SMALL_TOKENS:
        yield tell(
            "idle GPU",
            status,
            f"the GPU is {format_percent(busy)} busy, though it does not wait for data",
            "the host is too slow to keep it busy: others on its cores, or a power-saving CPU",
            "launcher doctor shows the CPU's load; top shows who computes",
        )
        return
    remedy = (
        again(record, "training.config.torch_compile=true")
        if plan.compile is None
        else "a card with more free memory takes larger micro-batches; fewer ranks do, too"
    )
    yield tell(
        "launch-bound",
        status,
        f"the GPU is {format_percent(busy)} busy with micro-steps of {tokens:,} tokens",
        "launching kernels takes longer than running them",
        remedy,
    )


def _judge_slow_steps(record: RunRecord, steps: Sequence[StepMetrics]) -> Iterator[Finding]:
    slow = find_slow_steps(steps)
    period = find_period([step.step for step in steps], {step.step for step in slow})
    if period is not None:
        lost = lost_share(steps, slow)
        if lost > _LOST_SOME:
            cause, remedy = _explain_period(record, period)
            yield tell(
                "slow steps",
                "problem" if lost > _LOST_MUCH else "note",
                f"every {period} steps one is slow ({_list_steps(slow)}): {format_percent(lost)} of the time",
                cause,
                remedy,
            )
        return
    spikes = find_slow_steps(steps, _SPIKE)
    lost = lost_share(steps, spikes)
    on_gpu = record.plan.hardware.gpu is not None
    if lost <= (_SPIKES_LOST if on_gpu else _SPIKES_LOST_ON_CPU):
        return
    compiles = record.plan.compile is not None
    yield tell(
        "slow steps",
        "problem" if on_gpu else "note",
        f"{len(spikes)} steps took more than {_SPIKE:.0f} times the usual ({_list_steps(spikes)}): "
        f"{format_percent(lost)} of the time",
        "compiling again, or others on this machine" if compiles else "others on this machine, or its disk",
        again(record, "training.config.torch_compile=false") if compiles else "launcher doctor shows load and disks",
    )


def _list_steps(steps: Sequence[StepMetrics]) -> str:
    shown = ", ".join(str(step.step) for step in steps[:4])
    return f"steps {shown}{', …' if len(steps) > 4 else ''}"


def _explain_period(record: RunRecord, period: int) -> tuple[str, str]:
    schedule = record.plan.schedule
    last = record.steps[-1]
    per_epoch = round(last.step / last.epoch) if last.epoch else 0
    if period == schedule.save_every_steps:
        return "checkpoints are saved as often", again(record, *save_every(record.plan, 4))
    if period == schedule.evaluate_every_steps:
        return "evaluations come as often", again(record, *evaluate_every(record.plan, 4))
    if per_epoch and period % per_epoch == 0:
        keep = "training.config.dataloader_persistent_workers=true"
        return "an epoch begins as often: workers start anew, the disk is read again", again(record, keep)
    return (
        "nothing in the plan comes as often: another job of this machine, or a batch that is read from a slow disk",
        "top and iostat while it trains; launcher doctor shows load and disks",
    )


def _judge_trend(record: RunRecord, steps: Sequence[StepMetrics]) -> Iterator[Finding]:
    """Only on a GPU: a CPU is shared, and its speed comes and goes."""
    rates = find_values(steps, metrics.TOKENS_PER_SECOND)
    if record.plan.hardware.gpu is None or len(rates) < _TREND_STEPS:
        return
    ratio = compare_ends(rates, 3)
    if ratio >= _FALLS:
        return
    heat = find_values(steps, metrics.GPU_TEMPERATURE)
    hottest = max(heat[-max(1, len(heat) // 3) :], default=0.0)
    found = f"the last third of the run is {format_percent(1 - ratio)} slower than the first"
    if hottest >= _HOT:
        hot = f"{found}, at {hottest:.0f} °C"
        yield tell("throttling", "problem", hot, "the GPU slows itself down", "airflow, fans, or nvidia-smi -pl WATTS")
        return
    remedy = "launcher doctor: power, heat, and others on this machine"
    yield tell("slowing down", "problem", found, "something takes more and more of the machine", remedy)
