"""Choice of the parallelism strategy: replicate if possible, shard if necessary, offload as a last resort."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from launcher.core.choices import (
    DEEPSPEED_STRATEGIES,
    EIGHT_BIT_OPTIMIZERS,
    Offload,
    OptimizerName,
    Quantization,
    Strategy,
)
from launcher.core.errors import InputError, Problem
from launcher.core.units import format_percent
from launcher.plan.context import PlanContext, flag_decision, hardware_decision, manifest_decision, plan_decision
from launcher.plan.model import Decision


class Candidate(NamedTuple):
    """A strategy to try, and what is offloaded to CPU memory with it."""

    strategy: Strategy
    offload: Offload = "none"


_OFFLOADS = ("optimizer", "optimizer_and_parameters")
_KEY = "training.config.{}"
_FROZEN_TOWER = "the frozen vision tower"
_UNVERIFIED = "is not verified for mixtures of experts"

TITLES: dict[Strategy, str] = {
    "single": "one process",
    "ddp": "DDP",
    "fsdp2": "FSDP2",
    "hsdp": "HSDP",
    "zero1": "DeepSpeed ZeRO-1",
    "zero2": "DeepSpeed ZeRO-2",
    "zero3": "DeepSpeed ZeRO-3",
}


def get_requested_strategy(context: PlanContext) -> Strategy | None:
    """Return the strategy requested on the command line or in the manifest, or None to let the plan decide.

    A manifest's ddp means "replicate", which is ignored on one rank. The command line is followed literally, so that
    the overhead of an engine can be measured.
    """
    flag, key = context.options.strategy, context.config.strategy
    if _is_plain_cpu(context):
        return None
    if flag is not None:
        return flag
    if key == "auto":
        return None
    return "single" if key == "ddp" and context.num_ranks == 1 else key


def _is_plain_cpu(context: PlanContext) -> bool:
    """Return whether the plan is for one CPU process: no GPU, and no CPU ranks requested."""
    return context.gpu is None and context.num_ranks == 1 and context.hardware.gpus_per_node == 0


def make_candidates(
    context: PlanContext, quantization: Quantization, optimizer: OptimizerName, *, is_chunked: bool = False
) -> tuple[Candidate, ...]:
    """Return the strategies to try in order of preference: simple before complicated, offloading last."""
    if _is_plain_cpu(context):
        _refuse_overrides_without_effect(context)
        return (Candidate("single"),)
    strategy, offload = get_requested_strategy(context), context.config.offload
    _check_combination(context, strategy, quantization, optimizer)
    if context.lacks("deepspeed") and (strategy in DEEPSPEED_STRATEGIES or offload in _OFFLOADS):
        what = strategy if strategy in DEEPSPEED_STRATEGIES else f"offload {offload}"
        raise InputError(f"{what} needs the package deepspeed, which is not installed", hint="pip install deepspeed")
    is_shardable = not (_list_unshardable(context, optimizer) or _saves_frozen_weights(context) or is_chunked)
    if strategy is None:
        candidates = _list_automatic(context, quantization, is_shardable=is_shardable)
    else:
        offloads: tuple[Offload, ...] = ("none", "optimizer", "optimizer_and_parameters")
        candidates = tuple(Candidate(strategy, each) for each in offloads if _can_offload(strategy, each))
    if context.lacks("deepspeed") or context.base.experts is not None or _requests_fp8(context):
        candidates = tuple(each for each in candidates if each.strategy not in DEEPSPEED_STRATEGIES)
    return tuple(each for each in candidates if offload in ("auto", each.offload)) or candidates[:1]


def _refuse_overrides_without_effect(context: PlanContext) -> None:
    """Raise InputError if --set requests parallelism of the only process. A manifest may: it is for GPUs, too."""
    for name in ("strategy", "offload"):
        key, value = f"training.config.{name}", getattr(context.config, name)
        if key in context.options.overridden_keys and value not in ("auto", "none"):
            raise InputError(
                f"--set {key}={value} has no effect: there is no GPU, and one CPU process trains",
                hint="--gpu NAME plans for a GPU of the catalogue",
            )


def _saves_frozen_weights(context: PlanContext) -> bool:
    """Return whether checkpoints must include frozen weights: a vision tower's, if its decoder is fully fine-tuned."""
    return context.config.adapter_type == "full" and context.base.frozen_parameters > 0


