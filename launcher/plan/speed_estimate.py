"""Estimated tokens/s, duration and cost, and how accurate they are."""

from __future__ import annotations

from dataclasses import replace

from launcher.core.choices import SHARDED_STRATEGIES
from launcher.core.units import TERA
from launcher.plan.calibration import Correction, compute_measured_speed, compute_speed_correction, make_family
from launcher.plan.context import PlanContext
from launcher.plan.estimate.step_time import (
    compute_flops_per_token,
    estimate_seconds_per_token,
    get_peak_tflops,
)
from launcher.plan.memory_budget import SearchInputs
from launcher.plan.model import SpeedPlan
from launcher.plan.schedule import PACKING_EFFICIENCY, RunLength, count_step_sequences, estimate_run_length
from launcher.plan.search import (
    Layout,
    estimate_step_seconds,
    make_layout_recipe,
    split_step_seconds,
    uses_cuda_graph,
)
from launcher.plan.torch_compile import compile_seconds

# The step-time estimate is fitted to this GPU and model family.
_MEASURED_GPU = "h200"
_MEASURED_FAMILY = "qwen3"
_RUNS_TO_TRUST = 3  # measured runs after which their spread is reported as the error
_MIN_ERROR = 0.1
_VERY_UNCERTAIN = 0.6  # relative error from which a percentage says nothing
_MEASURED_ERROR, _UNMEASURED_ERROR = 0.2, 0.4


def lookup_speed_correction(
    context: PlanContext, inputs: SearchInputs, layout: Layout
) -> tuple[Correction | None, bool]:
    """Return the correction from measured runs, and whether it corrects an estimate (or replaces a missing one)."""
    family = make_family(inputs.shape, make_layout_recipe(inputs, layout))
    gpu, known = context.gpu, inputs.calibration
    if gpu is None or estimate_seconds_per_token(gpu, inputs.workload) is None:
        return compute_measured_speed(known, family, context.base.name), False
    return compute_speed_correction(known, family, captures=uses_cuda_graph(inputs, layout)), True


def make_speed_plan(context: PlanContext, inputs: SearchInputs, layout: Layout) -> SpeedPlan:
    """Return the speed estimate of a layout."""
    gpu, length = context.gpu, estimate_run_length(context)
    sequences = count_step_sequences(context)
    tokens = sequences * _useful_tokens(context)
    correction, is_estimated = lookup_speed_correction(context, inputs, layout)
    factor = 1.0 if correction is None else correction.factor
    if is_estimated:
        plain = estimate_step_seconds(inputs, layout)
        seconds, exposed = plain / factor, split_step_seconds(inputs, layout)[1] / factor
    elif correction is not None:
        plain, seconds, exposed = None, tokens / factor, 0.0
    else:
        return _unknown(context)
    workload = replace(inputs.workload, checkpointing=layout.checkpointing)
    start = compile_seconds(workload) if workload.compiled else 0.0
    total = None if length.num_steps is None else start + seconds * length.num_steps * _mean_fullness(length, sequences)
    price = _get_price_per_gpu(context)
    peak = None if gpu is None else get_peak_tflops(gpu, workload.compute_dtype)
    mfu = compute_flops_per_token(workload) * tokens / seconds / (peak * TERA * context.num_ranks) if peak else None
    confidence, error = _confidence(context, inputs, layout, correction, is_estimated)
    return SpeedPlan(
        tokens_per_second=tokens / seconds,
        seconds_per_step=seconds,
        total_seconds=total,
        mfu=mfu,
        communication_fraction=exposed / seconds,
        price_per_gpu_hour=price,
        price_per_node_hour=context.options.price_per_node_hour,
        currency=context.options.currency,
        cost=None if price is None or total is None else price * context.num_ranks * total / 3600,
        confidence=confidence,
        error=error,
        estimated_tokens_per_second=None if plain is None else tokens / plain,
    )


def _mean_fullness(length: RunLength, sequences: int) -> float:
    """Return the mean size of a step, relative to a full one: the last step of an epoch may have fewer sequences."""
    if length.sequences is None or length.steps_per_epoch is None:
        return 1.0
    return length.sequences / (length.steps_per_epoch * sequences)


