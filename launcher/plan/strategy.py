"""Choice of the parallelism strategy: replicate if possible, shard if necessary, offload as a last resort."""

from __future__ import annotations

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
        return (Candidate("single"),)
    strategy, offload = get_requested_strategy(context), context.config.offload
    _check_combination(context, strategy, quantization, optimizer)
    if strategy in DEEPSPEED_STRATEGIES and context.lacks("deepspeed"):
        raise InputError(
            f"{strategy} needs the package deepspeed, which is not installed", hint="pip install deepspeed"
        )
    config = context.config
    needs_whole_weights = (
        config.target_parameters or config.modules_to_save or config.new_tokens or config.init_lora_weights
    )
    is_shardable = (
        optimizer not in EIGHT_BIT_OPTIMIZERS
        and not is_chunked
        and not needs_whole_weights
        and config.precision != "fp8"
        and not _saves_frozen_weights(context)
    )
    if strategy is None:
        candidates = _list_automatic(context, quantization, is_shardable=is_shardable)
    else:
        offloads: tuple[Offload, ...] = ("none", "optimizer", "optimizer_and_parameters")
        candidates = tuple(Candidate(strategy, each) for each in offloads if _can_offload(strategy, each))
    if context.lacks("deepspeed") or context.base.experts is not None:
        candidates = tuple(each for each in candidates if each.strategy not in DEEPSPEED_STRATEGIES)
    return tuple(each for each in candidates if offload in ("auto", each.offload)) or candidates[:1]


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
    where = "--strategy" if context.options.strategy else "training.config.strategy"
    problems: list[Problem] = []

    def refuse(what: str) -> None:
        problems.append(Problem(where=where, what=what))

    if strategy == "hsdp" and context.hardware.nodes == 1:
        refuse("HSDP replicates between nodes, and there is one node, where it is the same as FSDP2; use fsdp2")
    elif strategy == "hsdp" and not _has_several_nodes_of_gpus(context):
        refuse("HSDP shards over the GPUs of a node, and each node has one; use ddp, or fsdp2 to shard between nodes")
    config, base = context.config, context.base
    needs_whole_weights = (
        (optimizer in EIGHT_BIT_OPTIMIZERS, f"{optimizer}, which keeps its state per rank; use adamw_torch_fused"),
        (config.target_parameters, "target_parameters, which PEFT adds to whole weights; use ddp"),
        (config.precision == "fp8", "precision fp8: it would shard FP8 weights; use ddp, or precision bf16"),
        (config.modules_to_save, "modules_to_save: it would shard the frozen originals, too; use ddp"),
        (config.new_tokens, "new_tokens: PEFT reads and replaces rows of whole embeddings; use ddp"),
        (config.init_lora_weights, "PiSSA, which replaces whole weights of the base; use ddp"),
    )
    if strategy not in (None, "single", "ddp"):
        for is_set, what in needs_whole_weights:
            if is_set:
                refuse(f"{strategy} does not support {what}")
        if _saves_frozen_weights(context):
            refuse(f"{strategy} cannot save the frozen vision tower of {base.name}; use ddp, or adapter_type lora")
    if strategy in DEEPSPEED_STRATEGIES and base.experts is not None:
        refuse(f"{strategy} is not verified for mixtures of experts; use ddp or fsdp2")
    if offload in ("optimizer", "optimizer_and_parameters"):
        if strategy is not None and strategy not in DEEPSPEED_STRATEGIES:
            refuse(f"{strategy} does not support offload {offload}, only DeepSpeed does; use zero2 or zero3")
        if offload == "optimizer_and_parameters" and strategy in ("zero1", "zero2"):
            refuse(f"{strategy} keeps all parameters on every GPU; use zero3 to offload them")
        if optimizer in EIGHT_BIT_OPTIMIZERS:
            refuse(f"an offloaded optimizer runs on the CPU, {optimizer} does not; use adamw_torch_fused")
        if quantization != "none" and offload == "optimizer_and_parameters":
            refuse("quantized parameters cannot be offloaded; use quantization: none, or offload: optimizer")
    if problems:
        raise InputError(
            "this combination of strategy, adapter and quantization is not supported",
            tuple(problems),
            hint='or set strategy and offload to "auto" to let the plan decide',
        )


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
    if context.options.strategy:
        return flag_decision("strategy", value, "--strategy")
    if get_requested_strategy(context) is not None:
        return manifest_decision("strategy", value, "strategy in the manifest")
    if offload != "none":
        return plan_decision("strategy", value, "fits only with offloading to CPU memory, which is slow")
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