def _list_automatic(context: PlanContext, quantization: Quantization, *, is_shardable: bool) -> tuple[Candidate, ...]:
    """Return the strategies to try if neither the command line nor the manifest names one."""
    is_alone = context.num_ranks == 1
    candidates = [Candidate("single" if is_alone else "ddp")]
    if not is_shardable:
        return tuple(candidates)
    if not is_alone:
        candidates += [Candidate("hsdp")] if _has_several_nodes_of_gpus(context) else []
        candidates.append(Candidate("fsdp2"))
    candidates += [Candidate("zero2", "optimizer"), Candidate("zero3", "optimizer")]
    if quantization == "none":
        candidates.append(Candidate("zero3", "optimizer_and_parameters"))
    return tuple(candidates)


def _has_several_nodes_of_gpus(context: PlanContext) -> bool:
    return context.hardware.nodes > 1 and context.hardware.gpus_per_node > 1


def _can_offload(strategy: Strategy, offload: Offload) -> bool:
    if offload == "none":
        return True
    return strategy == "zero3" or (strategy in DEEPSPEED_STRATEGIES and offload == "optimizer")


def _check_combination(
    context: PlanContext, strategy: Strategy | None, quantization: Quantization, optimizer: OptimizerName
) -> None:
    """Raise one InputError that lists every unsupported combination and suggests an alternative for each."""
    offload = context.config.offload
    problems: list[Problem] = []

    def refuse(what: str, where: str = "--strategy" if context.options.strategy else _KEY.format("strategy")) -> None:
        problems.append(Problem(where=where, what=what))

    if strategy == "hsdp" and context.hardware.nodes == 1:
        refuse("HSDP replicates between nodes, and there is one node, where it is the same as FSDP2; use fsdp2")
    elif strategy == "hsdp" and not _has_several_nodes_of_gpus(context):
        refuse("HSDP shards over the GPUs of a node, and each node has one; use ddp, or fsdp2 to shard between nodes")
    if strategy not in (None, "single", "ddp"):
        for what, instead in _list_unshardable(context, optimizer):
            refuse(f"{strategy} does not support {what}; use {instead}")
        if _saves_frozen_weights(context):
            refuse(f"{strategy} cannot save {_FROZEN_TOWER} of {context.base.name}; use ddp, or adapter_type lora")
    if strategy in DEEPSPEED_STRATEGIES and context.base.experts is not None:
        refuse(f"{strategy} {_UNVERIFIED}; use ddp or fsdp2")
    if strategy in DEEPSPEED_STRATEGIES and _requests_fp8(context) and context.config.adapter_type == "full":
        refuse(f"{strategy} with precision fp8 has not been verified; use ddp or fsdp2")
    if offload in _OFFLOADS:
        for what in _list_offload_problems(context, strategy, quantization, optimizer):
            refuse(what, _KEY.format("offload"))
    if problems:
        raise InputError(
            "this combination of strategy, adapter and quantization is not supported",
            tuple(problems),
            hint=f"or {_describe_automatic(context)} to let the plan decide",
        )


def _requests_fp8(context: PlanContext) -> bool:
    """Return whether FP8 is requested; the smoke profile does not use it."""
    return context.config.precision == "fp8" and not context.is_smoke


def _list_unshardable(context: PlanContext, optimizer: OptimizerName) -> list[tuple[str, str]]:
    """List what prevents sharding: each with its reason, and what to use instead."""
    config = context.config
    known = (
        (optimizer in EIGHT_BIT_OPTIMIZERS, f"{optimizer}, which keeps its state per rank", "adamw_torch_fused"),
        (config.target_parameters, "target_parameters, which PEFT adds to whole weights", "ddp"),
        (
            _requests_fp8(context) and config.adapter_type != "full",
            "precision fp8: it would shard FP8 weights",
            "ddp, or precision bf16",
        ),
        (config.modules_to_save, "modules_to_save: it would shard the frozen originals, too", "ddp"),
        (config.new_tokens, "new_tokens: PEFT reads and replaces rows of whole embeddings", "ddp"),
        (config.init_lora_weights, "PiSSA, which replaces whole weights of the base", "ddp"),
    )
    return [(what, instead) for is_set, what, instead in known if is_set]


