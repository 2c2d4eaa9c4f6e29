"""How ranks share the work. Shard only what must be sharded, offload only what must be offloaded."""

from __future__ import annotations

from launcher.choices import DEEPSPEED_STRATEGIES, Offload, OptimizerName, Quantization, Strategy
from launcher.errors import InputError, Problem
from launcher.plan.model import Decision
from launcher.plan.situation import Situation, asked, decided, forced

Candidate = tuple[Strategy, Offload]

TITLES: dict[Strategy, str] = {
    "single": "one process",
    "ddp": "DDP",
    "fsdp2": "FSDP2",
    "zero1": "DeepSpeed ZeRO-1",
    "zero2": "DeepSpeed ZeRO-2",
    "zero3": "DeepSpeed ZeRO-3",
}


def wanted_strategy(situation: Situation) -> Strategy | None:
    """What the user asked for, on the command line before the manifest; None: decide.

    A manifest's ddp means "replicate", which one rank has no use for. The command line is taken at its word: it is how
    the price of an engine is measured.
    """
    flag, key = situation.options.strategy, situation.config.strategy
    if _is_plain_cpu(situation):
        return None
    if flag is not None:
        return flag
    if key == "auto":
        return None
    return "single" if key == "ddp" and situation.num_ranks == 1 else key


def _is_plain_cpu(situation: Situation) -> bool:
    """No GPU, and nobody asked for ranks in its place: one process, whatever the manifest says."""
    return situation.gpu is None and situation.num_ranks == 1 and situation.hardware.gpus_per_node == 0


def make_candidates(
    situation: Situation, quantization: Quantization, optimizer: OptimizerName
) -> tuple[Candidate, ...]:
    """In order of preference: simple before complicated, offloading last."""
    if _is_plain_cpu(situation):
        return (("single", "none"),)
    strategy, offload = wanted_strategy(situation), situation.config.offload
    _check_combination(situation, strategy, quantization, optimizer)
    if strategy in DEEPSPEED_STRATEGIES and situation.lacks("deepspeed"):
        raise InputError(
            f"{strategy} needs the package deepspeed, which is not installed here", hint="pip install deepspeed"
        )
    shardable = quantization != "int8" and optimizer != "adamw_bnb_8bit"
    if strategy is None:
        pool = _automatic(situation.num_ranks == 1, shardable, quantization)
    else:
        moves: tuple[Offload, ...] = ("none", "optimizer", "optimizer_and_parameters")
        pool = tuple((strategy, moved) for moved in moves if _can_offload(strategy, moved))
    if situation.lacks("deepspeed"):
        pool = tuple(candidate for candidate in pool if candidate[0] not in DEEPSPEED_STRATEGIES)
    return tuple((kind, moved) for kind, moved in pool if offload in ("auto", moved)) or pool[:1]


def _automatic(is_alone: bool, shardable: bool, quantization: Quantization) -> tuple[Candidate, ...]:
    whole: tuple[Candidate, ...] = (("single" if is_alone else "ddp", "none"),)
    if not shardable:
        return whole
    sharded: Candidate = ("zero3" if quantization == "int4" else "fsdp2", "none")
    offloaded: tuple[Candidate, ...] = (("zero2", "optimizer"), ("zero3", "optimizer"))
    if quantization == "none":
        offloaded += (("zero3", "optimizer_and_parameters"),)
    return whole + (() if is_alone else (sharded,)) + offloaded


def _can_offload(strategy: Strategy, offload: Offload) -> bool:
    if offload == "none":
        return True
    return strategy == "zero3" or (strategy in DEEPSPEED_STRATEGIES and offload == "optimizer")


def _check_combination(
    situation: Situation, strategy: Strategy | None, quantization: Quantization, optimizer: OptimizerName
) -> None:
    """Combinations that are known to be wrong, all at once, each with the way out."""
    offload = situation.config.offload
    where = "--strategy" if situation.options.strategy else "training.config.strategy"
    problems: list[Problem] = []

    def refuse(what: str) -> None:
        problems.append(Problem(where=where, what=what))

    if strategy == "fsdp2" and quantization == "int4":
        refuse(
            "NF4 weights come apart under FSDP2 (shards corrupt packed 4-bit values); use zero3, or quantization none"
        )
    if strategy not in (None, "single", "ddp") and quantization == "int8":
        refuse(f"int8 weights do not run under {strategy}; use ddp, or quantization int4 with zero3")
    if strategy not in (None, "single", "ddp") and optimizer == "adamw_bnb_8bit":
        refuse(f"adamw_bnb_8bit keeps its state per rank and does not run under {strategy}; use adamw_torch_fused")
    if offload in ("optimizer", "optimizer_and_parameters"):
        if strategy is not None and strategy not in DEEPSPEED_STRATEGIES:
            refuse(f"offload {offload} is done by DeepSpeed, not by {strategy}; use zero2 or zero3")
        if offload == "optimizer_and_parameters" and strategy in ("zero1", "zero2"):
            refuse(f"{strategy} keeps whole parameters on each GPU; offloading them needs zero3")
        if quantization == "int8":
            refuse("int8 weights do not run under DeepSpeed, which does the offloading; use quantization int4 or none")
        if optimizer == "adamw_bnb_8bit":
            refuse("offloaded optimizer state is stepped on the CPU, adamw_bnb_8bit is not; use adamw_torch_fused")
        if quantization != "none" and offload == "optimizer_and_parameters":
            refuse("quantised parameters cannot be offloaded; use quantization none, or offload optimizer")
    if problems:
        raise InputError(
            "this combination is known to be wrong", tuple(problems), hint='or leave "auto" and see the plan'
        )


def explain_strategy(situation: Situation, strategy: Strategy, offload: Offload, first_choice_fits: bool) -> Decision:
    value = TITLES[strategy] + ("" if offload == "none" else f", {offload.replace('_', ' ')} on the CPU")
    if situation.gpu is None and strategy == "single":
        return forced("strategy", value, "no GPU: one CPU process")
    if situation.options.strategy:
        return Decision(name="strategy", value=value, reason="--strategy", decided_by="command line")
    if wanted_strategy(situation) is not None:
        return asked("strategy", value, "strategy in the manifest")
    if offload != "none":
        return decided("strategy", value, "nothing else fits: slow, but it trains")
    if strategy == "single":
        return decided("strategy", value, "one GPU holds it all")
    if strategy == "ddp":
        return decided("strategy", value, "each GPU holds the whole model: least traffic between them")
    why = (
        "the model with its training state is too large for one GPU"
        if not first_choice_fits
        else ("sharding leaves room to recompute less and take more sequences at once: clearly faster than DDP here")
    )
    if strategy == "zero3":
        return decided("strategy", value, f"{why}; NF4 weights are safe under ZeRO-3, not under FSDP2")
    return decided("strategy", value, why)
