"""make_plan: all decisions in order. Pure: the same inputs give the same plan, byte for byte."""

from __future__ import annotations

from dataclasses import dataclass, replace

from launcher import __version__
from launcher.base_models.shapes import ModelShape
from launcher.core.choices import SHARDED_STRATEGIES
from launcher.core.errors import InputError, ManifestError
from launcher.core.units import format_gib
from launcher.hardware.model import Hardware
from launcher.manifest.load import manifest_sha256
from launcher.manifest.model import Manifest
from launcher.manifest.overrides import check_effects
from launcher.plan.batch import decide_dataloader, explain_batch, make_batch_plan
from launcher.plan.calibration import (
    compute_memory_correction,
    explain_memory,
    explain_speed,
    make_family,
)
from launcher.plan.checkpoints import decide_checkpoints
from launcher.plan.context import PlanContext, PlanOptions, manifest_decision, name_flags, plan_decision, user_decision
from launcher.plan.dtype_and_kernels import ModelSettings, decide_model_settings
from launcher.plan.estimate.dataset_size import RowEstimate
from launcher.plan.estimate.memory import estimate_memory
from launcher.plan.estimate.memory.recipe import explain_layer_path
from launcher.plan.full_finetuning import apply_requests, iterate_leaner_settings
from launcher.plan.memory_budget import LEVELS, SearchInputs, make_search_inputs
from launcher.plan.model import Decision, MemoryPlan, Plan, SpeedPlan, TaskEvalPlan
from launcher.plan.notes import (
    describe_faster_alternatives,
    describe_faster_with_fewer_gpus,
    describe_slow_settings,
    make_notes,
)
from launcher.plan.oom_fallbacks import make_oom_fallbacks
from launcher.plan.passthrough import explain_trackers, list_other_trackers, make_data_plan, make_wandb_plan
from launcher.plan.schedule import decide_schedule
from launcher.plan.search import (
    Layout,
    estimate_layout_memory,
    find_best_layout,
    find_faster_sharding,
    fits_memory,
    leanest_layout,
    make_layout_recipe,
)
from launcher.plan.smoke import make_smoke_sizes, replace_reasons
from launcher.plan.speed_estimate import lookup_speed_correction, make_speed_plan
from launcher.plan.strategy import Candidate, explain_strategy, make_candidates
from launcher.plan.suggestions import make_does_not_fit_error
from launcher.plan.task_eval import decide_task_eval, keep_evaluable
from launcher.plan.torch_compile import (
    Searched,
    decide_compile,
    decide_cuda_graph,
    make_compile_plan,
)


def make_plan(
    manifest: Manifest,
    hardware: Hardware,
    *,
    base: ModelShape,
    rows: RowEstimate,
    options: PlanOptions | None = None,
) -> Plan:
    """Return the plan for a manifest on given hardware; raise DoesNotFitError if nothing fits."""
    context = _make_context(manifest, hardware, base, rows, options or PlanOptions())
    _check_positions(context)
    return _assemble(context, *_choose(context))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Choice:
    """Model settings and the layout found for them, from which the plan is assembled."""

    settings: ModelSettings
    inputs: SearchInputs
    candidates: tuple[Candidate, ...]
    layout: Layout | None  # None: nothing fits
    compile_decision: Decision


def _choose(context: PlanContext) -> tuple[_Choice, Layout]:
    """Return the settings and the layout of the plan, or raise DoesNotFitError."""
    choice = _find_choice(context)
    if choice.layout is None:
        raise make_does_not_fit_error(context, choice.inputs, choice.candidates, _find_layout)
    return choice, choice.layout


def _find_layout(context: PlanContext) -> Layout | None:
    """Return the layout of the plan; None if none fits, or if its settings are not supported."""
    try:
        return _find_choice(context).layout
    except (InputError, ManifestError):
        return None


def _find_choice(context: PlanContext) -> _Choice:
    """Return the first settings that fit without DeepSpeed offloading, else those with it, else those requested."""
    settings = apply_requests(context, decide_model_settings(context))
    first = _search(context, settings)
    if first.layout is not None and first.layout.offload == "none":
        return first
    needed = estimate_layout_memory(first.inputs, leanest_layout(first.inputs, Candidate("single"))).total_bytes
    for leaner in iterate_leaner_settings(context, settings, needed - first.inputs.budget.usable_bytes):
        choice = _search(context, leaner)
        if choice.layout is not None:
            return choice
    return first


