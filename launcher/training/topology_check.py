"""Compare what accelerate really started with the plan, and report all differences before anything is trained."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.tensor import DTensor

from launcher.core.choices import DEEPSPEED_STRATEGIES, FSDP_STRATEGIES, Strategy
from launcher.core.errors import InputError, Problem, TopologyError
from launcher.hardware.launch_env import read_launch_env
from launcher.plan.model import Plan
from launcher.training.checkpoint.zero_state import is_partitioned
from launcher.training.engine.engine import Engine
from launcher.training.engine.optimizer import needs_chunked_adamw, unwrap_optimizer
from launcher.training.model.base_model import DTYPES

_STAGES: Mapping[Strategy, int] = {"zero1": 1, "zero2": 2, "zero3": 3}


def check_accelerator(plan: Plan, accelerator: Accelerator) -> None:
    """Check the number of processes, the strategy and the device, before the model is built."""
    _raise_if_any(_find_launch_problems(plan, accelerator))


def check_engine(plan: Plan, engine: Engine) -> None:
    """Check parameters, optimizer, accumulation and clipping after accelerate prepared them."""
    _raise_if_any(_find_engine_problems(plan, engine))


def _raise_if_any(problems: Iterator[Problem]) -> None:
    if found := tuple(problems):
        raise TopologyError(
            "the started processes do not match the plan",
            found,
            "start the run with the command in its command.txt, or omit --plan to plan for the started processes",
        )


def _find_launch_problems(plan: Plan, accelerator: Accelerator) -> Iterator[Problem]:
    planned, started = plan.batch.num_ranks, accelerator.num_processes
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if started == 1 and world_size > 1:
        yield Problem(where="ranks", what=f"{world_size} unconnected processes: each would train a separate copy")
    elif started != planned:
        yield Problem(where="ranks", what=f"{started} started, {planned} planned")
    yield from _strategy_problems(plan, accelerator)
    device = "cpu" if plan.hardware.gpu is None else "cuda"
    if accelerator.device.type != device:
        yield Problem(where="device", what=f"{accelerator.device.type} is used, {device} is planned")


def _strategy_problems(plan: Plan, accelerator: Accelerator) -> Iterator[Problem]:
    """Yield a problem if accelerate runs or is configured for an unplanned strategy; CPU ranks run DDP in any case."""
    name, is_single = get_live_strategy(accelerator), accelerator.num_processes == 1
    if name != plan.strategy and not (name == "ddp" and plan.strategy == "single" and is_single):
        yield Problem(where="strategy", what=f"accelerate runs {name}, {plan.strategy} is planned")
        return
    try:
        requested = read_launch_env(os.environ).strategy
    except InputError as error:
        yield Problem(where="strategy", what=error.title)
        return
    if requested not in (plan.strategy, "single" if is_single else "ddp"):
        yield Problem(where="strategy", what=f"accelerate is configured for {requested}, {plan.strategy} is planned")


def get_live_strategy(accelerator: Accelerator) -> str:
    """Return the name that plans use for the running strategy, such as fsdp2, or accelerate's name if there is none."""
    kind = accelerator.distributed_type
    if kind == DistributedType.NO:
        return "single"
    if kind in (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU):
        return "ddp"
    if kind == DistributedType.FSDP:
        if not accelerator.is_fsdp2:
            return "fsdp (version 1)"
        parallelism = accelerator.parallelism_config
        return "hsdp" if parallelism is not None and parallelism.dp_replicate_enabled else "fsdp2"
    if kind == DistributedType.DEEPSPEED:
        return f"zero{accelerator.deepspeed_plugin.zero_stage}"
    return str(kind)


def _find_engine_problems(plan: Plan, engine: Engine) -> Iterator[Problem]:
    parameters = list(engine.module.parameters())
    num_sharded = sum(isinstance(parameter, DTensor) for parameter in parameters)
    num_partitioned = sum(is_partitioned(parameter) for parameter in parameters)
    if num_sharded != (len(parameters) if plan.strategy in FSDP_STRATEGIES else 0):
        yield Problem(where="shards", what=f"{num_sharded} of {len(parameters)} parameters are sharded")
    if num_partitioned != (len(parameters) if plan.strategy == "zero3" else 0):
        yield Problem(where="partitions", what=f"{num_partitioned} of {len(parameters)} parameters are partitioned")
    if plan.strategy == "hsdp":
        yield from _mesh_problems(plan, parameters)
    yield from _dtype_problems(plan, engine)
    yield from _optimizer_problems(plan, engine)
    if plan.strategy in DEEPSPEED_STRATEGIES:
        yield from _deepspeed_problems(plan, engine)


def _mesh_problems(plan: Plan, parameters: list[nn.Parameter]) -> Iterator[Problem]:
    planned = (plan.hardware.nodes, plan.hardware.gpus_per_node)
    for shape in {tuple(p.device_mesh.shape) for p in parameters if isinstance(p, DTensor)} - {planned}:
        yield Problem(where="mesh", what=f"parameters are sharded over a mesh of {shape}, {planned} is planned")


def _dtype_problems(plan: Plan, engine: Engine) -> Iterator[Problem]:
    """Check the dtype of trained weights; DeepSpeed trains 16-bit copies and keeps FP32 master weights itself."""
    has_master_weights = plan.strategy in DEEPSPEED_STRATEGIES
    planned = DTYPES[plan.precision.compute_dtype if has_master_weights else plan.precision.trainable_dtype]
    found = {str(p.dtype) for p in engine.module.parameters() if p.requires_grad and p.dtype != planned}
    if found:
        yield Problem(where="dtype", what=f"trained weights are {', '.join(sorted(found))}, {planned} is planned")


def _optimizer_problems(plan: Plan, engine: Engine) -> Iterator[Problem]:
    inner = unwrap_optimizer(engine.optimizer)
    expected = {"sgd": "SGD", "adamw_bnb_8bit": "AdamW8bit"}.get(plan.optimizer.name, "AdamW")
    if needs_chunked_adamw(plan.optimizer, plan.precision.trainable_dtype):
        expected = "ChunkedAdamW"
    if type(inner).__name__ != expected:
        yield Problem(where="optimizer", what=f"{type(inner).__name__} runs, {expected} is planned")


def _deepspeed_problems(plan: Plan, engine: Engine) -> Iterator[Problem]:
    plugin = engine.accelerator.deepspeed_plugin
    if plugin is None:
        yield Problem(where="engine", what=f"DeepSpeed does not run, {plan.strategy} is planned")
        return
    config = plugin.deepspeed_config
    planned = {
        "gradient_accumulation_steps": plan.batch.gradient_accumulation_steps,
        "train_micro_batch_size_per_gpu": plan.batch.micro_batch_size,
        "gradient_clipping": plan.optimizer.max_grad_norm or 0.0,
    }
    for name, value in planned.items():
        if config.get(name) != value:
            yield Problem(where=name, what=f"DeepSpeed has {config.get(name)}, {value} is planned")
    stage = config.get("zero_optimization", {}).get("stage")
    if stage != _STAGES[plan.strategy]:
        yield Problem(where="stage", what=f"DeepSpeed runs ZeRO-{stage}, ZeRO-{_STAGES[plan.strategy]} is planned")