def _get_price_per_gpu(context: PlanContext) -> float | None:
    options = context.options
    if options.price_per_node_hour is None:
        return options.price_per_gpu_hour
    return options.price_per_node_hour / max(1, context.hardware.gpus_per_node)


def _useful_tokens(context: PlanContext) -> float:
    config = context.config
    if config.packing:
        return config.max_seq_length * PACKING_EFFICIENCY
    return min(context.rows.mean_tokens, config.max_seq_length)


def _unknown(context: PlanContext) -> SpeedPlan:
    on_cpu = context.gpu is None
    reason = "a first run measures the speed of this CPU" if on_cpu else "the peak of this GPU is unknown"
    return SpeedPlan(
        price_per_gpu_hour=_get_price_per_gpu(context),
        price_per_node_hour=context.options.price_per_node_hour,
        currency=context.options.currency,
        confidence=f"no estimate: {reason}",
    )


def _confidence(
    context: PlanContext, inputs: SearchInputs, layout: Layout, correction: Correction | None, is_estimated: bool
) -> tuple[str, float | None]:
    """Return how accurate the estimate is, as text, and its relative error if known."""
    length = "" if context.rows.is_measured else f"; length of the run: {context.rows.basis}"
    if correction is not None and (not is_estimated or correction.num_runs >= _RUNS_TO_TRUST):
        accuracy, error = _assess_runs(correction)
    else:
        accuracy, error = _assess_estimate(context, inputs, layout)
        if correction is not None and error is not None:
            apart = round(max(correction.factor, 1 / correction.factor) - 1, 2)
            if apart > error:  # too few runs to tell whether the estimate is wrong or they were disturbed
                accuracy, error = f"{_format_error(apart)}: {_describe_runs(correction)}", apart
    covered = "with compilation, without other start-up" if inputs.workload.compiled else "without start-up"
    return f"{accuracy}{length}; {covered}, evaluation and checkpoints", error


def _assess_runs(correction: Correction) -> tuple[str, float | None]:
    """Return the error of a speed estimate as text and number: the spread of measured runs, or a minimum."""
    spread = max(correction.highest / correction.factor - 1, 1 - correction.lowest / correction.factor)
    error = round(max(_MIN_ERROR if correction.num_runs >= _RUNS_TO_TRUST else 2 * _MIN_ERROR, spread), 2)
    return f"{_format_error(error)}: similar runs were measured on this machine", error


def _describe_runs(correction: Correction) -> str:
    runs = "one similar run" if correction.num_runs == 1 else f"{correction.num_runs} similar runs"
    return f"{runs} reached {100 * correction.factor:.0f} % of the estimate"


def _format_error(error: float | None) -> str:
    if error is None:
        return "a rough guess"
    if error >= _VERY_UNCERTAIN:
        return f"very uncertain ({1 / (1 + error):.1f} to {1 + error:.1f} times this speed)"
    return f"within about {100 * error:.0f} %"


def _assess_estimate(context: PlanContext, inputs: SearchInputs, layout: Layout) -> tuple[str, float | None]:
    assert context.gpu is not None
    workload = inputs.workload
    unmeasured = [
        feature
        for applies, feature in (
            (context.gpu.key != _MEASURED_GPU, "this GPU (scaled from an H200 by data sheets)"),
            (workload.compute_dtype == "fp16", "FP16"),
            (workload.adapter == "ia3", "IA3"),
            (inputs.recipe.trainable_dtype == "bf16", "BF16 weights with stochastic rounding"),
            (layout.offload != "none", "offloading"),
            (layout.strategy in SHARDED_STRATEGIES, "sharding"),
            (context.num_ranks > 1, "links between GPUs"),
            (context.base.model_type != _MEASURED_FAMILY, f"{context.base.model_type} models"),
        )
        if applies
    ]
    if not unmeasured:
        return f"{_format_error(_MEASURED_ERROR)}: similar runs were measured on this GPU", _MEASURED_ERROR
    error = None if layout.offload != "none" else _UNMEASURED_ERROR
    return f"{_format_error(error)}; not measured: {', '.join(unmeasured)}", error