def _search(context: PlanContext, settings: ModelSettings) -> _Choice:
    is_chunked = settings.optimizer.in_backward or (
        settings.adapter.kind == "full" and settings.precision.trainable_dtype == "bf16"
    )
    quantization = settings.quantization_kind
    candidates = make_candidates(context, quantization, settings.optimizer.name, is_chunked=is_chunked)

    def search(*, compiled: bool) -> Searched:
        inputs = make_search_inputs(context, settings, compiled=compiled)
        return Searched(inputs, find_best_layout(inputs, candidates))

    eager, compiled = search(compiled=False), search(compiled=True)
    is_compiled, decision = decide_compile(context, eager, compiled)
    inputs, layout = compiled if is_compiled else eager
    return _Choice(settings=settings, inputs=inputs, candidates=candidates, layout=layout, compile_decision=decision)


def _make_context(
    manifest: Manifest, hardware: Hardware, base: ModelShape, rows: RowEstimate, options: PlanOptions
) -> PlanContext:
    """Return the inputs of the plan; in the smoke profile, context.config has small sizes instead of the manifest's."""
    context = PlanContext(
        manifest=manifest,
        config=manifest.training.config,
        hardware=hardware,
        base=base,
        rows=rows,
        options=options,
    )
    if context.is_smoke:
        config, replaced = make_smoke_sizes(context.config, options.overridden_keys, rows.byte_tokens)
        context = replace(context, config=config, replaced=replaced)
    check_effects(context.config, options.overridden_keys)
    return context


def _assemble(context: PlanContext, choice: _Choice, layout: Layout) -> Plan:
    settings, inputs, candidates = choice.settings, choice.inputs, choice.candidates
    batch = make_batch_plan(context, inputs, layout)
    captures, captures_decision = decide_cuda_graph(context, settings, inputs, layout)
    compile_plan, scope = make_compile_plan(context, inputs.workload, layout, captures=captures)
    speed = make_speed_plan(context, inputs, layout)
    fewer_gpus = describe_faster_with_fewer_gpus(inputs, layout)
    schedule, schedule_decisions = decide_schedule(context, speed.seconds_per_step)
    shards_checkpoints, saving_bytes, checkpoint_decision = decide_checkpoints(context, inputs, layout)
    task_eval, task_eval_decision = decide_task_eval(context, schedule, speed, layout)
    loader, loader_decisions = decide_dataloader(context)
    decisions = (
        plan_decision("profile", f"{context.options.profile}: {context.base.name}", context.options.profile_reason),
        *settings.decisions,
        *explain_batch(context, batch),
        _explain_strategy(context, inputs, candidates, layout),
        _explain_checkpointing(context, inputs, candidates, layout),
        choice.compile_decision,
        *scope,
        plan_decision("layers", *explain_layer_path(context.base, make_layout_recipe(inputs, layout))),
        *captures_decision,
        *loader_decisions,
        *schedule_decisions,
        *checkpoint_decision,
        task_eval_decision,
        *explain_trackers(context),
        *_explain_calibration(context, inputs, layout),
        *(user_decision(value.name, value.value) for value in context.hardware.user_values),
    )
    return Plan(
        launcher_version=__version__,
        expert=context.manifest.expert,
        profile=context.options.profile,
        manifest_sha256=manifest_sha256(context.manifest),
        hardware=context.hardware,
        base=context.base,
        base_revision=context.entry.revision,
        trust_remote_code=context.entry.trust_remote_code,
        random_weights=context.options.random_weights,
        adapter=settings.adapter,
        precision=settings.precision,
        quantization=settings.store_quantization(layout.strategy),
        attention=settings.attention,
        loss_kernel=settings.loss_kernel,
        loss_on=context.config.loss_on,
        compile=compile_plan,
        cuda_graph=captures,
        defer_gradient_sync=captures and layout.strategy == "ddp",
        checkpointing=layout.checkpointing,
        strategy=layout.strategy,
        offload=layout.offload,
        batch=batch,
        data=make_data_plan(context),
        loader=loader,
        optimizer=settings.optimizer,
        schedule=schedule,
        shards_checkpoints=shards_checkpoints,
        wandb=make_wandb_plan(context),
        trackers=list_other_trackers(context),
        guards=context.options.guards,
        task_eval=task_eval,
        profile_steps=context.options.profile_steps,
        memory=_make_memory_plan(inputs, layout, saving_bytes),
        speed=speed.model_copy(update={"fewer_gpus_note": fewer_gpus}),
        oom_fallbacks=keep_evaluable(make_oom_fallbacks(inputs, layout, candidates), task_eval),
        decisions=tuple(name_flags(replace_reasons(decisions, context.replaced), context.options)),
        notes=(*make_notes(context, inputs, layout, fewer_gpus), *_more_notes(context, choice, speed, task_eval)),
    )


