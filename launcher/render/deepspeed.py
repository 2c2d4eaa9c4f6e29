"""The JSON that DeepSpeed reads. It owns precision, batch, clipping, ZeRO and offload of a DeepSpeed run.

There is no "optimizer" and no "scheduler" section: the training loop builds both. Sizes are in elements, not in bytes.
"""

from __future__ import annotations

import json

from launcher.core.choices import ZERO_BUCKET_ELEMENTS, ZERO_LIVE_ELEMENTS, Strategy, accumulates_in_fp32
from launcher.render.spec import Auto, LaunchSpec

ZERO_STAGES: dict[Strategy, int] = {"zero1": 1, "zero2": 2, "zero3": 3}

# Smaller parameters stay unsharded on every rank: norms and adapter matrices, where a gather is all latency.
PERSISTENT_ELEMENTS = 100_000
STEPS_PER_PRINT = 1_000_000_000  # never: training reports its own steps


def render_deepspeed(spec: LaunchSpec) -> str:
    """Return the DeepSpeed JSON of a launch spec."""
    config: dict[str, object] = {
        "gradient_accumulation_steps": spec.gradient_accumulation_steps,
        # Always written, 0.0 for none: DeepSpeed clips at 1.0 when the key is absent.
        "gradient_clipping": spec.gradient_clipping,
        "steps_per_print": STEPS_PER_PRINT,
        "train_batch_size": make_train_batch_size(spec),
        "train_micro_batch_size_per_gpu": spec.micro_batch_size,
        "wall_clock_breakdown": False,
        # torch's AdamW is on DeepSpeed's list of tested optimizers; 8-bit AdamW and SGD are not, and work.
        "zero_allow_untested_optimizer": True,
        "zero_optimization": make_zero_section(spec),
    } | make_precision_section(spec)
    if spec.offload != "none":
        # Otherwise accelerate silently replaces the optimizer by DeepSpeedCPUAdam, which compiles C++ at
        # start-up, and DeepSpeed refuses any other. torch's fused AdamW runs on the CPU as well.
        config["zero_force_ds_cpu_optimizer"] = False
    return json.dumps(config, indent=2, sort_keys=True) + "\n"


def make_train_batch_size(spec: LaunchSpec) -> int | Auto:
    """Return DeepSpeed's train_batch_size: micro-batch x accumulation x ranks, even if a step has fewer sequences."""
    if spec.micro_batch_size == "auto" or spec.gradient_accumulation_steps == "auto":
        return "auto"
    return spec.micro_batch_size * spec.gradient_accumulation_steps * spec.num_processes


def make_precision_section(spec: LaunchSpec) -> dict[str, object]:
    """Return the `bf16` or `fp16` section, and the keys that make DeepSpeed sum gradients in FP32, as other engines do.

    Without these keys DeepSpeed sums gradients of ranks and micro-steps in the dtype of the weights.
    """
    if spec.mixed_precision == "no":
        return {}
    section: dict[str, object] = {"communication_data_type": "fp32"}
    if accumulates_in_fp32(spec.strategy, spec.offload):
        section["data_types"] = {"grad_accum_dtype": "fp32"}
    if spec.mixed_precision == "bf16":
        return section | {"bf16": {"enabled": True}}
    dynamic = {"hysteresis": 2, "initial_scale_power": 16, "loss_scale_window": 1000, "min_loss_scale": 1}
    return section | {"fp16": {"enabled": True, "loss_scale": 0, **dynamic}}  # 0: dynamic loss scaling


def make_zero_section(spec: LaunchSpec) -> dict[str, object]:
    """Return the `zero_optimization` section."""
    section: dict[str, object] = {
        "contiguous_gradients": True,
        "overlap_comm": True,
        "reduce_bucket_size": ZERO_BUCKET_ELEMENTS,
        "stage": ZERO_STAGES[spec.strategy],
    }
    if spec.strategy == "zero3":
        section |= {
            "stage3_gather_16bit_weights_on_model_save": True,  # a saved model is complete, not one rank's shard
            "stage3_max_live_parameters": ZERO_LIVE_ELEMENTS,
            "stage3_max_reuse_distance": ZERO_LIVE_ELEMENTS,
            "stage3_param_persistence_threshold": PERSISTENT_ELEMENTS,
            "stage3_prefetch_bucket_size": ZERO_BUCKET_ELEMENTS,
        }
    else:
        section |= {"allgather_bucket_size": ZERO_BUCKET_ELEMENTS, "allgather_partitions": True, "reduce_scatter": True}
    if spec.offload != "none":
        section["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if spec.offload == "optimizer_and_parameters":
        section["offload_param"] = {"device": "cpu", "pin_memory": True}
    return section
