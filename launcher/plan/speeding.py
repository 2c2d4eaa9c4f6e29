"""Tokens per second, hours and cost, and how sure they are."""

from __future__ import annotations

from dataclasses import replace

from launcher.choices import SHARDED_STRATEGIES
from launcher.plan.compiling import COMPILE_SECONDS
from launcher.plan.fit import Layout, step_parts, step_seconds
from launcher.plan.model import SpeedPlan
from launcher.plan.schedule import PACKING_EFFICIENCY, Length
from launcher.plan.situation import Situation
from launcher.plan.sizing import Sizing
from launcher.speed import flops_per_token, seconds_per_token
from launcher.units import TERA

# What the speed model is fitted to.
_MEASURED_GPU = "h200"
_MEASURED_FAMILY = "qwen3"


def make_speed_plan(situation: Situation, sizing: Sizing, layout: Layout, length: Length) -> SpeedPlan:
    gpu = situation.gpu
    workload = replace(sizing.workload, checkpointing=layout.checkpointing)
    if gpu is None or seconds_per_token(gpu, workload) is None:
        why = (
            "no estimate on a CPU: the first steps will tell"
            if gpu is None
            else "no estimate: unknown GPU, its peak is not known"
        )
        return _unknown(situation, why)
    seconds = step_seconds(sizing, layout)
    _, exposed = step_parts(sizing, layout)
    tokens = situation.config.global_batch_size * _useful_tokens(situation)
    start = COMPILE_SECONDS if workload.compiled else 0.0
    total = None if length.num_steps is None else start + seconds * length.num_steps
    price = situation.options.price_per_gpu_hour
    peak = gpu.bf16_tflops or gpu.fp16_tflops
    mfu = flops_per_token(workload) * tokens / seconds / (peak * TERA * situation.num_ranks) if peak else None
    return SpeedPlan(
        tokens_per_second=tokens / seconds,
        seconds_per_step=seconds,
        total_seconds=total,
        mfu=mfu,
        communication_fraction=exposed / seconds,
        price_per_gpu_hour=price,
        cost=None if price is None or total is None else price * situation.num_ranks * total / 3600,
        confidence=_confidence(situation, layout),
    )


def _useful_tokens(situation: Situation) -> float:
    config = situation.config
    if config.packing:
        return config.max_seq_length * PACKING_EFFICIENCY
    return min(situation.rows.mean_tokens, config.max_seq_length)


def _unknown(situation: Situation, why: str) -> SpeedPlan:
    return SpeedPlan(
        tokens_per_second=None,
        seconds_per_step=None,
        total_seconds=None,
        mfu=None,
        communication_fraction=0.0,
        price_per_gpu_hour=situation.options.price_per_gpu_hour,
        cost=None,
        confidence=why,
    )


def _confidence(situation: Situation, layout: Layout) -> str:
    """How sure the estimate is: what of it was measured, and what was not."""
    assert situation.gpu is not None
    unmeasured = [
        words
        for applies, words in (
            (situation.gpu.key != _MEASURED_GPU, "this GPU (scaled from an H200 by data sheet)"),
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
    length = "" if situation.rows.is_measured else f"; the length of the run: {situation.rows.basis}"
    return f"{sure}{length}; start-up, evaluation and checkpoints come on top"
