"""Build the Accelerator as planned: device, process group, precision, and settings that FSDP2 and DeepSpeed need."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, GradientAccumulationPlugin, InitProcessGroupKwargs, TorchDynamoPlugin

from launcher.core.choices import DEEPSPEED_STRATEGIES, FSDP_STRATEGIES
from launcher.core.errors import Problem, TopologyError
from launcher.hardware.launch_env import find_missing_rank_variable
from launcher.plan.estimate.memory import CONTEXT_BYTES
from launcher.plan.model import Plan
from launcher.training.model.base_model import DTYPES

# A collective times out this much later than the watchdog, which can name the rank that is waited for. Without it,
# torch's default of up to 30 minutes applies; no environment variable sets it.
_TIMEOUT_AFTER_WATCHDOG_SECONDS = 120


def build_accelerator(plan: Plan) -> Accelerator:
    """Return the Accelerator for a plan. Plugin objects are used because environment variables override arguments."""
    _check_rank_is_known()
    torch.set_float32_matmul_precision("high" if plan.precision.use_tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = plan.precision.use_tf32
    torch.backends.cudnn.benchmark = True  # for bases with convolutions; their shapes are fixed
    _limit_memory(plan)
    on_cpu = plan.hardware.gpu is None
    is_sharded = plan.strategy not in ("single", "ddp")
    if on_cpu and is_sharded:
        _use_gloo_backend()
    is_deepspeed = plan.strategy in DEEPSPEED_STRATEGIES
    if on_cpu and is_deepspeed:
        _skip_shared_memory_collectives()
    timeout = timedelta(seconds=plan.guards.hang_seconds + _TIMEOUT_AFTER_WATCHDOG_SECONDS)
    accelerator = Accelerator(
        # DeepSpeed's config file sets its precision. The loop accumulates gradients; only DeepSpeed must know of it.
        mixed_precision=None if is_deepspeed else plan.precision.mixed_precision,
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=plan.batch.gradient_accumulation_steps if is_deepspeed else 1
        ),
        dynamo_plugin=TorchDynamoPlugin(backend="no"),  # the plan decides what is compiled
        cpu=on_cpu and not is_sharded,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)],
    )
    # A plugin is missing if accelerate got other config files than the plan's; check_accelerator reports that.
    if plan.strategy in FSDP_STRATEGIES and getattr(accelerator.state, "fsdp_plugin", None) is not None:
        _set_fsdp_precision(accelerator, plan)
    if is_deepspeed and getattr(accelerator.state, "deepspeed_plugin", None) is not None:
        _fill_deepspeed_config(accelerator.state.deepspeed_plugin, plan)
        _import_muon_uncompiled()
    return accelerator


def _use_gloo_backend() -> None:
    """Enable FSDP2 and ZeRO on CPU ranks, for tests and rehearsals. Call before the first Accelerator.

    Without this, accelerate with an FSDP or DeepSpeed config on a machine without GPU silently trains separate copies,
    or with cpu=True silently falls back to DDP.
    """
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)


def _skip_shared_memory_collectives() -> None:
    """Keep DeepSpeed from compiling its collectives for CPU ranks, which takes a minute; it then uses gloo's."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__ = {}  # read when DeepSpeed's communication is initialized


def _import_muon_uncompiled() -> None:
    """Import DeepSpeed's Muon with torch.compile disabled, which saves each rank 1.3 seconds for loading the compiler.

    DeepSpeed imports Muon only to check whether the optimizer is of that type.
    """
    from deepspeed.runtime import compiler

    real = compiler.compile
    compiler.compile = lambda *_, **__: lambda function: function
    try:
        with suppress(ImportError):  # another version of DeepSpeed
            import deepspeed.runtime.zero.muon.original_muon  # noqa: F401
    finally:
        compiler.compile = real


def _limit_memory(plan: Plan) -> None:
    """Limit torch's GPU memory to the plan's `vram_limit_bytes`, if set, minus the size of a CUDA context."""
    limit = plan.hardware.vram_limit_bytes
    if limit is None or not torch.cuda.is_available():
        return
    index = int(os.environ.get("LOCAL_RANK", "0"))
    total = torch.cuda.get_device_properties(index).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (limit - CONTEXT_BYTES) / total), index)


def _check_rank_is_known() -> None:
    """Fail early if WORLD_SIZE is set but the rank is not: each process would train a separate copy."""
    world_size = os.environ.get("WORLD_SIZE", "1")
    missing = find_missing_rank_variable(os.environ)
    if world_size != "1" and missing is not None:
        what = f"WORLD_SIZE is {world_size} but {missing} is not set: each process would train a separate copy"
        raise TopologyError(
            "the started processes do not match the plan",
            (Problem(where="ranks", what=what),),
            "use the run's own files (command.txt), or unset WORLD_SIZE if it is left over in the shell",
        )


def _set_fsdp_precision(accelerator: Accelerator, plan: Plan) -> None:
    """Make FSDP2 reduce gradients in FP32; accelerate's config would reduce them, and return the loss, in BF16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if plan.precision.mixed_precision != "no":
        accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=DTYPES[plan.precision.compute_dtype],
            reduce_dtype=torch.float32,
            output_dtype=None,
            cast_forward_inputs=False,
        )


def _fill_deepspeed_config(plugin: Any, plan: Plan) -> None:
    """Replace "auto" in DeepSpeed's config by the plan's values; else accelerate clips at 1.0 or refuses to start."""
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
    if plan.hardware.gpu is None:  # a GPU preset on CPU ranks, where 16-bit arithmetic is emulated
        for name in {"bf16", "fp16"} - {plan.precision.mixed_precision}:
            plugin.deepspeed_config.pop(name, None)
    # transformers reads a copy that accelerate made earlier: ZeRO-3 would round the base to the preset's BF16.
    plugin.set_deepspeed_weakref()
