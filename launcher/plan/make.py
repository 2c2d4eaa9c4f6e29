"""make_plan: the whole decision, in order. Pure: the same inputs give the same plan, to the byte."""

from __future__ import annotations

from dataclasses import dataclass, replace

from launcher import __version__
from launcher.errors import ManifestError
from launcher.hardware import Hardware
from launcher.manifest.load import manifest_sha256
from launcher.manifest.model import Manifest
from launcher.memory import estimate_memory
from launcher.plan.advice import does_not_fit
from launcher.plan.basics import Basics, decide_basics
from launcher.plan.batch import explain_batch, make_batch_plan
from launcher.plan.calibration import (
    explain_memory,
    explain_speed,
    find_memory_correction,
    name_family,
)
from launcher.plan.carried import make_data_plan, make_wandb_plan
from launcher.plan.compiling import decide_compile, make_compile_plan, without_partitions
from launcher.plan.costly import tell_costly
from launcher.plan.fit import Layout, best_layout, estimate, fits, make_recipe
from launcher.plan.graphs import decide_graph
from launcher.plan.ladder import make_ladder
from launcher.plan.loading import decide_loading
from launcher.plan.model import Decision, MemoryPlan, Plan, QuantizationPlan, SpeedPlan
from launcher.plan.notes import make_notes
from launcher.plan.scales import make_scaling_plan
from launcher.plan.schedule import Length, decide_schedule, estimate_length
from launcher.plan.situation import PlanOptions, Situation, asked, decided, given_by_user
from launcher.plan.sizing import LEVELS, Sizing, likely_captured, make_sizing, make_workload
from launcher.plan.smoke import make_smoke_sizes, restate
from launcher.plan.speeding import find_speed, make_speed_plan
from launcher.plan.strategy import Candidate, explain_strategy, make_candidates
from launcher.plan.tasks import decide_tasks
from launcher.rows import RowEstimate
from launcher.shapes import ModelShape
from launcher.units import format_gib


def make_plan(
    manifest: Manifest,
    hardware: Hardware,
    *,
    base: ModelShape,
    rows: RowEstimate,
    options: PlanOptions | None = None,
) -> Plan:
    situation = _make_situation(manifest, hardware, base, rows, options or PlanOptions())
    _check_positions(situation)
    return _assemble(situation, _choose(situation))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Choice:
    """What all else follows from."""

    basics: Basics
    sizing: Sizing
    candidates: tuple[Candidate, ...]
    layout: Layout
    compile_decision: Decision


def _choose(situation: Situation) -> _Choice:
    basics = decide_basics(situation)
    workload = make_workload(situation, basics)
    captures = likely_captured(situation, basics)
    compiling = decide_compile(situation, workload, estimate_length(situation).num_steps, captures=captures)
    sizing = make_sizing(situation, basics, replace(workload, compiled=compiling.is_on))
    candidates = make_candidates(situation, basics.quantization_kind, basics.optimizer.name)
    layout = best_layout(sizing, candidates)
    if layout is not None and without_partitions(situation, compiling, layout) != compiling:
        compiling = without_partitions(situation, compiling, layout)
        sizing = make_sizing(situation, basics, replace(workload, compiled=False))
        layout = best_layout(sizing, candidates)
    if layout is None:
        raise does_not_fit(sizing, candidates)
    return _Choice(
        basics=basics, sizing=sizing, candidates=candidates, layout=layout, compile_decision=compiling.decision
    )


def _make_situation(
    manifest: Manifest, hardware: Hardware, base: ModelShape, rows: RowEstimate, options: PlanOptions
) -> Situation:
    """The only place that knows of the smoke profile's sizes: everything after it reads the situation's config."""
    situation = Situation(
        manifest=manifest,
        config=manifest.training.config,
        hardware=hardware,
        base=base,
        rows=rows,
        options=options,
    )
    if not situation.is_smoke:
        return situation
    sizes = make_smoke_sizes(situation.config, options.given_keys, rows.mean_tokens if rows.is_measured else 0.0)
    return replace(situation, config=sizes.config, replaced=sizes.replaced)


