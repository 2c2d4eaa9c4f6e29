"""Notes that accompany a plan: limits of the hardware, waste, and faster alternatives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from launcher.core.choices import accumulates_in_fp32
from launcher.core.units import format_count, format_gib
from launcher.hardware.gpu_catalogue import format_limits
from launcher.manifest.adapter_override import FULL_LEARNING_RATE, LORA_LEARNING_RATE
from launcher.manifest.config import TrainingConfig
from launcher.manifest.trust import list_code
from launcher.plan.context import PlanContext
from launcher.plan.memory_budget import SearchInputs
from launcher.plan.model import SpeedPlan
from launcher.plan.schedule import count_step_sequences, estimate_run_length
from launcher.plan.search import (
    Layout,
    count_accumulation_steps,
    estimate_step_seconds,
    find_best_layout,
    make_layout_recipe,
    split_step_seconds,
)
from launcher.plan.suggestions import (
    find_leaner_full,
    fits_with_int4,
    list_candidates_without_offload,
    move_to_hardware,
    with_config,
    with_quantization,
)

# Communication below this share of a step is not worth a note.
_NOTABLE_WAITING = 0.1
# These settings affect speed only: the trained weights are the same but for rounding and the dropout mask.
_EXECUTION_KEYS = (
    "gradient_checkpointing",
    "torch_compile",
    "torch_compile_mode",
    "attention",
    "flash_attention_2",
    "use_sdpa",
    "strategy",
    "offload",
)
_STRATEGY_FLAG = "--strategy"
_NOTABLE_SPEEDUP = 1.1
_NOTABLE_SPEEDUP_OF_OTHERS = 1.25  # of settings that change what is trained
_FEW_STEPS = 100  # optimizer steps
_HIGH_RATE = 0.01  # learning rate of AdamW
_NOTABLE_COST = 0.02  # of the speed, for a single setting to be named

EstimateSpeed = Callable[[PlanContext], float | None]  # tokens/s of the plan for this context


def make_notes(context: PlanContext, inputs: SearchInputs, layout: Layout, fewer_gpus: str) -> Iterator[str]:
    """Yield the notes of a plan; `fewer_gpus` is the result of describe_faster_with_fewer_gpus."""
    yield from context.options.input_notes
    ranks, batch = context.num_ranks, count_step_sequences(context)
    yield from _describe_small_epoch(context)
    yield from _describe_long_warmup(context)
    rate = context.manifest.training.config.learning_rate
    if context.config.adapter_type == "full" and rate >= LORA_LEARNING_RATE:
        yield (
            f"learning_rate {rate:g} is usual for LoRA; full fine-tuning usually needs about a tenth, such as "
            f"{FULL_LEARNING_RATE:g}"
        )
    if context.config.adapter_type in ("lora", "dora") and rate >= _HIGH_RATE and context.config.optim != "sgd":
        yield f"learning_rate {rate:g} is very high and likely to diverge; 1e-4 to 2e-4 are usual for LoRA"
    evaluated = context.config.eval_batch_size or 0
    if evaluated > layout.micro_batch_size and context.config.evaluation_strategy != "no":
        yield (
            f"eval_batch_size {evaluated:,} exceeds the micro-batch of {layout.micro_batch_size}: the predicted memory "
            "does not include such evaluations"
        )
    profiled, steps = context.options.profile_steps, estimate_run_length(context).num_steps
    if profiled is not None and steps is not None and profiled.first_step > steps:
        yield f"nothing will be traced: --profile-steps starts at step {profiled.first_step:,} of {steps:,}"
    if ranks > batch:
        processes = "GPUs" if context.gpu is not None else "ranks"
        yield f"{ranks - batch} of {ranks} {processes} are idle: a step has only {batch} sequence{'s'[: batch != 1]}"
    if fewer_gpus:
        yield fewer_gpus
    num_micro_steps = count_accumulation_steps(inputs, layout)
    if inputs.recipe.trainable_dtype == "bf16" and num_micro_steps > 1:
        yield f"gradients of {num_micro_steps} micro-steps are added up in BF16, like the weights"
    if context.config.precision == "fp8":
        yield _describe_fp8(is_used=inputs.recipe.fp8_base or inputs.recipe.fp8_layers)
    if layout.offload != "none" and (leaner := find_leaner_full(context, inputs)):
        yield f"with {leaner.text} it would fit without offloading, and train many times faster"
    if context.gpu is not None:
        limits = format_limits(context.gpu, is_alone=ranks == 1)
        if limits:
            yield f"{context.gpu.title}: {'; '.join(limits)}"
    if context.base.basis == "approximate":
        yield (
            f"{context.base.model_type} is an unknown architecture and is treated like llama: "
            "parameters and memory are approximate"
        )
    if context.base.attention_dropout:
        yield (
            f"the base's attention_dropout of {context.base.attention_dropout:g} is not applied: attention kernels for "
            "packed documents have no dropout; `dropout` regularizes the adapter"
        )
    recipe = make_layout_recipe(inputs, layout)
    sums_exactly = accumulates_in_fp32(layout.strategy, layout.offload) or recipe.compute_dtype == "fp32"
    if recipe.accumulates_gradients and not sums_exactly:
        yield (
            f"this strategy of DeepSpeed adds up gradients of micro-steps in {recipe.compute_dtype.upper()}: an error "
            "of 0.3 % over 8 micro-steps, 0.7 % over 48; ZeRO-3, and ZeRO-2 without offload, add them up in FP32"
        )
    if context.options.oom_bytes is not None:
        yield (
            f"a similar run was predicted to need {format_gib(context.options.oom_bytes)} and ran out of memory here "
            f"({context.options.oom_date}): this plan stays below that"
        )
    for code in list_code(context.manifest):
        yield f"the manifest names code, which is executed only with --trust: {code}"
    if len(context.manifest.base_models) > 1:
        others = ", ".join(entry.name for entry in context.manifest.base_models[1:])
        yield f"the manifest lists more base models ({others}); --base selects one"


def _describe_fp8(*, is_used: bool) -> str:
    if is_used:
        return "FP8 is experimental: compare the result with a training in BF16 before you rely on it"
    return "precision fp8 is not used: the smoke profile trains a tiny base; --profile full uses it, on a GPU"


def _describe_small_epoch(context: PlanContext) -> Iterator[str]:
    """Yield a note if an epoch has fewer sequences than the global batch, so that it is a single, smaller step."""
    config, length = context.config, estimate_run_length(context)
    sequences, steps = length.sequences, length.num_steps
    if sequences is None or steps is None or sequences >= config.global_batch_size:
        return
    note = (
        f"the global batch of {config.global_batch_size:,} sequences is larger than an epoch, which has about "
        f"{sequences:,}: every step trains all of them, so the global batch is about {sequences:,}"
    )
    better = max(1, int(sequences * (config.num_train_epochs or 1.0) / _FEW_STEPS))
    if not config.max_steps and steps < _FEW_STEPS and better < sequences:
        note += f"; {steps} steps hardly train the model: --set training.config.batch_size={better} gives more"
        note += " (with gradient_accumulation_steps=1)" if config.gradient_accumulation_steps > 1 else ""
    yield note


def _describe_long_warmup(context: PlanContext) -> Iterator[str]:
    config, steps = context.config, estimate_run_length(context).num_steps
    if context.is_smoke and "training.config.warmup_steps" not in context.options.overridden_keys:
        return  # a trial of few steps with the profile's own warm-up
    if config.lr_scheduler == "constant" or config.warmup_ratio is not None or steps is None:
        return
    if config.warmup_steps >= steps > 1:
        peak = config.learning_rate * (steps - 1) / config.warmup_steps
        yield (
            f"all {steps:,} steps of this run are warm-up (warmup_steps is {config.warmup_steps:,}): the learning rate "
            f"only rises, to {peak:.2g} instead of {config.learning_rate:g}; unless this is a trial, add "
            f"--set training.config.warmup_steps={max(1, steps // 20)}"
        )


def describe_faster_with_fewer_gpus(inputs: SearchInputs, layout: Layout) -> str:
    """Return a note if fewer GPUs would finish a step sooner, because of communication; else an empty string."""
    seconds = estimate_step_seconds(inputs, layout)
    _, waiting = split_step_seconds(inputs, layout)
    hardware = inputs.hardware
    if hardware.num_ranks == 1 or waiting < _NOTABLE_WAITING * seconds:
        return ""
    options = [(hardware.gpus_per_node, nodes) for nodes in range(hardware.nodes - 1, 0, -1)]
    options += [(gpus, 1) for gpus in (4, 2, 1) if gpus < hardware.gpus_per_node]
    best: tuple[float, str] | None = None
    for gpus, nodes in options:
        smaller = move_to_hardware(inputs, hardware.model_copy(update={"gpus_per_node": gpus, "nodes": nodes}))
        candidate = find_best_layout(smaller, list_candidates_without_offload(smaller))
        if candidate is not None:
            estimate = estimate_step_seconds(smaller, candidate)
            if estimate < 0.9 * min(seconds, best[0] if best else seconds):
                best = (estimate, f"{gpus} GPUs" if nodes == 1 else f"{nodes} nodes of {gpus} GPUs")
    return "" if best is None else f"{best[1]} would be faster: {best[0]:.2f} s per step instead of {seconds:.2f} s"


def describe_slow_settings(context: PlanContext, planned: SpeedPlan, estimate_speed: EstimateSpeed) -> Iterator[str]:
    """Yield a note if execution settings of the user make training clearly slower than the plan's own choice."""
    speed = planned.tokens_per_second
    fixed = [name for name in _EXECUTION_KEYS if getattr(context.config, name) != _get_default(name)]
    fixed += [_STRATEGY_FLAG] * (context.options.strategy is not None)
    if context.gpu is None or context.is_smoke or speed is None or not fixed:
        return

    def estimate_without(names: Collection[str]) -> float:
        changed = with_config(context, **{name: _get_default(name) for name in names if name in _EXECUTION_KEYS})
        options = replace(context.options, strategy=None) if _STRATEGY_FLAG in names else context.options
        return estimate_speed(replace(changed, options=options)) or 0.0

    best = estimate_without(fixed)
    if best < _NOTABLE_SPEEDUP * speed:
        return
    slow = [name for name in fixed if estimate_without(set(fixed) - {name}) < (1 - _NOTABLE_COST) * best]
    if slow:
        verb = "slows" if len(slow) == 1 else "slow"
        by_flags = all(f"training.config.{name}" in context.options.overridden_keys for name in slow)
        origin = "" if slow == [_STRATEGY_FLAG] else " set by --set" if by_flags else " in the manifest"
        # The plan may choose BF16 weights and 8-bit moments for full fine-tuning in one process.
        result = "" if context.config.adapter_type == "full" and context.num_ranks == 1 else ", with the same result"
        yield (
            f"{' and '.join(slow)}{origin} {verb} training down: {_describe_changes(slow)} "
            f"it reaches about {format_count(best)} tokens/s, {best / speed:.1f} times as fast{result}"
        )


