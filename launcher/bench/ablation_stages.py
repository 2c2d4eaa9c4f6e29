"""Stages of the ablation: from a plain training loop to the launcher's, one optimization per stage.

A stage replaces one unoptimized setting by the plan's value. Where the plan keeps the unoptimized value, or the
hardware leaves no choice, the stage is unavailable, with the plan's own reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from launcher.core.choices import Checkpointing, LossKernel, OptimizerName
from launcher.core.frozen_model import Frozen
from launcher.plan.model import Plan

SMALL_MICRO_BATCH = 2  # rows: a usual choice where memory is not estimated
_NO_VARLEN = ("sdpa", "eager")  # attention backends that pad groups of documents


class LoopConfig(Frozen):
    """Settings of a stage's training loop; data, global batch and optimizer settings are the same in every stage."""

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
    """One ablation stage: an optimization, as a change to the settings of the training loop."""

    key: str
    title: str
    change: Change
    unavailable: str = ""  # the reason why this plan does not have it


def list_stages(plan: Plan) -> tuple[Stage, ...]:
    """Return the ablation stages of a plan, in the order in which their optimizations are added."""
    micro_batch, num_workers = plan.batch.micro_batch_size, plan.loader.num_workers
    loss, optimizer, checkpointing = plan.loss_kernel, plan.optimizer.name, plan.checkpointing

    def make(key: str, title: str, change: Change, decision: str, *, is_unavailable: bool) -> Stage:
        """Make a stage; if the plan does not use it, mark it unavailable, with the plan's own choice and its reason."""
        if not is_unavailable:
            return Stage(key=key, title=title, change=change)
        made = next(item for item in plan.decisions if item.name == decision)
        return Stage(key=key, title=title, change=change, unavailable=f"the plan has {made.value}: {made.reason}")

    packed: Change = {"rows": "packed"}
    is_small = micro_batch <= SMALL_MICRO_BATCH
    batch_title = f"micro-batch {SMALL_MICRO_BATCH} -> {'largest' if is_small else micro_batch}"
    fused = "fused AdamW" if optimizer in ("adamw_torch_fused", BASELINE.optimizer) else optimizer
    kept = f"gradient checkpointing {'off' if checkpointing in ('none', 'full') else checkpointing}"
    workers = f"loader workers 0 -> {num_workers or 'N'}"
    return (
        Stage(key="tokenization", title="tokenized before the run", change={"tokenization": "before"}),
        make("packing", "rows packed, not padded", packed, "global batch", is_unavailable=not plan.batch.packed),
        *_list_precision_stages(plan, make),
        *_list_attention_stages(plan, make),
        make("optimizer", fused, {"optimizer": optimizer}, "optimizer", is_unavailable=optimizer == BASELINE.optimizer),
        make("loss", f"full logits -> {loss} loss", {"loss": loss}, "loss", is_unavailable=loss == BASELINE.loss),
        make(
            "checkpointing",
            kept,
            {"checkpointing": checkpointing},
            "gradient checkpointing",
            is_unavailable=checkpointing == "full",
        ),
        make("batch", batch_title, {"micro_batch_size": micro_batch}, "batch split", is_unavailable=is_small),
        make("compile", "torch.compile", {"is_compiled": True}, "torch.compile", is_unavailable=plan.compile is None),
        make("workers", workers, {"num_workers": num_workers}, "dataloader workers", is_unavailable=not num_workers),
    )


def _list_precision_stages(plan: Plan, make: Callable[..., Stage]) -> tuple[Stage, Stage]:
    gpu, dtype = plan.hardware.gpu, plan.precision.compute_dtype
    no_tf32 = "no GPU" if gpu is None else "" if gpu.has_tf32 else f"{gpu.title} has no TF32"
    name = "BF16" if dtype == "fp32" else dtype.upper()
    title = name if no_tf32 else f"TF32 -> {name}"
    return (
        Stage(key="tf32", title="FP32 -> TF32", change={"precision": "tf32"}, unavailable=no_tf32),
        make("half", title, {"precision": "planned"}, "precision", is_unavailable=dtype == "fp32"),
    )


def _list_attention_stages(plan: Plan, make: Callable[..., Stage]) -> tuple[Stage, Stage]:
    planned = plan.attention.backend
    only_eager = {planned, *plan.attention.fallbacks} == {"eager"}
    is_varlen = planned not in _NO_VARLEN
    name = planned.replace("_", " ") if is_varlen else "variable-length flash"
    return (
        make("sdpa", "eager attention -> SDPA", {"attention": "sdpa"}, "attention", is_unavailable=only_eager),
        make("varlen", f"SDPA -> {name}", {"attention": "planned"}, "attention", is_unavailable=not is_varlen),
    )


Mode = Literal["cumulative", "alone"]


class Measurement(Frozen):
    """A stage to measure: on top of all earlier stages, or alone on top of the baseline."""

    key: str
    title: str
    mode: Mode
    config: LoopConfig | None  # None: the launcher's own loop
    in_fp8: bool = False
    unavailable: str = ""


def list_measurements(stages: tuple[Stage, ...], *, in_fp8: bool) -> tuple[Measurement, ...]:
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
            title="the launcher's own loop, in FP8",
            mode="cumulative",
            config=None,
            in_fp8=True,
            unavailable="" if in_fp8 else "not requested: --set training.config.precision=fp8",
        )
    )
    for stage in stages:
        alone = BASELINE if stage.unavailable else BASELINE.with_change(stage.change)
        measurements.append(_make_measurement(stage, "alone", alone))
    measurements.append(Measurement(key="baseline", title="baseline, again", mode="alone", config=BASELINE))
    return tuple(measurements)


def _make_measurement(stage: Stage, mode: Mode, config: LoopConfig) -> Measurement:
    return Measurement(key=stage.key, title=stage.title, mode=mode, config=config, unavailable=stage.unavailable)
