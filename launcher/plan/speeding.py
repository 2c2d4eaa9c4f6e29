"""Tokens per second, hours and cost, and how sure they are."""

from __future__ import annotations

from dataclasses import replace

from launcher.choices import SHARDED_STRATEGIES
from launcher.plan.calibration import Correction, find_measured_speed, find_speed_correction, name_family
from launcher.plan.compiling import compile_seconds
from launcher.plan.fit import Layout, make_recipe, step_parts, step_seconds
from launcher.plan.model import SpeedPlan
from launcher.plan.schedule import PACKING_EFFICIENCY, Length
from launcher.plan.situation import Situation
from launcher.plan.sizing import Sizing
from launcher.speed import Workload, flops_per_token, peak_tflops, seconds_per_token
from launcher.units import TERA

# What the speed model is fitted to.
_MEASURED_GPU = "h200"
_MEASURED_FAMILY = "qwen3"
_RUNS_TO_TRUST = 3  # of this machine, before their spread is stated as the estimate's error
_LEAST_ERROR = 0.1


def find_speed(
    situation: Situation, sizing: Sizing, layout: Layout, *, captures: bool
) -> tuple[Correction | None, bool]:
    """What this machine's runs say of the speed, and whether there is an estimate that it corrects."""
    family = name_family(sizing.shape, make_recipe(sizing, layout))
    gpu, known = situation.gpu, sizing.calibration
    if gpu is None or seconds_per_token(gpu, sizing.workload) is None:
        return find_measured_speed(known, family, situation.base.name), False
    return find_speed_correction(known, family, captures=captures), True


def make_speed_plan(
    situation: Situation, sizing: Sizing, layout: Layout, length: Length, *, captures: bool = False
) -> SpeedPlan:
    gpu = situation.gpu
    tokens = situation.config.global_batch_size * _useful_tokens(situation)
    correction, is_estimated = find_speed(situation, sizing, layout, captures=captures)
    factor = 1.0 if correction is None else correction.factor
    if is_estimated:
        plain = step_seconds(sizing, layout)
        seconds, exposed = plain / factor, step_parts(sizing, layout)[1] / factor
    elif correction is not None:
        plain, seconds, exposed = None, tokens / factor, 0.0
    else:
        return _unknown(situation)
    workload = replace(sizing.workload, checkpointing=layout.checkpointing)
    start = compile_seconds(workload) if workload.compiled else 0.0
    total = None if length.num_steps is None else start + seconds * length.num_steps
    price = situation.options.price_per_gpu_hour
    peak = None if gpu is None else peak_tflops(gpu, workload.compute_dtype)
    mfu = flops_per_token(workload) * tokens / seconds / (peak * TERA * situation.num_ranks) if peak else None
    return SpeedPlan(
        tokens_per_second=tokens / seconds,
        seconds_per_step=seconds,
        total_seconds=total,
        mfu=mfu,
        communication_fraction=exposed / seconds,
        price_per_gpu_hour=price,
        cost=None if price is None or total is None else price * situation.num_ranks * total / 3600,
        confidence=_confidence(situation, sizing.workload, layout, correction, is_estimated),
        estimated_tokens_per_second=None if plain is None else tokens / plain,
    )


def _useful_tokens(situation: Situation) -> float:
    config = situation.config
    if config.packing:
        return config.max_seq_length * PACKING_EFFICIENCY
    return min(situation.rows.mean_tokens, config.max_seq_length)


def _unknown(situation: Situation) -> SpeedPlan:
    on_cpu = situation.gpu is None
    why = "on a CPU: the first steps will tell" if on_cpu else "unknown GPU, its peak is not known"
    return SpeedPlan(
        tokens_per_second=None,
        seconds_per_step=None,
        total_seconds=None,
        mfu=None,
        communication_fraction=0.0,
        price_per_gpu_hour=situation.options.price_per_gpu_hour,
        cost=None,
        confidence=f"no estimate{' ' if on_cpu else ': '}{why}",
    )


def _confidence(
    situation: Situation, workload: Workload, layout: Layout, correction: Correction | None, is_estimated: bool
) -> str:
    """How sure the estimate is: what of it was measured, and what was not."""
    length = "" if situation.rows.is_measured else f"; the length of the run: {situation.rows.basis}"
    if correction is not None and (not is_estimated or correction.num_runs >= _RUNS_TO_TRUST):
        sure = _sureness_of_runs(correction)
    else:
        sure = _sureness(situation, workload, layout)
    return f"{sure}{length}; start-up, evaluation and checkpoints come on top"


def _sureness_of_runs(correction: Correction) -> str:
    """By how far they differ, and not too sure of few."""
    spread = max(correction.highest / correction.factor - 1, 1 - correction.lowest / correction.factor)
    error = max(_LEAST_ERROR if correction.num_runs >= _RUNS_TO_TRUST else 2 * _LEAST_ERROR, spread)
    return f"within about {100 * error:.0f} %: such runs were measured on this machine"


def _sureness(situation: Situation, workload: Workload, layout: Layout) -> str:
    assert situation.gpu is not None
    unmeasured = [
        words
        for applies, words in (
            (situation.gpu.key != _MEASURED_GPU, "this GPU (scaled from an H200 by data sheet)"),
            (workload.compute_dtype == "fp16", "FP16"),
            (workload.quantization == "int8", "bases of 8 bits"),
            (workload.adapter == "ia3", "IA3"),
            (layout.offload != "none", "offloading"),
            (layout.strategy in SHARDED_STRATEGIES, "sharding"),
            (situation.num_ranks > 1, "links between GPUs"),
            (situation.base.model_type != _MEASURED_FAMILY, f"models of the family {situation.base.model_type}"),
        )
        if applies
    ]
    sure = "within about 20 %: such runs were measured on this GPU"
    if unmeasured:
        guess = "a rough guess" if layout.offload != "none" else "within about 40 %"
        sure = f"{guess}; never measured: {', '.join(unmeasured)}"
    return sure
