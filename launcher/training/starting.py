"""The process, as planned: device, process group, precision, and what a sharding engine has to be told in code."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs, TorchDynamoPlugin

from launcher.choices import DEEPSPEED_STRATEGIES
from launcher.errors import Problem, TopologyError
from launcher.memory import CONTEXT_BYTES
from launcher.plan.model import Plan
from launcher.started import find_unknown_rank
from launcher.training.cpu_ranks import enable_cpu_ranks
from launcher.training.loading import DTYPES

# How long a rank waits for the others in a collective before it gives up, behind the watchdog, which can say who is
# waited for. torch's default is half an hour for NCCL's first and every other call; no environment variable sets it.
_BEHIND_WATCHDOG_SECONDS = 120


def start(plan: Plan) -> Accelerator:
    """Plugins, where there are some: plain arguments lose to what stands in the environment."""
    _check_told_apart()
    torch.set_float32_matmul_precision("high" if plan.precision.use_tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = plan.precision.use_tf32
    torch.backends.cudnn.benchmark = True  # tries out convolutions, where a base has any; their shapes are fixed
    _limit_memory(plan)
    on_cpu = plan.hardware.gpu is None
    is_engine = plan.strategy not in ("single", "ddp")
    if on_cpu and is_engine:
        enable_cpu_ranks()
    is_deepspeed = plan.strategy in DEEPSPEED_STRATEGIES
    accelerator = Accelerator(
        # DeepSpeed's own file owns its precision. Accumulation is the loop's; DeepSpeed alone wants to know of it.
        mixed_precision=None if is_deepspeed else plan.precision.mixed_precision,
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=plan.batch.gradient_accumulation_steps if is_deepspeed else 1
        ),
        dynamo_plugin=TorchDynamoPlugin(backend="no"),  # layers are compiled here, as planned
        cpu=on_cpu and not is_engine,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=_make_patience(plan))],
    )
    # A plugin is missing where other files were given than the plan's: check_started tells.
    if plan.strategy == "fsdp2" and getattr(accelerator.state, "fsdp_plugin", None) is not None:
        _set_fsdp_precision(accelerator, plan)
    if is_deepspeed and getattr(accelerator.state, "deepspeed_plugin", None) is not None:
        _fill_deepspeed(accelerator.state.deepspeed_plugin, plan)
    return accelerator


def _limit_memory(plan: Plan) -> None:
    """What torch may allocate of a smaller card: the context, and a desktop, hold the rest."""
    limit = plan.hardware.vram_limit_bytes
    if limit is None or not torch.cuda.is_available():
        return
    usable = limit - CONTEXT_BYTES
    index = int(os.environ.get("LOCAL_RANK", "0"))
    whole = torch.cuda.get_device_properties(index).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, usable / whole), index)


def _make_patience(plan: Plan) -> timedelta:
    return timedelta(seconds=plan.guards.hang_seconds + _BEHIND_WATCHDOG_SECONDS)


def _check_told_apart() -> None:
    """Before anything waits for the others: processes that nobody connected are copies of one training."""
    asked = os.environ.get("WORLD_SIZE", "1")
    missing = find_unknown_rank(os.environ)
    if asked != "1" and missing is not None:
        raise TopologyError(
            "what was started is not what was planned",
            (
                Problem(
                    where="ranks",
                    what=f"WORLD_SIZE is {asked} and {missing} is not set: separate copies, each would train alone",
                ),
            ),
            "start it with the run's own files (command.txt), or unset WORLD_SIZE where it is left over in the shell",
        )


def _set_fsdp_precision(accelerator: Accelerator, plan: Plan) -> None:
    """accelerate's files would reduce gradients in BF16, and round the summed loss to it."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if plan.precision.mixed_precision != "no":
        accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=DTYPES[plan.precision.compute_dtype],
            reduce_dtype=torch.float32,
            output_dtype=None,
            cast_forward_inputs=False,
        )


def _fill_deepspeed(plugin: Any, plan: Plan) -> None:
    """What a preset leaves "auto": accelerate would clip at 1.0, and refuse to start without a micro-batch."""
    batch = plan.batch
    values = {
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.gradient_accumulation_steps,
        "gradient_clipping": plan.optimizer.max_grad_norm or 0.0,
        "train_batch_size": batch.num_slots,
    }
    for name, value in values.items():
        if plugin.deepspeed_config.get(name, "auto") == "auto":
            plugin.deepspeed_config[name] = value
    if plan.hardware.gpu is None:  # a preset for GPUs, tried on CPU ranks, where 16 bits are emulated
        for name in {"bf16", "fp16"} - {plan.precision.mixed_precision}:
            plugin.deepspeed_config.pop(name, None)
    # transformers goes by a copy that accelerate made before: ZeRO-3 would round the base to the preset's BF16.
    plugin.set_deepspeed_weakref()
