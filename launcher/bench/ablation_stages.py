"""Stages of the ablation: from a plain training loop to the launcher's, one optimization per stage.

A stage replaces one unoptimized setting by the plan's value. Where the plan keeps the unoptimized value, or the
hardware leaves no choice, the stage is unavailable, with the plan's own reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from launcher.core.choices import Checkpointing, LossKernel, OptimizerName
from launcher.core.frozen_model import Frozen
from launcher.plan.model import Plan

SMALL_MICRO_BATCH = 2  # rows: a usual choice where memory is not estimated
_NO_VARLEN = ("sdpa", "eager")  # attention backends that pad groups of documents


class LoopConfig(Frozen):
    """Settings of a stage's training loop; data, batch and learning settings are the plan's in every stage."""

    tokenization: Literal["on the fly", "before"] = "on the fly"
    rows: Literal["padded", "packed"] = "padded"
    precision: Literal["fp32", "tf32", "planned"] = "fp32"
    attention: Literal["eager", "sdpa", "planned"] = "eager"
    optimizer: OptimizerName = "adamw_torch"
    loss: LossKernel = "full_logits"
    checkpointing: Checkpointing = "full"
    micro_batch_size: int = SMALL_MICRO_BATCH  # rows if padded, sequences if packed
    is_compiled: bool = False
    num_workers: int = 0

    def with_change(self, change: Change) -> LoopConfig:
        """Return a copy with some fields replaced."""
        return LoopConfig.model_validate({**self.model_dump(), **change})


Change = dict[str, str | int | bool]
BASELINE = LoopConfig()


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One optimization."""

    key: str
    title: str
    change: Change
    unavailable: str = ""  # the reason why this plan does not have it


def list_stages(plan: Plan) -> tuple[Stage, ...]:
    """Return the stages in the order in which they accumulate."""
    batch, compute_dtype = plan.batch, plan.precision.compute_dtype
    micro_batch, num_workers = batch.micro_batch_size, plan.loader.num_workers
    packing = "" if batch.packed else _explain(plan, "global batch", "the manifest disables packing")
    is_small = micro_batch <= SMALL_MICRO_BATCH
    return (
        Stage(key="tokenization", title="tokenized before the run", change={"tokenization": "before"}),
        Stage(key="packing", title="rows packed, not padded", change={"rows": "packed"}, unavailable=packing),
        *_list_precision_stages(plan, compute_dtype),
        *_list_attention_stages(plan),
        _make_optimizer_stage(plan),
        Stage(
            key="loss",
            title=f"full logits -> {plan.loss_kernel} loss",
            change={"loss": plan.loss_kernel},
            unavailable=_explain(plan, "loss", "the plan keeps full logits")
            if plan.loss_kernel == BASELINE.loss
            else "",
        ),
        _make_checkpointing_stage(plan),
        Stage(
            key="batch",
            title=f"micro-batch {SMALL_MICRO_BATCH} -> {'largest' if is_small else micro_batch}",
            change={"micro_batch_size": micro_batch},
            unavailable=_explain(plan, "batch split", f"the plan has micro-batch {micro_batch}") if is_small else "",
        ),
        Stage(
            key="compile",
            title="torch.compile",
            change={"is_compiled": True},
            unavailable=_explain(plan, "torch.compile", "the plan does not compile") if plan.compile is None else "",
        ),
        Stage(
            key="workers",
            title=f"loader workers 0 -> {num_workers or 'N'}",
            change={"num_workers": num_workers},
            unavailable="" if num_workers else _explain(plan, "dataloader workers", "the plan has none"),
        ),
    )


def _explain(plan: Plan, decision_name: str, default: str) -> str:
    """Return the plan's own decision and reason."""
    decision = next((decision for decision in plan.decisions if decision.name == decision_name), None)
    return default if decision is None else f"the plan has {decision.value}: {decision.reason}"