def _more_notes(
    context: PlanContext, choice: _Choice, speed: SpeedPlan, task_eval: TaskEvalPlan | None
) -> tuple[str, ...]:
    gaps = context.options.judge_gaps
    offloads = choice.layout is not None and choice.layout.offload != "none"
    slow = describe_slow_settings(context, speed, _estimate_speed)
    faster = describe_faster_alternatives(context, choice.inputs, speed, _estimate_speed, offloads=offloads)
    return (*slow, *faster, *([gaps] if gaps and task_eval is not None else []))


def _estimate_speed(context: PlanContext) -> float | None:
    """Return only the estimated tokens/s of the plan for a context; None if they are unknown or nothing fits."""
    try:
        choice = _find_choice(context)
    except (InputError, ManifestError):  # these settings are not supported together
        return None
    return None if choice.layout is None else make_speed_plan(context, choice.inputs, choice.layout).tokens_per_second


def _check_positions(context: PlanContext) -> None:
    length, limit = context.config.max_seq_length, context.base.max_positions
    if length > limit:
        raise ManifestError(
            f"training.config.max_seq_length: {length} exceeds the {limit} positions of {context.base.name}",
            hint=f"use at most {limit}, or "
            + ("--gpu NAME or --profile full for the manifest's base" if context.is_smoke else "another base"),
        )


def _make_memory_plan(inputs: SearchInputs, layout: Layout, saving_bytes: int) -> MemoryPlan:
    memory, budget = estimate_layout_memory(inputs, layout), inputs.budget
    return MemoryPlan(
        terms=memory.terms,
        device_bytes=budget.device_bytes,
        free_bytes=budget.free_bytes,
        headroom_bytes=budget.headroom_bytes,
        host_bytes=memory.host_bytes,
        saving_bytes=saving_bytes,
    )


def _explain_calibration(context: PlanContext, inputs: SearchInputs, layout: Layout) -> list[Decision]:
    """Return the decisions that explain how measured runs correct the memory and speed estimates."""
    recipe = make_layout_recipe(inputs, layout)
    allocated = estimate_memory(inputs.shape, recipe).allocated_bytes
    memory = compute_memory_correction(inputs.calibration, make_family(inputs.shape, recipe), allocated)
    speed, is_estimated = lookup_speed_correction(context, inputs, layout)
    decisions = [] if memory is None else [explain_memory(memory)]
    return decisions if speed is None else [*decisions, explain_speed(speed, is_estimated=is_estimated)]


def _explain_strategy(
    context: PlanContext, inputs: SearchInputs, candidates: tuple[Candidate, ...], layout: Layout
) -> Decision:
    return explain_strategy(
        context,
        layout.strategy,
        layout.offload,
        first_choice_fits=fits_memory(inputs, leanest_layout(inputs, candidates[0])),
        faster=find_faster_sharding(inputs, candidates, layout),
    )


def _explain_checkpointing(
    context: PlanContext, inputs: SearchInputs, candidates: tuple[Candidate, ...], layout: Layout
) -> Decision:
    name, level = "gradient checkpointing", layout.checkpointing
    shown = "off" if level == "none" else level
    if context.config.gradient_checkpointing is not None:
        free = find_best_layout(replace(inputs, levels=LEVELS), candidates)
        spare = level != "none" and free is not None and free.checkpointing == "none"
        extra = "; not needed: everything fits without it" if spare else ""
        return manifest_decision(name, shown, f"gradient_checkpointing in the manifest{extra}")
    if level == "none":
        return plan_decision(name, shown, "everything fits without recomputation")
    less = LEVELS[LEVELS.index(level) - 1]
    if fits_memory(inputs, replace(layout, checkpointing=less, micro_batch_size=1)):
        reason = "faster: larger micro-batches, so weights are gathered less often"
        if layout.strategy not in SHARDED_STRATEGIES and layout.offload == "none":
            reason = "larger micro-batches; not clearly slower than smaller ones with less recomputation"
        return plan_decision(name, shown, reason)
    needed = estimate_layout_memory(inputs, replace(layout, checkpointing=less)).total_bytes
    how = "without" if less == "none" else f"with {less} instead of"
    return plan_decision(name, shown, f"{how} it, {format_gib(needed)} would be needed")
