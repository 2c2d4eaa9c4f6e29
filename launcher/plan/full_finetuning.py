"""Full fine-tuning with less memory: BF16 weights, 8-bit moments, moments in CPU memory, updates within backward.

The plan tries these only if FP32 weights do not fit into one GPU, in order of what they change: first the rounding of
weights, then the precision of moments, then their place, and last gradient clipping and accumulation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from launcher.core.choices import OptimizerName
from launcher.core.errors import InputError
from launcher.core.units import format_gib
from launcher.plan.context import PlanContext, manifest_decision, plan_decision
from launcher.plan.dtype_and_kernels import ModelSettings
from launcher.plan.model import Decision
from launcher.plan.strategy import get_requested_strategy

_SMALLER: tuple[OptimizerName, ...] = ("adamw_bnb_8bit", "paged_adamw_8bit")
_ROUNDING = "no FP32 copy of the weights: updates are computed in FP32 and rounded stochastically"
_WITHIN = "each weight is updated in the backward pass and its gradient freed; needs one micro-batch per step"


def apply_requests(context: PlanContext, settings: ModelSettings) -> ModelSettings:
    """Apply bf16_stochastic_round and optimizer_in_bwd of the manifest; raise InputError where they are impossible."""
    config = context.config
    names = [name for name in ("bf16_stochastic_round", "optimizer_in_bwd") if getattr(config, name)]
    if not names or context.is_smoke:
        return settings
    if obstacle := _find_obstacle(context, settings):
        raise InputError(f"training.config.{names[0]}: {obstacle}", hint=f"remove {' and '.join(names)}")
    if config.bf16_stochastic_round:
        decision = manifest_decision("trainable weights", "BF16", f"bf16_stochastic_round in the manifest; {_ROUNDING}")
        settings = _use_bf16(settings, decision)
    if config.optimizer_in_bwd:
        settings = _use_in_backward(
            settings, manifest_decision("optimizer in backward", "on", f"optimizer_in_bwd in the manifest; {_WITHIN}")
        )
    return settings


def iterate_leaner_settings(
    context: PlanContext, settings: ModelSettings, missing_bytes: int
) -> Iterator[ModelSettings]:
    """Yield settings for full fine-tuning that need less and less memory, if the manifest allows them."""
    config = context.config
    if settings.adapter.kind != "full" or _find_obstacle(context, settings):
        return
    rounded = settings
    if settings.precision.trainable_dtype != "bf16":
        if config.bf16_stochastic_round is False:
            return
        reason = f"FP32 weights need {format_gib(missing_bytes)} more than is usable; {_ROUNDING}"
        rounded = _use_bf16(settings, plan_decision("trainable weights", "BF16", reason))
    optimizers = (settings.optimizer.name, *(_SMALLER if config.optim is None else ()))
    if context.lacks("bitsandbytes"):
        optimizers = tuple(name for name in optimizers if name not in _SMALLER)
    smaller = [_use_optimizer(rounded, name) for name in optimizers]
    yield from smaller
    if config.optimizer_in_bwd is None and not config.max_grad_norm:
        decision = plan_decision("optimizer in backward", "on", f"gradients of all weights do not fit; {_WITHIN}")
        yield from (_use_in_backward(each, decision) for each in smaller)


def _find_obstacle(context: PlanContext, settings: ModelSettings) -> str:
    """Return why weights must stay FP32 and be updated after the backward pass, or an empty string."""
    if settings.precision.compute_dtype != "bf16":
        return f"needs a GPU that computes in BF16; this plan computes in {settings.precision.compute_dtype.upper()}"
    if context.num_ranks > 1:
        return f"runs in one process, not on {context.num_ranks} ranks, where FSDP2 shards FP32 weights instead"
    strategy, offload = get_requested_strategy(context), context.config.offload
    if strategy not in (None, "single") or offload not in ("auto", "none"):
        return f"runs in one process, without {strategy if strategy not in (None, 'single') else f'offload {offload}'}"
    if settings.optimizer.name == "sgd":
        return "needs AdamW; sgd is not supported"
    return ""


def _use_bf16(settings: ModelSettings, decision: Decision) -> ModelSettings:
    precision = settings.precision.model_copy(update={"base_dtype": "bf16", "trainable_dtype": "bf16"})
    return replace(settings, precision=precision, decisions=_replace(settings, decision))


def _use_optimizer(settings: ModelSettings, name: OptimizerName) -> ModelSettings:
    if name == settings.optimizer.name:
        return settings
    place = ", in CPU memory: each is copied to the GPU for its update" if name == "paged_adamw_8bit" else ""
    reason = f"FP32 moments do not fit; 8-bit moments take a quarter of the memory{place}"
    optimizer = settings.optimizer.model_copy(update={"name": name})
    return replace(
        settings, optimizer=optimizer, decisions=_replace(settings, plan_decision("optimizer", name, reason))
    )


def _use_in_backward(settings: ModelSettings, decision: Decision) -> ModelSettings:
    optimizer = settings.optimizer.model_copy(update={"in_backward": True})
    return replace(settings, optimizer=optimizer, decisions=(*settings.decisions, decision))


def _replace(settings: ModelSettings, decision: Decision) -> tuple[Decision, ...]:
    """Return the decisions of the settings, with `decision` in place of the one that has the same name."""
    return tuple(decision if other.name == decision.name else other for other in settings.decisions)