def _describe_changes(slow: Collection[str]) -> str:
    """Return how to leave execution settings to the plan: --set of keys, and no --strategy."""
    overrides = " ".join(_format_override(name) for name in slow if name != _STRATEGY_FLAG)
    parts = [f"with {overrides}"] * bool(overrides) + [f"without {_STRATEGY_FLAG}"] * (_STRATEGY_FLAG in slow)
    return " and ".join(parts)


def describe_faster_alternatives(
    context: PlanContext, inputs: SearchInputs, planned: SpeedPlan, estimate_speed: EstimateSpeed, *, offloads: bool
) -> Iterator[str]:
    """Yield notes on quantization, precision and packing, which are faster but change what is trained."""
    speed, config = planned.tokens_per_second, context.config
    if context.gpu is None or context.is_smoke or speed is None:
        return
    with_16_bits = "bf16" if context.gpu.has_bf16 else "fp16"
    is_packed, is_fp32 = config.packing, inputs.recipe.compute_dtype == "fp32"
    fitting = "fit without offloading and " if offloads else ""
    alternatives = (
        (
            fits_with_int4(inputs),
            with_quantization(context, "int4"),
            f"base_models[0].quantization int4 it would {fitting}",
            "",
        ),
        (is_fp32, with_config(context, precision=with_16_bits), f"precision {with_16_bits} it would ", ""),
        (
            not is_packed,
            with_config(context, packing=True),
            "packing true it would ",
            "; batch_size then counts packed sequences",
        ),
    )
    for is_possible, changed, what, effect in alternatives:
        times = (estimate_speed(changed) or 0.0) / speed if is_possible else 0.0
        if times >= _NOTABLE_SPEEDUP_OF_OTHERS:
            yield f"with {what}train about {times:.1f} times as fast{effect}"
    is_int4 = context.entry.quantization == "int4"
    unquantized = (estimate_speed(with_quantization(context, "none")) or 0.0) if is_int4 else 0.0
    if unquantized >= speed:
        yield (
            "int4 is not needed here: with --set base_models.0.quantization=none the training fits, too, runs at about "
            f"{format_count(unquantized)} tokens/s (int4: {format_count(speed)}), and the base is not rounded to 4 bits"
        )


def _get_default(name: str) -> object:
    return TrainingConfig.model_fields[name].default


def _format_override(name: str) -> str:
    value = _get_default(name)
    return f"--set training.config.{name}={'null' if value is None else value}"
