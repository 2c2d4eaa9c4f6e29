"""What accelerate really started, against the plan. Every mismatch is told at once, before anything is trained."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor

from launcher.choices import DEEPSPEED_STRATEGIES, Strategy
from launcher.errors import InputError, Problem, TopologyError
from launcher.plan.model import Plan
from launcher.started import find_started
from launcher.training.engine import Engine
from launcher.training.gathering import is_partitioned
from launcher.training.loading import DTYPES
from launcher.training.optim import innermost

_STAGES: Mapping[Strategy, int] = {"zero1": 1, "zero2": 2, "zero3": 3}


def check_started(plan: Plan, accelerator: Accelerator) -> None:
    """Before the model is built: how many processes there are, and what runs them."""
    _raise(_started_problems(plan, accelerator))


def check_prepared(plan: Plan, engine: Engine) -> None:
    """Behind accelerate's preparation: what became of parameters, optimizer, accumulation and clipping."""
    _raise(_prepared_problems(plan, engine))


def _raise(found: Iterator[Problem]) -> None:
    problems = tuple(found)
    if problems:
        raise TopologyError(
            "what was started is not what was planned",
            problems,
            "start it with the run's own files (command.txt), or without --plan, and it is planned for what is there",
        )


def _started_problems(plan: Plan, accelerator: Accelerator) -> Iterator[Problem]:
    wanted, live = plan.batch.num_ranks, accelerator.num_processes
    asked = int(os.environ.get("WORLD_SIZE", "1"))
    if live == 1 and asked > 1:
        yield Problem(where="ranks", what=f"{asked} processes run as separate copies: each of them would train alone")
    elif live != wanted:
        yield Problem(where="ranks", what=f"{live} were started, {wanted} were planned")
    yield from _strategy_problems(plan, accelerator)
    device = "cpu" if plan.hardware.gpu is None else "cuda"
    if accelerator.device.type != device:
        yield Problem(where="device", what=f"it is {accelerator.device.type}, {device} was planned")


def _strategy_problems(plan: Plan, accelerator: Accelerator) -> Iterator[Problem]:
    """What runs, and what was asked for: on CPU ranks accelerate runs DDP whatever engine its file names."""
    name, is_alone = live_strategy(accelerator), accelerator.num_processes == 1
    if name != plan.strategy and not (name == "ddp" and plan.strategy == "single" and is_alone):
        yield Problem(where="strategy", what=f"accelerate runs {name}, {plan.strategy} was planned")
        return
    try:
        told = find_started(os.environ).strategy
    except InputError as error:
        yield Problem(where="strategy", what=error.title)
        return
    if told not in (plan.strategy, "single" if is_alone else "ddp"):
        yield Problem(where="strategy", what=f"accelerate was told to run {told}, {plan.strategy} was planned")


def live_strategy(accelerator: Accelerator) -> str:
    """By our names; accelerate's own where we have none."""
    kind = accelerator.distributed_type
    if kind == DistributedType.NO:
        return "single"
    if kind in (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU):
        return "ddp"
    if kind == DistributedType.FSDP:
        return "fsdp2" if accelerator.is_fsdp2 else "fsdp (version 1)"
    if kind == DistributedType.DEEPSPEED:
        return f"zero{accelerator.deepspeed_plugin.zero_stage}"
    return str(kind)


def _prepared_problems(plan: Plan, engine: Engine) -> Iterator[Problem]:
    parameters = list(engine.module.parameters())
    num_sharded = sum(isinstance(parameter, DTensor) for parameter in parameters)
    num_partitioned = sum(is_partitioned(parameter) for parameter in parameters)
    if num_sharded != (len(parameters) if plan.strategy == "fsdp2" else 0):
        yield Problem(where="shards", what=f"{num_sharded} of {len(parameters)} parameters are sharded")
    if num_partitioned != (len(parameters) if plan.strategy == "zero3" else 0):
        yield Problem(where="partitions", what=f"{num_partitioned} of {len(parameters)} parameters are partitioned")
    yield from _dtype_problems(plan, engine)
    yield from _optimizer_problems(plan, engine)
    if plan.strategy in DEEPSPEED_STRATEGIES:
        yield from _deepspeed_problems(plan, engine)


def _dtype_problems(plan: Plan, engine: Engine) -> Iterator[Problem]:
    """DeepSpeed computes on 16-bit copies and keeps the FP32 weights itself."""
    keeps_masters = plan.strategy in DEEPSPEED_STRATEGIES
    wanted = DTYPES[plan.precision.compute_dtype if keeps_masters else plan.precision.trainable_dtype]
    found = {str(p.dtype) for p in engine.module.parameters() if p.requires_grad and p.dtype != wanted}
    if found:
        yield Problem(where="dtype", what=f"trained weights are {', '.join(sorted(found))}, {wanted} was planned")


def _optimizer_problems(plan: Plan, engine: Engine) -> Iterator[Problem]:
    inner = innermost(engine.optimizer)
    expected = {"sgd": "SGD", "adamw_bnb_8bit": "AdamW8bit"}.get(plan.optimizer.name, "AdamW")
    if type(inner).__name__ != expected:
        yield Problem(where="optimizer", what=f"{type(inner).__name__} runs, {expected} was planned")


def _deepspeed_problems(plan: Plan, engine: Engine) -> Iterator[Problem]:
    plugin = engine.accelerator.deepspeed_plugin
    if plugin is None:
        yield Problem(where="engine", what=f"DeepSpeed does not run, {plan.strategy} was planned")
        return
    config = plugin.deepspeed_config
    wanted = {
        "gradient_accumulation_steps": plan.batch.gradient_accumulation_steps,
        "train_micro_batch_size_per_gpu": plan.batch.micro_batch_size,
        "gradient_clipping": plan.optimizer.max_grad_norm or 0.0,
    }
    for name, value in wanted.items():
        if config.get(name) != value:
            yield Problem(where=name, what=f"DeepSpeed has {config.get(name)}, {value} was planned")
    stage = config.get("zero_optimization", {}).get("stage")
    if stage != _STAGES[plan.strategy]:
        yield Problem(where="stage", what=f"DeepSpeed runs ZeRO-{stage}, ZeRO-{_STAGES[plan.strategy]} was planned")