def _list_offload_problems(
    context: PlanContext, strategy: Strategy | None, quantization: Quantization, optimizer: OptimizerName
) -> Iterator[str]:
    """Yield why the offload that is requested is not possible."""
    offload = context.config.offload
    if strategy is not None and strategy not in DEEPSPEED_STRATEGIES:
        yield f"{strategy} does not support offload {offload}, only DeepSpeed does; use zero2 or zero3"
    if offload == "optimizer_and_parameters" and strategy in ("zero1", "zero2"):
        yield f"{strategy} keeps all parameters on every GPU; use zero3 to offload them"
    if optimizer in EIGHT_BIT_OPTIMIZERS:
        yield f"an offloaded optimizer runs on the CPU, {optimizer} does not; use adamw_torch_fused"
    if quantization != "none" and offload == "optimizer_and_parameters":
        yield "quantized parameters cannot be offloaded; use quantization: none, or offload: optimizer"
    if strategy is None:  # DeepSpeed offloads; a strategy of DeepSpeed that is requested has been checked
        if optimizer not in EIGHT_BIT_OPTIMIZERS:
            for what, _ in _list_unshardable(context, optimizer):
                yield f"DeepSpeed, which offloads, does not support {what}; use offload: none"
        if _saves_frozen_weights(context):
            yield f"DeepSpeed, which offloads, cannot save {_FROZEN_TOWER} of {context.base.name}; use offload: none"
        if context.base.experts is not None:
            yield f"DeepSpeed, which offloads, {_UNVERIFIED}; use offload: none"
        if _requests_fp8(context) and context.config.adapter_type == "full":
            yield "DeepSpeed, which offloads, has not been verified with precision fp8; use offload: none"


def _describe_automatic(context: PlanContext) -> str:
    """Return how to leave out what is requested, such as "omit --strategy and set offload to auto"."""
    steps = ["omit --strategy"] if context.options.strategy else []
    keys = [name for name in ("strategy", "offload") if getattr(context.config, name) not in ("auto", "none")]
    steps += [f'set {" and ".join(keys)} to "auto"'] if keys else []
    return " and ".join(steps)


def explain_strategy(
    context: PlanContext,
    strategy: Strategy,
    offload: Offload,
    *,
    first_choice_fits: bool,
    faster: tuple[Strategy, float] | None,
) -> Decision:
    """Return the decision about the strategy; `faster` is a sharded one that is somewhat faster, and by how much."""
    value = TITLES[strategy]
    if strategy == "hsdp":
        value += f", {context.hardware.nodes} replicas of {context.hardware.gpus_per_node} shards"
    value += "" if offload == "none" else f", {offload.replace('_', ' ')} on the CPU"
    if context.gpu is None and strategy == "single":
        return hardware_decision("strategy", value, "no GPU: one CPU process")
    only_offloaded = "fits only with offloading to CPU memory, which is slow"
    more = f"; {only_offloaded}" if offload != "none" and context.config.offload == "auto" else ""
    if context.options.strategy:
        return flag_decision("strategy", value, f"--strategy{more}")
    if get_requested_strategy(context) is not None:
        return manifest_decision("strategy", value, f"strategy in the manifest{more}")
    if offload != "none":
        if context.config.offload == offload:
            return manifest_decision("strategy", value, "offload in the manifest")
        return plan_decision("strategy", value, only_offloaded)
    if strategy == "single":
        return plan_decision("strategy", value, "everything fits on one GPU")
    if strategy == "ddp":
        reason = "the full model fits on each GPU: least communication"
        if faster is not None:
            reason += (
                f"; --strategy {faster[0]} is estimated to be {format_percent(faster[1])} faster, but not measured"
            )
        return plan_decision("strategy", value, reason)
    reason = "the model and its training state do not fit on one GPU"
    if first_choice_fits:
        reason = "clearly faster than DDP here: sharding leaves memory for less recomputation and larger micro-batches"
    if strategy == "hsdp":
        reason += "; sharded inside each node and replicated between nodes: only gradients use the network"
    return plan_decision("strategy", value, reason)