def _list_precision_stages(plan: Plan, dtype: str) -> tuple[Stage, Stage]:
    gpu = plan.hardware.gpu
    no_tf32 = "no GPU" if gpu is None else "" if gpu.has_tf32 else f"{gpu.title} has no TF32"
    no_half = _explain(plan, "precision", "the plan computes in FP32") if dtype == "fp32" else ""
    name = "BF16" if dtype == "fp32" else dtype.upper()
    title = name if no_tf32 else f"TF32 -> {name}"
    return (
        Stage(key="tf32", title="FP32 -> TF32", change={"precision": "tf32"}, unavailable=no_tf32),
        Stage(key="half", title=title, change={"precision": "planned"}, unavailable=no_half),
    )


def _list_attention_stages(plan: Plan) -> tuple[Stage, Stage]:
    planned = plan.attention.backend
    only_eager = {planned, *plan.attention.fallbacks} == {"eager"}
    no_sdpa = _explain(plan, "attention", "this base model supports eager attention only") if only_eager else ""
    is_varlen = planned not in _NO_VARLEN
    no_varlen = "" if is_varlen else _explain(plan, "attention", "no variable-length kernel here")
    name = planned.replace("_", " ") if is_varlen else "variable-length flash"
    return (
        Stage(key="sdpa", title="eager attention -> SDPA", change={"attention": "sdpa"}, unavailable=no_sdpa),
        Stage(key="varlen", title=f"SDPA -> {name}", change={"attention": "planned"}, unavailable=no_varlen),
    )


def _make_optimizer_stage(plan: Plan) -> Stage:
    name = plan.optimizer.name
    unavailable = _explain(plan, "optimizer", f"the plan has {name}") if name == BASELINE.optimizer else ""
    title = "fused AdamW" if name in ("adamw_torch_fused", BASELINE.optimizer) else name
    return Stage(key="optimizer", title=title, change={"optimizer": name}, unavailable=unavailable)


def _make_checkpointing_stage(plan: Plan) -> Stage:
    level = plan.checkpointing
    unavailable = _explain(plan, "gradient checkpointing", "the plan recomputes all") if level == "full" else ""
    title = f"gradient checkpointing {'off' if level in ('none', 'full') else level}"
    return Stage(key="checkpointing", title=title, change={"checkpointing": level}, unavailable=unavailable)


Mode = Literal["cumulative", "alone"]


class Measurement(Frozen):
    """A stage to measure: on top of all earlier stages, or alone on top of the baseline."""

    key: str
    title: str
    mode: Mode
    config: LoopConfig | None  # None: the launcher's own loop
    fp8_base: bool = False
    unavailable: str = ""


def list_measurements(stages: tuple[Stage, ...], *, fp8_base: bool) -> tuple[Measurement, ...]:
    """Return the baseline, the cumulative stages, the launcher, each stage alone, and the baseline again.

    The second baseline shows whether the machine drifts. Only the launcher's own loop computes in FP8.
    """
    measurements, config = [Measurement(key="baseline", title="baseline", mode="cumulative", config=BASELINE)], BASELINE
    for stage in stages:
        config = config if stage.unavailable else config.with_change(stage.change)
        measurements.append(_make_measurement(stage, "cumulative", config))
    measurements.append(Measurement(key="launcher", title="the launcher's own loop", mode="cumulative", config=None))
    measurements.append(
        Measurement(
            key="fp8",
            title="the launcher's own loop, base in FP8",
            mode="cumulative",
            config=None,
            fp8_base=True,
            unavailable="" if fp8_base else "not requested: --set training.config.precision=fp8",
        )
    )
    for stage in stages:
        alone = BASELINE if stage.unavailable else BASELINE.with_change(stage.change)
        measurements.append(_make_measurement(stage, "alone", alone))
    measurements.append(Measurement(key="baseline", title="baseline, again", mode="alone", config=BASELINE))
    return tuple(measurements)


def _make_measurement(stage: Stage, mode: Mode, config: LoopConfig) -> Measurement:
    return Measurement(key=stage.key, title=stage.title, mode=mode, config=config, unavailable=stage.unavailable)