def _assemble(situation: Situation, choice: _Choice) -> Plan:
    basics, sizing, layout, candidates = choice.basics, choice.sizing, choice.layout, choice.candidates
    length = estimate_length(situation)
    batch = make_batch_plan(situation, sizing, layout)
    captures, captures_decision = decide_graph(situation, basics, sizing, layout)
    compile_plan, compile_scope = make_compile_plan(
        situation, sizing.workload, layout, length.num_steps, captures=captures
    )
    speed = _make_speed(situation, basics, sizing, layout, length, captures=captures)
    schedule, schedule_decisions = decide_schedule(situation, length, speed.seconds_per_step)
    tasks, tasks_decision = decide_tasks(situation, schedule, speed, layout)
    loader, loader_decisions = decide_loading(situation, length.num_steps)
    decisions = (
        _explain_profile(situation),
        *basics.decisions,
        *explain_batch(situation, batch),
        explain_strategy(situation, layout.strategy, layout.offload, _first_fits(sizing, candidates)),
        _explain_checkpointing(situation, sizing, candidates, layout),
        choice.compile_decision,
        *compile_scope,
        *captures_decision,
        *loader_decisions,
        *schedule_decisions,
        tasks_decision,
        *_explain_calibration(situation, sizing, layout, captures=captures),
        *(given_by_user(one.name, one.value) for one in situation.hardware.given),
    )
    return Plan(
        launcher_version=__version__,
        expert=situation.manifest.expert,
        profile=situation.options.profile,
        manifest_sha256=manifest_sha256(situation.manifest),
        hardware=situation.hardware,
        base=situation.base,
        base_revision=situation.entry.revision,
        trust_remote_code=situation.entry.trust_remote_code,
        random_weights=situation.options.random_weights,
        adapter=basics.adapter,
        precision=basics.precision,
        quantization=_storage_for(basics, layout),
        attention=basics.attention,
        loss_kernel=basics.loss_kernel,
        loss_on=situation.config.loss_on,
        compile=compile_plan,
        cuda_graph=captures,
        adds_up_behind=captures and layout.strategy == "ddp",
        checkpointing=layout.checkpointing,
        strategy=layout.strategy,
        offload=layout.offload,
        batch=batch,
        data=make_data_plan(situation),
        loader=loader,
        optimizer=basics.optimizer,
        schedule=schedule,
        wandb=make_wandb_plan(situation),
        guards=situation.options.guards,
        tasks=tasks,
        profiled=situation.options.profiled,
        memory=_make_memory_plan(sizing, layout),
        speed=speed,
        ladder=make_ladder(sizing, layout, candidates),
        decisions=restate(decisions, situation.replaced),
        notes=(*make_notes(situation, sizing, layout), *tell_costly(situation, speed, _find_speed)),
    )


def _find_speed(situation: Situation) -> float | None:
    """As a plan would state it, without the rest of the plan."""
    choice, length = _choose(situation), estimate_length(situation)
    captures, _ = decide_graph(situation, choice.basics, choice.sizing, choice.layout)
    return make_speed_plan(situation, choice.sizing, choice.layout, length, captures=captures).tokens_per_second


def _make_speed(
    situation: Situation, basics: Basics, sizing: Sizing, layout: Layout, length: Length, *, captures: bool
) -> SpeedPlan:
    speed = make_speed_plan(situation, sizing, layout, length, captures=captures)
    return speed.model_copy(update={"scaling": make_scaling_plan(situation, basics, sizing, layout, speed)})


def _check_positions(situation: Situation) -> None:
    length, limit = situation.config.max_seq_length, situation.base.max_positions
    if length > limit:
        raise ManifestError(
            f"training.config.max_seq_length: {length} is beyond the {limit} positions of {situation.base.name}",
            hint=f"use at most {limit}, or another base",
        )


def _first_fits(sizing: Sizing, candidates: tuple[Candidate, ...]) -> bool:
    strategy, offload = candidates[0]
    leanest = Layout(strategy=strategy, offload=offload, checkpointing=sizing.levels[-1], micro_batch_size=1)
    return fits(sizing, leanest)


def _storage_for(basics: Basics, layout: Layout) -> QuantizationPlan | None:
    """ZeRO-3 can only partition 4-bit weights that are stored in the dtype of the others."""
    quantization = basics.quantization
    if quantization is None or quantization.kind == "int8" or layout.strategy != "zero3":
        return quantization
    return quantization.model_copy(update={"storage_dtype": basics.precision.compute_dtype})


def _make_memory_plan(sizing: Sizing, layout: Layout) -> MemoryPlan:
    memory, budget = estimate(sizing, layout), sizing.budget
    return MemoryPlan(
        terms=memory.terms,
        card_bytes=budget.card_bytes,
        free_bytes=budget.free_bytes,
        headroom_bytes=budget.headroom_bytes,
        host_bytes=memory.host_bytes,
    )


def _explain_calibration(situation: Situation, sizing: Sizing, layout: Layout, *, captures: bool) -> list[Decision]:
    """What finished runs of this machine have changed."""
    recipe = make_recipe(sizing, layout)
    allocated = estimate_memory(sizing.shape, recipe).allocated_bytes
    memory = find_memory_correction(sizing.calibration, name_family(sizing.shape, recipe), allocated)
    speed, is_estimated = find_speed(situation, sizing, layout, captures=captures)
    found = [] if memory is None else [explain_memory(memory)]
    return found if speed is None else [*found, explain_speed(speed, is_estimated=is_estimated)]


def _explain_profile(situation: Situation) -> Decision:
    what = f"{situation.options.profile}: {situation.base.name}"
    return decided("profile", what, situation.options.profile_reason)


def _explain_checkpointing(
    situation: Situation, sizing: Sizing, candidates: tuple[Candidate, ...], layout: Layout
) -> Decision:
    name, level = "gradient checkpointing", layout.checkpointing
    shown = "off" if level == "none" else level
    if situation.config.gradient_checkpointing is not None:
        free = best_layout(replace(sizing, levels=LEVELS), candidates)
        spare = level != "none" and free is not None and free.checkpointing == "none"
        extra = "; left to the plan it would be off: everything fits without" if spare else ""
        return asked(name, shown, f"gradient_checkpointing in the manifest{extra}")
    if level == "none":
        return decided(name, shown, "everything fits, so nothing is computed twice")
    less = LEVELS[LEVELS.index(level) - 1]
    if fits(sizing, replace(layout, checkpointing=less, micro_batch_size=1)):
        return decided(name, shown, "makes room for larger micro-batches, so that weights are moved less often: faster")
    needed = estimate(sizing, replace(layout, checkpointing=less)).total_bytes
    how = "without" if less == "none" else f"with {less}"
    return decided(name, shown, f"{how} it would need {format_gib(needed)}")
